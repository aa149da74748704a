"""A model in another process, as an event loop uses one: the part of `LLM` that a server needs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Unpack

from quarrel.engine import (
    Activity,
    AsyncStream,
    Chunk,
    Outbox,
    Request,
    Sampling,
    SamplingParams,
    Service,
    Stats,
)
from quarrel.engine.loop import CLOSED, MAX_WAITING, SOONEST
from quarrel.engine.service import DEFAULT_SERVICE
from quarrel.errors import EngineLost, QuarrelError, QueueFull
from quarrel.llm import Chunking, Embeddings, Explanation, Structure, load_tokenizer
from quarrel.llm.embeddings import Pooling
from quarrel.llm.texts import VocabularyTexts
from quarrel.process.reading import Placed, Reading, Work
from quarrel.process.watch import STEP_SECONDS, STEP_SECONDS_ELSEWHERE, Watch
from quarrel.process.wire import Json, Wire, chunk_of, plain, typed, unpacked

_START = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.path[:] = json.loads(sys.argv[1])
from quarrel.process.child import main
main(int(sys.argv[2]))
"""
ENDING = 10.0
"""Seconds until a process that was killed is given up, while a driver still holds it."""
CLOSING = 30.0
"""Seconds that the other process may take to end by itself."""
log = logging.getLogger("quarrel.process")


def open_remote(
    source: str, options: Mapping[str, Any], *, step_seconds: float | None = None, stop: Future[None] | None = None
) -> RemoteLLM:
    """Starts a process and loads a model there; options: those of `quarrel.load`, as JSON holds them.

    step_seconds: what one step may take, and how long the process may be silent, before it is ended; not counting what
    compiles kernels or loads weights. By default half an hour on a CPU, five minutes elsewhere. stop: ends the loading at
    once, and its process, when it is done.

    Raises what `quarrel.load` does, and EngineLost if the process ends meanwhile or `stop` is done.
    """
    return RemoteLLM(source, options, step_seconds, stop)


