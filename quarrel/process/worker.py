"""The process that a model runs in: takes requests from a wire, and sends back what the engine generates."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from quarrel.child.heartbeat import Heart
from quarrel.child.phase import PhaseClock
from quarrel.child.spawn import link_of
from quarrel.child.wire import Json, Wire, pack_error
from quarrel.engine import Chunk, Delivery, Request
from quarrel.errors import QuarrelError
from quarrel.llm import LLM, GenerateRequest, load
from quarrel.llm.embeddings import EmbedOptions
from quarrel.process.values import chunk_row, plain, typed

STATE_EVERY = 0.1
"""Seconds between two looks at the engine's counters; they are sent when they have changed."""
EXPERTS_EVERY = 20
"""Looks between two at the counts of experts, which wait for the running step."""
PREPARERS = 32
"""Requests that are prepared at once."""
EXIT_FAULT = 70
"""The exit status of a process whose engine stopped for good."""
NICE = 5
log = logging.getLogger("quarrel.process")


def main(descriptor: int) -> None:
    """Loads what the first message names, and serves it until the parent closes the link or is gone."""
    # A handler, because an ignored signal stays ignored in processes that this one starts, and may have to end.
    signal.signal(signal.SIGTERM, lambda *_: None)
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    wire = Wire(link_of(descriptor))
    heart = Heart(PhaseClock("loading"), lambda phase, seconds: wire.send("beat", phase, seconds))
    frames = wire.frames()
    first = next(frames, None)
    if first is None:
        return
    _, source, options = first[0]
    gc.disable()  # what is made while a model is loaded stays
    try:
        llm = load(source, **options)
    except QuarrelError as error:
        wire.send("unloaded", pack_error(error))
        wire.flush(10.0)
        return
    gc.collect()
    gc.freeze()  # a model's own objects are never garbage: looking at them each time would delay tokens
    gc.enable()
    if llm.explain().backend == "cpu":
        _step_back()
    worker = _Worker(llm, wire)
    worker.begin()
    heart.clock = llm.phase
    for frame in frames:
        for message in frame:
            if message[0] == "close":
                worker.end()
                os._exit(0)  # calls that have no answer yet get none
            worker.handle(message)
    os._exit(0)  # the parent is gone


def _step_back() -> None:
    """A model that computes on every core must leave the parent the moment that it needs to answer."""
    with contextlib.suppress(OSError):
        if sys.platform == "linux":  # where each thread has a priority of its own
            lower = os.getpriority(os.PRIO_PROCESS, 0) + NICE
            for thread in os.listdir("/proc/self/task"):
                os.setpriority(os.PRIO_PROCESS, int(thread), lower)
        else:
            os.nice(NICE)


