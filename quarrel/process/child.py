"""The process that a model runs in: takes requests from a wire, and gives back what the engine says."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from quarrel.engine import Chunk, Delivery, Request, SamplingParams, Service
from quarrel.errors import QuarrelError
from quarrel.llm import LLM, Structure, load
from quarrel.llm.embeddings import Chunking
from quarrel.process.watch import Beat
from quarrel.process.wire import Json, Wire, chunk_row, packed, plain, typed

STATE_EVERY = 0.1
"""Seconds between two looks at the engine's counters; they are sent where they have changed."""
EXPERTS_EVERY = 20
"""Looks between two at the counts of experts, which wait for the running step."""
PREPARERS = 8
"""Requests that are made ready at once."""
GIVEN_UP = 70
"""The status of a process whose engine can run no more."""
NICE = 5
log = logging.getLogger("quarrel.process")


def main(descriptor: int) -> None:
    """Loads what the first message names, and serves it until the other side closes or is gone."""
    # The process that started this one decides when it ends, also where a terminal or a service manager signals both.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A handler, for what is ignored stays so in processes that this one starts, which it may have to end.
    signal.signal(signal.SIGTERM, lambda *_: None)
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    wire = Wire(socket.socket(fileno=descriptor))
    beat = Beat(wire)
    frames = wire.frames()
    first = next(frames, None)
    if first is None:
        return
    _, source, options = first[0]
    try:
        llm = load(source, **options)
    except QuarrelError as error:
        wire.send("unloaded", packed(error))
        wire.flush(10.0)
        return
    gc.collect()
    gc.freeze()  # what a model consists of is never garbage: to look at it each time would hold tokens up
    if llm.explain().backend == "cpu":
        _step_back()
    child = _Child(llm, wire)
    child.begin()
    beat.llm = llm
    for frame in frames:
        for message in frame:
            if message[0] == "close":
                child.end()
                os._exit(0)  # whatever still waits for an answer gets none
            child.take(message)
    os._exit(0)  # nobody is there to tell anything


def _step_back() -> None:
    """A model that computes on every core leaves the other process the moment that it needs to answer."""
    with contextlib.suppress(OSError):
        if sys.platform == "linux":  # where each thread has a priority of its own
            lower = os.getpriority(os.PRIO_PROCESS, 0) + NICE
            for thread in os.listdir("/proc/self/task"):
                os.setpriority(os.PRIO_PROCESS, int(thread), lower)
        else:
            os.nice(NICE)


class _Child:
    """What runs here for the other side, by the numbers that it gave."""

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
            threading.Thread(target=self._tell, name="quarrel-state", daemon=True),
        ]

    def begin(self) -> None:
        e = self._llm.explain()
        self._wire.send("loaded", plain(e), plain(self._llm.activity()), plain(self._llm.stats()), list(self._llm.adapters))
        for thread in self._threads:
            thread.start()

    def take(self, message: list[Json]) -> None:
        kind, number, *rest = message
        if kind == "submit":
            self._submit(number, *rest)
        elif kind == "cancel":
            delivery = self._running.get(number)
            if delivery is not None:  # it has not ended, which the engine's thread notes at any time
                delivery.cancel()
        elif kind == "drop":
            self._requests.pop(number, None)
        elif kind == "prepare":
            self._preparers.submit(self._prepare, number, *rest)
        elif kind == "embed":
            self._events.call_soon_threadsafe(self._call, number, self._embed, *rest)
        elif kind == "abort":
            self._events.call_soon_threadsafe(self._abort, number)

    def end(self) -> None:
        """Cancels what runs; its last chunks still go out."""
        self._ended.set()
        self._llm.close()
        self._wire.flush(10.0)

    def _submit(self, number: int, stream: int, whole: bool) -> None:
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
            delivery = self._llm.deliver(request, row, self._wire.send_all, stream=not whole)
        except QuarrelError as error:
            self._wire.send("refused", stream, packed(error))
            return
        self._running[stream] = delivery
        if not left:  # it was faster
            self._running.pop(stream, None)

    def _call(self, number: int, kind: Callable[..., Coroutine[Any, Any, Json]], *asked: Json) -> None:
        async def answered() -> None:
            with self._failing(number):
                self._wire.send("done", number, await kind(*asked))

        self._calls[number] = task = self._events.create_task(answered())
        task.add_done_callback(lambda _: self._calls.pop(number))  # also of one that is cancelled before it begins

    def _abort(self, number: int) -> None:
        if number in self._calls:
            self._calls[number].cancel()

    @contextlib.contextmanager
    def _failing(self, number: int) -> Iterator[None]:
        """Whatever is raised is the answer to a call."""
        try:
            yield
        except QuarrelError as error:
            self._wire.send("failed", number, packed(error))
        except Exception as error:
            log.exception("a call failed")
            self._wire.send("failed", number, packed(QuarrelError(f"it failed ({type(error).__name__}): see the log")))

    def _prepare(self, number: int, asked: Json, service: Json, structure: Json, params: Json, options: Json) -> None:
        with self._failing(number):
            given: dict[str, Any] = {
                **asked,
                "params": None if params is None else typed(SamplingParams, params),
                "service": typed(Service, service),
                "structure": None if structure is None else typed(Structure, structure),
                **{name: dict(v) if name == "logit_bias" else v for name, v in options.items()},
            }
            request = self._llm.prepare(**given)
            self._requests[number] = request
            told = [list(request.tokens), plain(request.params), request.seed, sorted(request.stop_ids)]
            self._wire.send("done", number, told)

    async def _embed(self, texts: Json, asked: Json, chunk: Json) -> Json:
        cut = typed(Chunking, chunk) if isinstance(chunk, dict) else chunk
        return plain(await self._llm.aembed(texts, **asked, chunk=cut))

    def _tell(self) -> None:
        """Sends how busy the engine is, and ends the process where it can run no more: a new one can."""
        last: Json = None
        taken: Json = {}
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
                    if counts != taken:
                        self._wire.send("experts", counts)
                        taken = counts
            if self._llm.fault is not None:
                log.error("%s", self._llm.fault)
                self._wire.flush(2.0)
                os._exit(GIVEN_UP)
