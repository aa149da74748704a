"""One request's way through the engine: admission, tokenizing, limits, deadline, and an end whatever happens."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request as HTTPRequest
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from quarrel.engine import AsyncStream, Chunk, Priority, Request, Result, Service
from quarrel.errors import EngineLost, QuarrelError
from quarrel.llm import Embeddings
from quarrel.llm.embeddings import Pooling
from quarrel.server.errors import Refused, refused
from quarrel.server.limits import Limiter
from quarrel.server.metrics import Metrics
from quarrel.server.settings import Settings
from quarrel.server.shelf import Model, Shelf
from quarrel.server.traces import Traces

T = TypeVar("T")
Make = Callable[[Model, Service], Sequence[Request]]


@dataclass
class Job:
    """A request that was let in: its streams, one a prompt."""

    model: str
    llm: Model
    requests: Sequence[Request]
    streams: Sequence[AsyncStream]
    closing: Callable[[], bool]
    began: float = field(default_factory=time.perf_counter)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(r.tokens) for r in self.requests)


class Desk:
    """Where requests are taken in. One per application."""

    def __init__(self, shelf: Shelf, settings: Settings, limiter: Limiter, metrics: Metrics, traces: Traces) -> None:
        self.shelf, self.settings, self.limiter, self._metrics, self._traces = shelf, settings, limiter, metrics, traces
        self.closing = False
        self.active = 0
        self._accepted: Counter[str] = Counter()
        self._seconds = 1.0
        """A request's usual time in the model, not in its queue: what a refused caller is told to wait is made of it."""

    @asynccontextmanager
    async def job(
        self,
        caller: str,
        model: str | None,
        make: Make,
        where: str,
        priority: Priority = "interactive",
        *,
        stream: bool = True,
    ) -> AsyncIterator[Job]:
        """Runs what `make` prepares on a thread; leaving the block cancels what has not ended.

        where: the route. stream: False for the last chunks alone.
        """
        if self.closing:
            raise Refused(503, "server_shutdown", "the server is going down: ask again in a moment", retry_after=5.0)
        async with AsyncExitStack() as held:
            held.enter_context(self.limiter.stream(caller))
            name = self.shelf.entry(model).name
            self._metrics.requests.labels(name, where).inc()
            self._check_queue(name)
            self._accepted[name] += 1
            held.callback(self._accepted.subtract, [name])
            llm, requests = await self._prepared(held, name, make, self._service(caller, priority))
            prompt = sum(len(r.tokens) for r in requests)
            wanted = sum((r.params.max_tokens or 0) * r.params.n for r in requests)
            streams: list[AsyncStream] = []
            with self._charged(caller, prompt_tokens=prompt, output_tokens=wanted):
                try:
                    for request in requests:
                        streams.append(llm.submit(request, stream=stream))
                except BaseException:
                    _cancel(streams)
                    raise
            self.active += 1
            job = Job(name, llm, requests, streams, lambda: self.closing)
            try:
                yield job
            finally:
                self.active -= 1
                _cancel(streams)
                self._settle(caller, job, wanted)

    def gate(self, where: str) -> None:
        """Refuses a request that nobody has read yet, where every model's queue is full."""
        names = self.shelf.names
        if self.closing or not names or any(self._waiting(n) < self.settings.queue for n in names):
            return
        self._metrics.requests.labels(names[0], where).inc()
        self._check_queue(names[0])

    async def _prepared(
        self, held: AsyncExitStack, name: str, make: Make, service: Service
    ) -> tuple[Model, Sequence[Request]]:
        """The model, kept until `held` ends, and its requests; once more if its process ended meanwhile."""
        for last in (False, True):
            _, llm = await held.enter_async_context(self.shelf.use(name))
            try:
                return llm, await asyncio.to_thread(make, llm, service)
            except EngineLost:
                if last:
                    raise
                await asyncio.sleep(0.05)  # until the shelf knows
        raise AssertionError("unreachable")

    async def embed(
        self, caller: str, llm: Model, texts: Sequence[Any], dimensions: int | None, pooling: Pooling | None = None
    ) -> Embeddings:
        """Vectors of texts (`LLM.aembed`)."""
        with self.limiter.stream(caller):
            self.limiter.charge(caller, "prompt_tokens", 0)  # how many there are is known behind them: a debt waits
            made = await llm.aembed(texts, dimensions=dimensions, pooling=pooling)
        self.limiter.refund(caller, "prompt_tokens", -made.total_tokens)
        return made

    @contextmanager
    def _charged(self, caller: str, **costs: int) -> Iterator[None]:
        """Charges all of it, and gives all of it back if one is refused, or the block raises."""
        with ExitStack() as back:
            for kind, cost in costs.items():
                self.limiter.charge(caller, kind, cost)
                back.callback(self.limiter.refund, caller, kind, cost)
            yield
            back.pop_all()

    def _service(self, caller: str, priority: Priority) -> Service:
        # Who has a key shares no prompt in the cache with anybody else, and so cannot time what they asked.
        salt = caller if caller.startswith("key ") else ""
        s = self.settings
        return Service(priority=priority, total_seconds=s.timeout, cache_salt=salt, speculate=s.lookup, draft=s.draft_max)

    def _waiting(self, name: str) -> int:
        return self._accepted[name] - self.settings.max_seqs

    def _check_queue(self, name: str) -> None:
        waiting = self._waiting(name)
        if waiting >= self.settings.queue:
            self._metrics.full.labels(name).inc()
            wait = max(1.0, self._seconds * waiting / max(1, self.settings.max_seqs))
            message = f"{waiting} requests wait for {name} already: try again in {wait:.0f} s"
            raise Refused(503, "queue_full", message, retry_after=wait)

    def _settle(self, caller: str, job: Job, wanted: int) -> None:
        results = [s.result for s in job.streams]
        used = sum(_tokens(r) for r in results if r is not None)
        self.limiter.refund(caller, "output_tokens", max(0, wanted - used))
        for result in results:
            reason = "cancelled" if result is None else result.finish_reason
            self._metrics.asked.labels(job.model, "success" if reason in ("stop", "length") else reason).inc()
        self._traces.generated(job.model, job.began, [r for r in results if r is not None])
        self._metrics.seconds.labels(job.model).observe(time.perf_counter() - job.began)
        self._metrics.tokens.inc(used)
        self._metrics.typed_tokens.labels(job.model, "generated").inc(used)
        self._metrics.typed_tokens.labels(job.model, "prompt").inc(job.prompt_tokens)
        if used:
            queued = max(r.timings.queued for r in results if r is not None)
            self._seconds += 0.1 * (max(0.0, time.perf_counter() - job.began - queued) - self._seconds)