class _Worker:
    """What runs here for the parent, by the numbers that it chose."""

    def __init__(self, llm: LLM, wire: Wire) -> None:
        self._llm, self._wire = llm, wire
        self._requests: dict[int, Request] = {}
        self._running: dict[int, Delivery] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._ended = threading.Event()
        self._events = asyncio.new_event_loop()
        self._preparers = ThreadPoolExecutor(PREPARERS, "quarrel-prepare")
        self._threads = [
            threading.Thread(target=self._events.run_forever, name="quarrel-calls", daemon=True),
            threading.Thread(target=self._report, name="quarrel-state", daemon=True),
        ]

    def begin(self) -> None:
        e = self._llm.explain()
        busy = plain(self._llm.activity()), plain(self._llm.stats())
        self._wire.send("loaded", plain(e), *busy, list(self._llm.adapters), plain(self._llm.defaults))
        for thread in self._threads:
            thread.start()

    def handle(self, message: list[Json]) -> None:
        kind, number, *rest = message
        if kind == "submit":
            self._submit(number, *rest)
        elif kind == "cancel":
            delivery = self._running.get(number)
            if delivery is not None:  # it may have ended, which the engine's thread notes at any time
                delivery.cancel()
        elif kind == "drop":
            self._requests.pop(number, None)
        elif kind == "prepare":
            self._preparers.submit(self._prepare, number, *rest)
        elif kind == "prefix":
            self._preparers.submit(self._prefix, number, *rest)
        elif kind == "embed":
            self._events.call_soon_threadsafe(self._call, number, self._embed, *rest)
        elif kind == "abort":
            self._events.call_soon_threadsafe(self._abort, number)

    def end(self) -> None:
        """Cancels what runs; the last chunks are still sent."""
        self._ended.set()
        self._llm.close()
        self._wire.flush(10.0)

    def _submit(self, number: int, stream: int, last_only: bool) -> None:
        request = self._requests[number]
        left = request.params.n

        def row(chunk: Chunk) -> list[Json]:
            nonlocal left
            if chunk.result is not None:
                left -= 1
                if not left:
                    self._running.pop(stream, None)
            return chunk_row(stream, chunk)

        try:
            delivery = self._llm.deliver(request, row, self._wire.send_all, stream=not last_only)
        except QuarrelError as error:
            self._wire.send("refused", stream, pack_error(error))
            return
        self._running[stream] = delivery
        if not left:  # it has ended already
            self._running.pop(stream, None)

    def _call(self, number: int, call: Callable[..., Coroutine[Any, Any, Json]], *arguments: Json) -> None:
        async def answer() -> None:
            with self._failing(number):
                self._wire.send("done", number, await call(*arguments))

        self._calls[number] = task = self._events.create_task(answer())
        task.add_done_callback(lambda _: self._calls.pop(number))  # also where it is cancelled before it begins

    def _abort(self, number: int) -> None:
        if number in self._calls:
            self._calls[number].cancel()

    @contextlib.contextmanager
    def _failing(self, number: int) -> Iterator[None]:
        """An error in the block is the answer to a call."""
        try:
            yield
        except QuarrelError as error:
            self._wire.send("failed", number, pack_error(error))
        except Exception as error:
            log.exception("a call failed")
            self._wire.send("failed", number, pack_error(QuarrelError(f"it failed ({type(error).__name__}): see the log")))

    def _prepare(self, number: int, request: Json) -> None:
        with self._failing(number):
            prepared = self._llm.prepare_request(typed(GenerateRequest, request))
            self._requests[number] = prepared
            ids, stop_ids = list(prepared.tokens), sorted(prepared.stop_ids)
            self._wire.send("done", number, [ids, prepared.seed, stop_ids, prepared.dropped])

    def _prefix(self, number: int, method: str, arguments: Json, keywords: Json) -> None:
        with self._failing(number):
            own = self._llm.prefixes
            methods: dict[str, Callable[..., Json]] = {"save": own.save, "restore": own.restore, "forget": own.forget}
            self._wire.send("done", number, methods[method](*arguments, **keywords))

    async def _embed(self, texts: Json, options: Json) -> Json:
        keywords: Any = vars(typed(EmbedOptions, options))
        return plain(await self._llm.aembed(texts, **keywords))

    def _report(self) -> None:
        """Sends how busy the engine is, and ends the process when the engine has stopped for good: a new one can run."""
        last: Json = None
        last_counts: Json = {}
        looks = 0
        while not self._ended.wait(STATE_EVERY):
            state = [plain(self._llm.activity()), plain(self._llm.stats())]
            if state != last:
                self._wire.send("state", *state)
                last = state
            looks += 1
            if looks % EXPERTS_EVERY == 0:
                with contextlib.suppress(QuarrelError):  # it has just ended
                    counts = self._llm.expert_counts()
                    if counts != last_counts:
                        self._wire.send("experts", counts)
                        last_counts = counts
            if self._llm.fault is not None:
                log.error("%s", self._llm.fault)
                self._wire.flush(2.0)
                os._exit(EXIT_FAULT)
