"""Streams of a model in another process: what runs there, and where its chunks go here."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from quarrel.engine import Chunk, Request, Result, Timings, Usage
from quarrel.errors import QuarrelError
from quarrel.process.wire import Wire


@dataclass(frozen=True, eq=False)
class Placed(Request):
    """A request that is over there, under a number."""

    number: int = 0


@dataclass(frozen=True)
class Work:
    """A stream over there."""

    wire: Wire
    number: int

    def cancel(self) -> None:
        self.wire.send("cancel", self.number)


@dataclass
class Reading:
    """A stream's end here: chunks go into `chunks`, on the event loop that reads them."""

    events: asyncio.AbstractEventLoop
    chunks: asyncio.Queue[Chunk]
    request: Request
    open: set[int]
    made: list[int] = field(default_factory=list)

    def note(self, chunk: Chunk) -> None:
        if chunk.token_id is not None:
            self.made[chunk.index] += 1
        if chunk.result is not None:
            self.open.discard(chunk.index)

    def failed(self, error: QuarrelError) -> list[Chunk]:
        """The last chunks of what is not done."""
        return [Chunk("", index=i, result=self._failure(i, error)) for i in sorted(self.open)]

    def _failure(self, index: int, error: QuarrelError) -> Result:
        usage = Usage(len(self.request.tokens), self.made[index])
        timings = Timings(self.request.load_seconds, 0.0, 0.0, 0.0, 0, 0)
        return Result("", (), "error", usage, timings, self.request.seed, error=str(error), failure=error)
