"""The way of a request to a model: limits and queue, tokenizing, submission, its stream, and an end whatever happens."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from quarrel.engine import AsyncStream, Chunk, Priority, Request, Result, Service, Stats
from quarrel.engine.queue import retry_after
from quarrel.errors import EngineLost, QuarrelError
from quarrel.llm import Embeddings, Model
from quarrel.llm.embeddings import Pooling
from quarrel.server.errors import Refused, refused
from quarrel.server.metrics import Metrics
from quarrel.server.models import ModelManager
from quarrel.server.settings import Settings
from quarrel.server.shared_limits import Limits
from quarrel.server.traces import Traces

T = TypeVar("T")
Prepare = Callable[[Model, Service], Sequence[Request]]


@dataclass
class Generation:
    """An admitted request: its streams, one for each prompt."""

    model: str
    llm: Model
    requests: Sequence[Request]
    streams: Sequence[AsyncStream]
    closing: Callable[[], bool]
    began: float = field(default_factory=time.perf_counter)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(r.tokens) for r in self.requests)


class Dispatcher:
    """Admits requests and hands them to their models. One per application."""

    def __init__(self, models: ModelManager, settings: Settings, limits: Limits, metrics: Metrics, traces: Traces) -> None:
        self.models, self.settings, self.limits, self._metrics, self.traces = models, settings, limits, metrics, traces
        self.reading = asyncio.Semaphore()
        """Who has it parses a large body."""
        self.closing = False
        self.active = 0
        self._accepted: Counter[str] = Counter()

    @asynccontextmanager
    async def admit(
        self,
        caller: str,
        model: str | None,
        prepare: Prepare,
        where: str,
        priority: Priority = "interactive",
        *,
        stream: bool = True,
    ) -> AsyncIterator[Generation]:
        """Submits what `prepare` makes, on a thread, of the model; leaving the block cancels what has not ended.

        where: the route. stream: False for the last chunks alone.
        """
        if self.closing:
            raise Refused(503, "server_shutdown", "the server is going down: ask again in a moment", retry_after=5.0)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.limits.stream(caller))
            made, entry = self.models.named(model)
            name = entry.name
            self._metrics.requests.labels(name, where).inc()
            self._check_queue(name)
            self._accepted[name] += 1
            stack.callback(self._accepted.subtract, [name])
            llm, requests = await self._prepared(stack, made.name, prepare, self.service(caller, priority))
            prompt = sum(len(r.tokens) for r in requests)
            wanted = sum((r.params.max_tokens or 0) * r.params.n for r in requests)
            streams: list[AsyncStream] = []
            async with self._charged(caller, prompt_tokens=prompt, output_tokens=wanted):
                try:
                    for request in requests:
                        streams.append(llm.submit(request, stream=stream))
                except BaseException:
                    _cancel(streams)
                    raise
            self.active += 1
            generation = Generation(made.name, llm, requests, streams, lambda: self.closing)
            try:
                yield generation
            finally:
                self.active -= 1
                _cancel(streams)
                self._record(caller, generation, wanted)

    def check_capacity(self, where: str) -> None:
        """Refuses a request before it is read, where the only model's queue is full. Of several models, the request says
        whose queue it waits for, and so when to come back."""
        names = self.models.names
        if self.closing or len(names) != 1 or self._waiting(names[0]) < self.settings.queue:
            return
        self._metrics.requests.labels(names[0], where).inc()
        self._check_queue(names[0])

    async def _prepared(
        self, stack: AsyncExitStack, name: str, prepare: Prepare, service: Service
    ) -> tuple[Model, Sequence[Request]]:
        """The model, kept until `stack` ends, and its requests; once more if its process ended meanwhile."""
        for last in (False, True):
            _, llm = await stack.enter_async_context(self.models.use(name))
            try:
                return llm, await asyncio.to_thread(prepare, llm, service)
            except EngineLost:
                if last:
                    raise
                await asyncio.sleep(0.05)  # until its end has been noticed
        raise AssertionError("unreachable")

    async def embed(
        self,
        caller: str,
        llm: Model,
        texts: Sequence[Any],
        dimensions: int | None,
        pooling: Pooling | None = None,
        *,
        normalize: bool = True,
    ) -> Embeddings:
        """Vectors of texts (`LLM.aembed`)."""
        async with self.limits.stream(caller):
            await self.limits.charge(caller, "prompt_tokens", 0)  # how many there are is known behind them: a debt waits
            made = await llm.aembed(texts, dimensions=dimensions, pooling=pooling, normalize=normalize)
        self.limits.refund(caller, "prompt_tokens", -made.total_tokens)
        return made

    @asynccontextmanager
    async def _charged(self, caller: str, **costs: int) -> AsyncIterator[None]:
        """Charges all of it, and gives all of it back if one is refused, or the block raises."""
        with ExitStack() as back:
            for kind, cost in costs.items():
                await self.limits.charge(caller, kind, cost)
                back.callback(self.limits.refund, caller, kind, cost)
            yield
            back.pop_all()

    def service(self, caller: str, priority: Priority = "interactive") -> Service:
        """How requests of a caller are served."""
        # A caller with a key shares no cached prompt with anybody else, and so cannot time what others sent.
        salt = caller if caller.startswith("key ") else ""
        s = self.settings
        return Service(priority=priority, total_seconds=s.timeout, cache_salt=salt, speculate=s.lookup, draft=s.draft_max)

    def _waiting(self, name: str) -> int:
        return self._accepted[name] - self.settings.max_seqs

    def _check_queue(self, name: str) -> None:
        waiting = self._waiting(name)
        if waiting >= self.settings.queue:
            self._metrics.full.labels(name).inc()
            loaded = self.models.entry(name).loaded
            wait = retry_after(Stats() if loaded is None else loaded.llm.stats(), waiting - self.settings.queue + 1)
            message = f"{waiting} requests wait for {name} already: try again in {wait:.2g} s"
            raise Refused(503, "queue_full", message, retry_after=wait)

    def _record(self, caller: str, generation: Generation, wanted: int) -> None:
        results = [s.result for s in generation.streams]
        used = sum(_tokens(r) for r in results if r is not None)
        self.limits.refund(caller, "output_tokens", max(0, wanted - used))
        for result in results:
            reason = "cancelled" if result is None else result.finish_reason
            self._metrics.generations.labels(generation.model, "success" if reason in ("stop", "length") else reason).inc()
        self.traces.generated(generation.model, generation.began, [r for r in results if r is not None])
        self._metrics.seconds.labels(generation.model).observe(time.perf_counter() - generation.began)
        self._metrics.tokens.inc(used)
        self._metrics.typed_tokens.labels(generation.model, "generated").inc(used)
        self._metrics.typed_tokens.labels(generation.model, "prompt").inc(generation.prompt_tokens)


class StreamedResponse(StreamingResponse):
    """An answer in pieces. `stack`, with its generation, ends with it, also if the caller left before the first piece."""

    def __init__(self, stack: AsyncExitStack, pieces: AsyncIterator[str], media: str, headers: Mapping[str, str]) -> None:
        super().__init__(pieces, media_type=media, headers=headers)
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._stack:
            await super().__call__(scope, receive, send)


Admission = AbstractAsyncContextManager[Generation]
"""What `Dispatcher.admit` returns; nothing happens before it is entered."""


async def answer_whole(
    request: HTTPRequest,
    admission: Admission,
    timeout: float,
    answer_of: Callable[[Generation, list[Result]], dict[str, Any]],
    headers: Mapping[str, str],
) -> Response:
    """One JSON answer of all results. The generation is cancelled when the caller disconnects."""

    async def work() -> dict[str, Any]:
        async with admission as generation:
            return answer_of(generation, await results(generation, timeout))

    return JSONResponse(await cancel_on_disconnect(request, work()), headers=headers)


async def answer_stream(
    admission: Admission,
    pieces_of: Callable[[Generation], AsyncIterator[str]],
    failure: Callable[[Refused], str],
    media: str,
    headers: Mapping[str, str],
) -> Response:
    """An answer in pieces; `failure` is the last one of a generation that fails.

    Admitted before the answer begins, so that a refusal before the first token has a status of its own.
    """
    stack = AsyncExitStack()
    generation = await stack.enter_async_context(admission)

    async def pieces() -> AsyncIterator[str]:
        try:
            async for piece in pieces_of(generation):
                yield piece
        except QuarrelError as error:
            yield failure(refused(error))

    return StreamedResponse(stack, pieces(), media, headers)


async def bursts(generation: Generation, which: int, timeout: float) -> AsyncIterator[list[Chunk]]:
    """The chunks of one stream, in lists of those that are ready at once: one, or more where the server is busy.

    A request that takes longer than the server allows ends with `Refused`.
    """
    end = generation.began + timeout
    stream = generation.streams[which]
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
            if (failure := _failure(more, generation)) is not None:
                if burst:
                    yield burst
                raise failure
            burst.append(more)
            more = stream.ready()
        yield burst


def _failure(chunk: Chunk, generation: Generation) -> QuarrelError | None:
    reason = chunk.result.finish_reason if chunk.result is not None else None
    if reason == "cancelled" and generation.closing():
        return Refused(503, "server_shutdown", "the server went down before the answer was complete")
    if reason == "error" and chunk.result is not None:
        return refused(chunk.result.failure or QuarrelError(chunk.result.error or "the model failed"))
    return None


async def chunks(generation: Generation, which: int, timeout: float) -> AsyncIterator[Chunk]:
    """As `bursts`, one by one."""
    async for burst in bursts(generation, which, timeout):
        for chunk in burst:
            yield chunk


async def results(generation: Generation, timeout: float) -> list[Result]:
    """Every stream's result."""
    for i in range(len(generation.streams)):
        async for _ in chunks(generation, i, timeout):
            pass
    found = [s.result for s in generation.streams]
    return [r for r in found if r is not None]


async def cancel_on_disconnect(request: HTTPRequest, work: Awaitable[T]) -> T:
    """The work's result. It is cancelled when the caller disconnects, also where nothing is written until the end."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Refused(499, "client_disconnected", "the caller has gone")
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(request: HTTPRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _cancel(streams: Sequence[AsyncStream]) -> None:
    for stream in streams:
        stream.cancel()


def _tokens(result: Result) -> int:
    return result.usage.completion_tokens + sum(r.usage.completion_tokens for r in result.alternatives)
