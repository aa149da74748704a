"""What a model wrote, taken apart while it comes: thoughts, text, calls of tools. One for every protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quarrel.llm import Model
from quarrel.llm.thinking import TAGS, opened_by
from quarrel.server import formats, harmony
from quarrel.server.call_parts import CallPart
from quarrel.server.calls import CallSplitter
from quarrel.server.formats import Call
from quarrel.server.thoughts import Thoughts
from quarrel.server.tools import schemas_of


@dataclass(frozen=True)
class Pieces:
    """What is certain with a piece of text."""

    thought: str = ""
    text: str = ""
    calls: Sequence[Call] = ()
    """Those that are whole, or cut at the end."""
    parts: Sequence[CallPart] = ()
    """The same as they come: each in one part, or in pieces."""


@dataclass(frozen=True)
class Reading:
    """How answers to a request are read.

    tools: those that may be called. forced: the answer has to be a call. shaped: it keeps to a structure from its first
    token, so that nothing is thought. thoughts: False leaves them in the text. shown: further control tokens to be seen.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    forced: bool = False
    shaped: bool = False
    thoughts: bool = True
    shown: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Control tokens that have to be seen in the text."""
        thought = {*harmony.TAGS, *(tag for pair in TAGS for tag in pair)} if self.thoughts else ()
        return tuple(sorted({*self.shown, *thought, *(formats.TAGS if self.tools else ())}))

    def reader(self, llm: Model, tokens: Sequence[int], *, in_parts: bool = False) -> Reader:
        """For one answer. tokens: the prompt's."""
        channels = self.thoughts and speaks_harmony(llm)
        close = opened_by(lambda ids: llm.detokenize(ids, False), tokens)
        return Reader(self, close, channels=channels, in_parts=in_parts)


@dataclass
class Reader:
    """Of one answer. close: the tag that ends a thought which the prompt began. channels: it is in harmony's. in_parts:
    calls come in pieces, as soon as they can be nothing else."""

    reading: Reading
    close: str | None = None
    channels: bool = False
    in_parts: bool = False
    thought: str = field(default="", init=False)
    """All that was thought so far."""

    def __post_init__(self) -> None:
        functions = schemas_of(self.reading.tools)
        self._calls = CallSplitter(functions, forced=self.reading.forced, in_parts=self.in_parts) if functions else None
        self._channels = harmony.Channels(functions, in_parts=self.in_parts) if self.channels else None
        self._thoughts = Thoughts(self.close, whole=self.reading.shaped or not self.reading.thoughts)
        self.count = 0
        """Calls so far."""

    def thought_tokens(self, llm: Model) -> int:
        """About how many tokens were thoughts."""
        return len(llm.tokenize(self.thought, False)) if self.thought else 0

    def push(self, text: str, *, last: bool = False) -> Pieces:
        """last: nothing comes behind it."""
        calls, parts = list[Call](), list[CallPart]()
        if self._channels is not None:
            said = self._channels.push(text, last=last)
            thought, text, calls, parts = said.thought, said.text, said.calls, said.parts
        else:
            thought, text = self._thoughts.push(text, last=last)
        if self._calls is not None:
            text, more = self._calls.push(text, last=last)
            before = 0 if self._channels is None else self._channels.count
            calls, parts = calls + more, parts + [replace(p, index=p.index + before) for p in self._calls.parts]
        self.thought += thought
        self.count += len(calls)
        return Pieces(thought, text, calls, parts)


def speaks_harmony(llm: Model) -> bool:
    """Whether the model's turns have channels."""
    id = llm.tokenizer.token_id(harmony.CHANNEL)
    return id is not None and llm.tokenizer.token_id(harmony.MESSAGE) is not None
