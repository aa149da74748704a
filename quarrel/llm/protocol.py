"""A loaded model as a server uses it, in this process (`LLM`) or in one of its own (`RemoteLLM`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, Unpack

from quarrel.engine import Activity, AsyncStream, Request, SamplingParams, Stats
from quarrel.llm.embeddings import Embeddings, EmbedKeywords
from quarrel.llm.explain import Explanation
from quarrel.llm.requests import Message, PrepareKeywords, Prompt
from quarrel.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quarrel.llm.embedder import Text


class KeepsPrefixes(Protocol):
    """What a model's cache has of texts, into files and back. `llm.saved.Prefixes` documents the methods."""

    def save(
        self, tokens: Sequence[int], path: str | os.PathLike[str], *, salt: str = "", adapter: str | None = None
    ) -> tuple[int, int]: ...

    def restore(
        self, path: str | os.PathLike[str], *, salt: str = "", adapter: str | None = None
    ) -> tuple[list[int], int]: ...

    def forget(self, tokens: Sequence[int], *, shared: int = 0, salt: str = "", adapter: str | None = None) -> None: ...


class Model(Protocol):
    """Safe for threads. `LLM` documents the methods."""

    tokenizer: Tokenizer
    n_ctx: int
    adapters: tuple[str, ...]
    defaults: SamplingParams

    def prepare(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        params: SamplingParams | None = None,
        **keywords: Unpack[PrepareKeywords],
    ) -> Request: ...

    def submit(self, request: Request, *, stream: bool = True) -> AsyncStream: ...

    async def aembed(self, texts: Text | Sequence[Text], **keywords: Unpack[EmbedKeywords]) -> Embeddings: ...

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]: ...

    def detokenize(self, ids: Sequence[int], skip_special: bool = True) -> str: ...

    @property
    def prefixes(self) -> KeepsPrefixes: ...

    def explain(self) -> Explanation: ...

    def stats(self) -> Stats: ...

    def activity(self) -> Activity: ...

    def expert_counts(self, *, wait: bool = True) -> dict[str, list[int]]: ...

    def when_lost(self, callback: Callable[[], None]) -> None:
        """Calls it, on some thread, if the model's process ends without being closed; at once if it has."""

    def close(self) -> None: ...
