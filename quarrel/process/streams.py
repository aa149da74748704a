"""Streams of a model in another process: what the other process has of a request, and where its chunks go in this one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from quarrel.child.wire import Wire
from quarrel.engine import Chunk, Request, Result, Timings, Usage
from quarrel.errors import QuarrelError


@dataclass(frozen=True, eq=False)
class RemoteRequest(Request):
    """A request that the other process keeps under a number."""

    number: int = 0


@dataclass(frozen=True)
class RemoteWork:
    """A stream that runs in the other process under a number."""

    wire: Wire
    number: int

    def cancel(self) -> None:
        self.wire.send("cancel", self.number)


@dataclass
class Stream:
    """Where the chunks of a stream go: into `chunks`, on the event loop that reads them."""

    events: asyncio.AbstractEventLoop
    chunks: asyncio.Queue[Chunk]
    request: Request
    open: set[int] = field(init=False)
    """Continuations without a result yet."""
    generated: list[int] = field(init=False)
    """Tokens so far, by continuation."""

    def __post_init__(self) -> None:
        self.open, self.generated = set(range(self.request.params.n)), [0] * self.request.params.n

    def count(self, chunk: Chunk) -> None:
        if chunk.token_id is not None:
            self.generated[chunk.index] += 1
        if chunk.result is not None:
            self.open.discard(chunk.index)

    def failed(self, error: QuarrelError) -> list[Chunk]:
        """The last chunks of the open continuations."""
        return [Chunk("", index=i, result=self._failure(i, error)) for i in sorted(self.open)]

    def _failure(self, index: int, error: QuarrelError) -> Result:
        usage = Usage(len(self.request.tokens), self.generated[index])
        timings = Timings(self.request.load_seconds, 0.0, 0.0, 0.0, 0, 0)
        return Result("", (), "error", usage, timings, self.request.seed, error=str(error), failure=error)
