"""What a model wrote, taken apart while it comes: thoughts, text, calls of tools. One for every protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quarrel.llm import Model
from quarrel.server import formats, harmony
from quarrel.server.calls import CallSplitter
from quarrel.server.formats import Call
from quarrel.server.thoughts import TAGS, Thoughts, opened_by
from quarrel.server.tools import schemas_of


@dataclass(frozen=True)
class Pieces:
    """What is certain with a piece of text."""

    thought: str = ""
    text: str = ""
    calls: Sequence[Call] = ()


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

    def reader(self, llm: Model, tokens: Sequence[int]) -> Reader:
        """For one answer. tokens: the prompt's."""
        return Reader(self, opened_by(llm, tokens), channels=self.thoughts and speaks_harmony(llm))


@dataclass
class Reader:
    """Of one answer. close: the tag that ends a thought which the prompt began. channels: it is in harmony's."""

    reading: Reading
    close: str | None = None
    channels: bool = False
    thought: str = field(default="", init=False)
    """All that was thought so far."""

    def __post_init__(self) -> None:
        functions = schemas_of(self.reading.tools)
        self._calls = CallSplitter(functions, forced=self.reading.forced) if functions else None
        self._channels = harmony.Channels(functions) if self.channels else None
        self._thoughts = Thoughts(self.close, whole=self.reading.shaped or not self.reading.thoughts)
        self.count = 0
        """Calls so far."""

    def thought_tokens(self, llm: Model) -> int:
        """About how many tokens were thoughts."""
        return len(llm.tokenize(self.thought, False)) if self.thought else 0

    def push(self, text: str, *, last: bool = False) -> Pieces:
        """last: nothing comes behind it."""
        calls = list[Call]()
        if self._channels is not None:
            said = self._channels.push(text, last=last)
            thought, text, calls = said.thought, said.text, said.calls
        else:
            thought, text = self._thoughts.push(text, last=last)
        if self._calls is not None:
            text, more = self._calls.push(text, last=last)
            calls += more
        self.thought += thought
        self.count += len(calls)
        return Pieces(thought, text, calls)


def speaks_harmony(llm: Model) -> bool:
    """Whether the model's turns have channels."""
    id = llm.tokenizer.token_id(harmony.CHANNEL)
    return id is not None and llm.tokenizer.token_id(harmony.MESSAGE) is not None