class RemoteLLM:
    """See `LLM`, whose methods these are. Safe for threads.

    A process that ends by itself, or is ended because it does not get on, fails whatever runs in it with EngineLost, calls
    what `when_lost` was given, and is not started again here.
    """

    def __init__(
        self,
        source: str,
        options: Mapping[str, Any],
        step_seconds: float | None = None,
        stop: Future[None] | None = None,
    ) -> None:
        here, there = socket.socketpair()
        with there:
            command = [sys.executable, "-c", _START, json.dumps(sys.path), str(there.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL)
        self._wire = Wire(here)
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._calls: dict[int, Future[Json]] = {}
        self._streams: dict[int, Reading] = {}
        self._outbox = Outbox()
        self._over: QuarrelError | None = None
        self._closing = False
        self._stuck = 0.0
        self._experts: dict[str, list[int]] = {}
        self._told: list[Callable[[], None]] = []
        loaded: Future[Json] = Future()
        self._calls[0] = loaded
        self._watch = Watch(max(step_seconds or 0.0, STEP_SECONDS["cpu"]), self._give_up)
        self._reader = threading.Thread(target=self._read, name="quarrel-remote", daemon=True)
        self._reader.start()
        try:
            self._wire.send("load", source, dict(options))
            wait([loaded, *([stop] if stop is not None else [])], return_when=FIRST_COMPLETED)
            if not loaded.done():
                raise EngineLost("the loading of the model was stopped: ask again when the server runs anew")
            explanation, activity, stats, adapters = loaded.result()
            try:
                self._explanation = typed(Explanation, explanation)
                self._activity, self._stats = typed(Activity, activity), typed(Stats, stats)
            except (KeyError, TypeError) as error:
                raise EngineLost(
                    "the model's process does not speak as this one does: start it anew, if Quarrel was upgraded meanwhile"
                ) from error
            self._watch.limit = step_seconds or STEP_SECONDS.get(self._explanation.backend, STEP_SECONDS_ELSEWHERE)
            self.tokenizer = load_tokenizer(source)
            self.adapters: tuple[str, ...] = tuple(adapters)
        except BaseException:
            self.close(timeout=0.0)
            raise
        self.n_ctx = self._explanation.n_ctx
        self._most = self._explanation.max_seqs + int(options.get("max_waiting", MAX_WAITING))
        self._texts = VocabularyTexts(self.tokenizer)

    def __repr__(self) -> str:
        return f"RemoteLLM({self._explanation.model!r}, process {self.pid})"

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def when_lost(self, callback: Callable[[], None]) -> None:
        """Calls it, on some thread, if the process ends without being closed; at once if it has."""
        with self._lock:
            if self._over is None:
                self._told.append(callback)
                return
            lost = not self._closing
        if lost:
            callback()

    def close(self, timeout: float = CLOSING) -> None:
        """Cancels what runs, waits for the process and ends it if it takes longer. May be called twice."""
        with self._lock:
            self._closing = True
        self._wire.send("close")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        if self._process.poll() is None:
            self._process.kill()
        if threading.current_thread() is not self._reader:
            self._reader.join()

    def prepare(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Mapping[str, object]] | None = None,
        params: SamplingParams | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        template: str | None = None,
        template_kwargs: Mapping[str, bool | str] | None = None,
        service: Service = DEFAULT_SERVICE,
        structure: Structure | None = None,
        adapter: str | None = None,
        **options: Unpack[Sampling],
    ) -> Request:
        """As `LLM.prepare`. Waits for the other process."""
        asked = {
            "prompt": prompt,
            "messages": messages,
            "tools": tools,
            "template": template,
            "template_kwargs": template_kwargs,
            "adapter": adapter,
        }
        kept = {name: plain(value) for name, value in options.items()}
        number = next(self._numbers)
        sent = (asked, plain(service), plain(structure), plain(params), kept)
        tokens, settled, seed, stop_ids = self._call("prepare", number, *sent).result()
        request = Placed(
            tuple(tokens),
            typed(SamplingParams, settled),
            seed,
            frozenset(stop_ids),
            self.n_ctx,
            self.tokenizer.n_vocab,
            self._texts,
            service=service,
            number=number,
        )
        weakref.finalize(request, self._wire.send, "drop", number).atexit = False
        return request

    def submit(self, request: Request, *, stream: bool = True) -> AsyncStream:
        """As `LLM.submit`."""
        assert isinstance(request, Placed)
        number, n = next(self._numbers), request.params.n
        chunks: asyncio.Queue[Chunk] = asyncio.Queue()
        reading = Reading(asyncio.get_running_loop(), chunks, request, set(range(n)), [0] * n)
        with self._lock:
            if self._over is not None:
                raise self._over
            alive = sum(len(r.open) for r in self._streams.values())
            if alive + n > self._most:
                after = max(self._stats.end_interval * (alive + n - self._most), SOONEST)
                raise QueueFull(f"{alive} requests run or wait already, of at most {self._most}: try again later", after)
            self._streams[number] = reading
            self._wire.send("submit", request.number, number, not stream)
        return AsyncStream(Work(self._wire, number), n, chunks, self)

    async def aembed(
        self,
        texts: str | Sequence[int] | Sequence[str | Sequence[int]],
        *,
        normalize: bool = True,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        prefix: str | None = None,
        chunk: Chunking | int | None = None,
    ) -> Embeddings:
        """As `LLM.aembed`."""
        asked = {"normalize": normalize, "pooling": pooling, "dimensions": dimensions, "prefix": prefix}
        number = next(self._numbers)
        try:
            made = await asyncio.wrap_future(self._call("embed", number, texts, asked, plain(chunk)))
        except asyncio.CancelledError:
            self._wire.send("abort", number)
            raise
        return typed(Embeddings, made)

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """As `LLM.tokenize`, in this process."""
        return self.tokenizer.encode(text, add_special, parse_special)

    def detokenize(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """As `LLM.detokenize`, in this process."""
        return self.tokenizer.decode(ids, skip_special)

    def explain(self) -> Explanation:
        """As `LLM.explain`."""
        return self._explanation

    def expert_counts(self) -> dict[str, list[int]]:
        """As `LLM.expert_counts`, a few seconds ago."""
        return self._experts

    def stats(self) -> Stats:
        """As `LLM.stats`, a tenth of a second ago."""
        return self._stats

    def activity(self) -> Activity:
        """As `LLM.activity`, a tenth of a second ago."""
        return self._activity

    def _call(self, kind: str, number: int, *rest: Json) -> Future[Json]:
        future: Future[Json] = Future()
        with self._lock:
            if self._over is not None:
                raise self._over
            self._calls[number] = future
            self._wire.send(kind, number, *rest)
        return future

    def _read(self) -> None:
        for frame in self._wire.frames():
            for message in frame:
                self._take(message)
            self._outbox.send()
        self._end()

    def _take(self, message: list[Json]) -> None:
        kind = message[0]
        if kind == "chunk":
            reading = self._streams[message[1]]
            chunk = chunk_of(message)
            self._note(message[1], reading, chunk)
            self._outbox.put(reading.events, reading.chunks, chunk)
        elif kind == "refused":
            reading, error = self._streams[message[1]], unpacked(message[2])
            for chunk in reading.failed(error):
                self._note(message[1], reading, chunk)
                self._outbox.put(reading.events, reading.chunks, chunk)
        elif kind == "beat":
            self._watch.heard(message[1])
        elif kind == "state":
            self._activity, self._stats = typed(Activity, message[1]), typed(Stats, message[2])
        elif kind == "experts":
            self._experts = message[1]
        elif kind == "loaded":
            self._settle(0, message[1:])
        elif kind == "unloaded":
            with self._lock:
                self._closing = True
            self._settle(0, None, unpacked(message[1]))
        elif kind == "done":
            self._settle(message[1], message[2])
        elif kind == "failed":
            self._settle(message[1], None, unpacked(message[2]))

    def _note(self, number: int, reading: Reading, chunk: Chunk) -> None:
        with self._lock:
            reading.note(chunk)
            if not reading.open:
                self._streams.pop(number, None)

    def _settle(self, number: int, value: Json, error: QuarrelError | None = None) -> None:
        with self._lock:
            future = self._calls.pop(number, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def _give_up(self, seconds: float) -> None:
        """From the watch: nothing has gone on for so long."""
        self._stuck = seconds
        log.error("process %d has not got on for %.0f s and is ended", self.pid, seconds)
        self._process.kill()
        self._wire.cut()

    def _how(self, status: int | None) -> str:
        if self._stuck:
            return f"did not get on for {self._stuck:.0f} s and was ended (step_seconds allows {self._watch.limit:g})"
        if status is None:
            return "closed its connection"
        return f"ended by signal {-status}" if status < 0 else f"ended with status {status}"

    def _end(self) -> None:
        """Nobody is left waiting."""
        self._watch.end()
        self._process.kill()  # it may have closed the wire and live on
        status = None
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it for good
            status = self._process.wait(ENDING)
        with self._lock:
            self._over = QuarrelError(CLOSED)
            if not self._closing:
                self._over = EngineLost(f"the model's process {self._how(status)}: ask again when it has been started anew")
            streams, self._streams = self._streams, {}
            calls, self._calls = self._calls, {}
            told, lost = self._told, not self._closing
        for reading in streams.values():
            for chunk in reading.failed(self._over):
                self._outbox.put(reading.events, reading.chunks, chunk)
        self._outbox.send()
        for future in calls.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(self._over)
        self._wire.close()
        if lost:
            log.error("%s", self._over)
            for callback in told:
                callback()
