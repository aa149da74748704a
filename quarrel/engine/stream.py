"""Chunks as they come, for callers that wait with a thread or with an event loop."""

from __future__ import annotations

import queue
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from quarrel.engine.generation import Generation, Request
from quarrel.engine.loop import Loop
from quarrel.engine.results import Chunk, Result

if TYPE_CHECKING:
    import asyncio


class _Gathering:
    """The results of one prompt's continuations, joined when the last one is there."""

    def __init__(self, count: int) -> None:
        self._results: list[Result | None] = [None] * count
        self.left = count

    def add(self, chunk: Chunk) -> None:
        if chunk.result is not None:
            self._results[chunk.index] = chunk.result
            self.left -= 1

    @property
    def result(self) -> Result | None:
        done = [r for r in self._results if r is not None]
        if self.left:
            return None
        return done[0] if len(done) == 1 else replace(done[0], alternatives=tuple(done[1:]))


def start(loop: Loop, request: Request, *, stream: bool, owner: object = None) -> Stream:
    """Queues all continuations of a request. What comes keeps `owner` alive, whose end could be the loop's."""
    chunks: queue.SimpleQueue[Chunk] = queue.SimpleQueue()
    sequences = [Generation(request, i, chunks.put, stream=stream) for i in range(request.params.n)]
    loop.add(*sequences)
    return Stream(loop, sequences, chunks, owner)


class Stream(Iterator[Chunk]):
    """An iterator of chunks. Closing it, leaving its `with` block or dropping it cancels what is not done.

    `result` is the final `Result`, once the last chunk is out or the stream is closed.
    """

    def __init__(
        self, loop: Loop, sequences: Sequence[Generation], chunks: queue.SimpleQueue[Chunk], owner: object = None
    ) -> None:
        self._loop, self._sequences, self._chunks, self._owner = loop, sequences, chunks, owner
        self._gathering = _Gathering(len(sequences))

    @property
    def result(self) -> Result | None:
        return self._gathering.result

    @property
    def prompt_tokens(self) -> int:
        """How many the prompt has."""
        return self._sequences[0].n_prompt

    def __next__(self) -> Chunk:
        if not self._gathering.left:
            raise StopIteration
        chunk = self._chunks.get()
        self._gathering.add(chunk)
        return chunk

    def cancel(self) -> None:
        """Asks for an end; the remaining chunks, with the result, still come."""
        if self._gathering.left:
            self._loop.cancel(*self._sequences)

    def close(self) -> None:
        """Cancels, and waits for the result."""
        self.cancel()
        for _ in self:
            pass

    def wait(self) -> Result:
        """Reads to the end. An interrupt (Ctrl-C) cancels the work and is raised on."""
        try:
            for _ in self:
                pass
        except BaseException:
            self.cancel()
            raise
        assert self.result is not None
        return self.result

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.cancel()


def start_async(loop: Loop, request: Request, *, stream: bool, owner: object = None) -> AsyncStream:
    """As `start`, for the event loop that is running."""
    import asyncio  # only here: it takes long, and calls without an event loop need none of it

    chunks: asyncio.Queue[Chunk] = asyncio.Queue()
    events = asyncio.get_running_loop()

    def sink(chunk: Chunk) -> None:
        if events.is_closed():
            raise RuntimeError("the event loop that reads this is closed")
        loop.outputs.put(events, chunks, chunk)

    delivery = deliver(loop, request, sink, stream=stream)
    return AsyncStream(delivery, request.params.n, chunks, owner)


def deliver(loop: Loop, request: Request, sink: Callable[[Chunk], None], *, stream: bool) -> Delivery:
    """As `start`, with chunks handed to `sink` on the engine's thread, which waits for it: it must be quick."""
    sequences = [Generation(request, i, sink, stream=stream) for i in range(request.params.n)]
    loop.add(*sequences)
    return Delivery(loop, sequences)


class Delivery:
    """Work whose chunks go to a function. Dropping it does not end it."""

    def __init__(self, loop: Loop, sequences: Sequence[Generation]) -> None:
        self._loop, self.sequences = loop, sequences

    def cancel(self) -> None:
        """Asks for an end; the remaining chunks, with the result, still come."""
        self._loop.cancel(*self.sequences)


class Work(Protocol):
    """What a stream comes from."""

    def cancel(self) -> None: ...


class AsyncStream(AsyncIterator[Chunk]):
    """An asynchronous iterator of chunks. Cancelling the task that reads it, `aclose` or dropping it cancels the work."""

    def __init__(self, work: Work, count: int, chunks: asyncio.Queue[Chunk], owner: object = None) -> None:
        self._work, self._chunks, self._owner = work, chunks, owner
        self._gathering = _Gathering(count)

    @property
    def result(self) -> Result | None:
        return self._gathering.result

    async def __anext__(self) -> Chunk:
        if not self._gathering.left:
            raise StopAsyncIteration
        try:
            chunk = await self._chunks.get()
        except BaseException:  # the task that reads is cancelled
            self.cancel()
            raise
        self._gathering.add(chunk)
        return chunk

    def ready(self) -> Chunk | None:
        """The next chunk if it is there already; None is not the end."""
        if not self._gathering.left or self._chunks.empty():
            return None
        chunk = self._chunks.get_nowait()
        self._gathering.add(chunk)
        return chunk

    def cancel(self) -> None:
        """Asks for an end; the remaining chunks, with the result, still come."""
        if self._gathering.left:
            self._work.cancel()

    async def aclose(self) -> None:
        """Cancels, and waits for the result."""
        self.cancel()
        await self.wait()

    async def wait(self) -> Result:
        """Reads to the end."""
        async for _ in self:
            pass
        assert self.result is not None
        return self.result

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self.cancel()