class Streamed(StreamingResponse):
    """An answer in pieces. What `held` holds, its job, ends with it, also if nobody is there for the first one."""

    def __init__(self, held: AsyncExitStack, pieces: AsyncIterator[str], media: str, headers: Mapping[str, str]) -> None:
        super().__init__(pieces, media_type=media, headers=headers)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            await super().__call__(scope, receive, send)


async def bursts(job: Job, which: int, timeout: float) -> AsyncIterator[list[Chunk]]:
    """The chunks of one stream, those together that are there together: one, or more where the server is busy.

    A request that takes longer than the server allows ends with `Refused`.
    """
    end = job.began + timeout
    stream = job.streams[which]
    while True:
        try:
            async with asyncio.timeout(max(0.0, end - time.perf_counter())):
                chunk = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise Refused(504, "timeout", f"the request took more than {timeout:g} s and was ended") from error
        burst: list[Chunk] = []
        more: Chunk | None = chunk
        while more is not None:
            if (failure := _failure(more, job)) is not None:
                if burst:
                    yield burst
                raise failure
            burst.append(more)
            more = stream.ready()
        yield burst


def _failure(chunk: Chunk, job: Job) -> QuarrelError | None:
    reason = chunk.result.finish_reason if chunk.result is not None else None
    if reason == "cancelled" and job.closing():
        return Refused(503, "server_shutdown", "the server went down before the answer was complete")
    if reason == "error" and chunk.result is not None:
        return refused(chunk.result.failure or QuarrelError(chunk.result.error or "the model failed"))
    return None


async def chunks(job: Job, which: int, timeout: float) -> AsyncIterator[Chunk]:
    """As `bursts`, one by one."""
    async for burst in bursts(job, which, timeout):
        for chunk in burst:
            yield chunk


async def results(job: Job, timeout: float) -> list[Result]:
    """Every stream's result."""
    for i in range(len(job.streams)):
        async for _ in chunks(job, i, timeout):
            pass
    found = [s.result for s in job.streams]
    return [r for r in found if r is not None]


async def unless_gone(request: HTTPRequest, work: Awaitable[T]) -> T:
    """The work's result; the caller going away cancels it, also where nothing is written until the end."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Refused(499, "client_gone", "the caller has gone")
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _gone(request: HTTPRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _cancel(streams: Sequence[AsyncStream]) -> None:
    for stream in streams:
        stream.cancel()


def _tokens(result: Result) -> int:
    return result.usage.completion_tokens + sum(r.usage.completion_tokens for r in result.alternatives)
