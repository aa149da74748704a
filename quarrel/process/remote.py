"""A model in a process of its own, for an event loop: the part of `LLM` that a server needs."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import cached_property
from typing import TYPE_CHECKING, Unpack

from quarrel.child.heartbeat import Watch
from quarrel.child.spawn import spawn
from quarrel.child.wire import Json, Wire, unpack_error
from quarrel.engine import (
    Activity,
    AsyncStream,
    Chunk,
    OutputBuffer,
    Request,
    SamplingParams,
    Stats,
)
from quarrel.engine.loop import CLOSED
from quarrel.engine.queue import Places
from quarrel.errors import EngineLost, QuarrelError
from quarrel.llm import Embeddings, Explanation, GenerateRequest, LoadOptions, load_tokenizer
from quarrel.llm.embeddings import EmbedKeywords, EmbedOptions
from quarrel.llm.requests import Message, PrepareKeywords, Prompt
from quarrel.llm.texts import VocabularyTexts
from quarrel.process.prefixes import RemotePrefixes
from quarrel.process.streams import RemoteRequest, RemoteWork, Stream
from quarrel.process.values import chunk_of, plain, typed

if TYPE_CHECKING:
    from quarrel.llm.embedder import Text

STEP_SECONDS = {"cpu": 1800.0}
"""By backend: on a few cores, a step of many rows of a large model takes minutes."""
STEP_SECONDS_ELSEWHERE = 300.0
CLOSE_SECONDS = 30.0
"""Until a process that was asked to end is killed."""
log = logging.getLogger("quarrel.process")


def open_remote(
    source: str, options: LoadOptions, *, step_seconds: float | None = None, stop: Future[None] | None = None
) -> RemoteLLM:
    """Starts a process and loads a model there; options: those of `quarrel.load`, as JSON holds them.

    step_seconds: what one step may take, and how long the process may be silent, before it is ended; compiling kernels and
    loading weights do not count. By default half an hour on a CPU, five minutes elsewhere. stop: when it is done, loading
    and its process end at once.

    Raises what `quarrel.load` does, and EngineLost if the process ends meanwhile or `stop` is done.
    """
    return RemoteLLM(source, options, step_seconds, stop)


class RemoteLLM:
    """See `LLM`, whose methods these are. Safe for threads.

    When the process ends, or is ended because it makes no progress, everything that runs in it fails with EngineLost, and
    the callbacks of `when_lost` are called. It is not started again here.
    """

    def __init__(
        self,
        source: str,
        options: LoadOptions,
        step_seconds: float | None = None,
        stop: Future[None] | None = None,
    ) -> None:
        plain_options = options.wire()
        self._child = spawn("quarrel.process.worker")
        self._wire = Wire(self._child.link)
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._calls: dict[int, Future[Json]] = {}
        self._streams: dict[int, Stream] = {}
        self._outputs = OutputBuffer()
        self._over: QuarrelError | None = None
        self._closing = False
        self._stuck = 0.0
        self._experts: dict[str, list[int]] = {}
        self._when_lost: list[Callable[[], None]] = []
        loaded: Future[Json] = Future()
        self._calls[0] = loaded
        self._watch = Watch(max(step_seconds or 0.0, STEP_SECONDS["cpu"]), self._end_stuck)
        self._reader = threading.Thread(target=self._read, name="quarrel-remote", daemon=True)
        self._reader.start()
        try:
            self._wire.send("load", source, plain_options)
            wait([loaded, *([stop] if stop is not None else [])], return_when=FIRST_COMPLETED)
            if not loaded.done():
                raise EngineLost("loading the model was stopped: try again when the server has restarted")
            explanation, activity, stats, adapters, defaults = loaded.result()
            try:
                self._explanation = typed(Explanation, explanation)
                self._activity, self._stats = typed(Activity, activity), typed(Stats, stats)
                self.defaults = typed(SamplingParams, defaults)
            except (KeyError, TypeError) as error:
                raise EngineLost(
                    "the model's process runs another version of Quarrel: restart this program after an upgrade"
                ) from error
            self._watch.limit = step_seconds or STEP_SECONDS.get(self._explanation.backend, STEP_SECONDS_ELSEWHERE)
            self.tokenizer = load_tokenizer(source)
            self.adapters: tuple[str, ...] = tuple(adapters)
        except BaseException:
            self.close(timeout=0.0)
            raise
        self.n_ctx = self._explanation.n_ctx
        self._places = Places(self._explanation.max_seqs + options.max_waiting)
        self._texts = VocabularyTexts(self.tokenizer)

    def __repr__(self) -> str:
        return f"RemoteLLM({self._explanation.model!r}, process {self.pid})"

    @property
    def pid(self) -> int:
        """Of the model's process."""
        return self._child.pid

    @property
    def running(self) -> bool:
        """Whether the model's process runs."""
        return self._child.running

    def when_lost(self, callback: Callable[[], None]) -> None:
        """Calls it, on some thread, when the process ends without being closed; at once if it has."""
        with self._lock:
            if self._over is None:
                self._when_lost.append(callback)
                return
            lost = not self._closing
        if lost:
            callback()

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Cancels what runs, waits for the process to end and kills it when that takes longer. May be called twice."""
        with self._lock:
            self._closing = True
        self._wire.send("close")
        self._child.end(timeout)
        if threading.current_thread() is not self._reader:
            self._reader.join()

    def prepare(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        params: SamplingParams | None = None,
        **keywords: Unpack[PrepareKeywords],
    ) -> Request:
        """As `LLM.prepare`. Waits for the model's process."""
        wanted = GenerateRequest.of(PrepareKeywords, keywords, params, self.defaults, prompt=prompt, messages=messages)
        number = next(self._numbers)
        tokens, seed, stop_ids, dropped = self._call("prepare", number, plain(wanted)).result()
        request = RemoteRequest(
            tuple(tokens),
            wanted.params,
            seed,
            frozenset(stop_ids),
            self.n_ctx,
            self.tokenizer.n_vocab,
            self._texts,
            service=wanted.service,
            dropped=dropped,
            number=number,
        )
        weakref.finalize(request, self._wire.send, "drop", number).atexit = False
        return request

    def submit(self, request: Request, *, stream: bool = True) -> AsyncStream:
        """As `LLM.submit`."""
        assert isinstance(request, RemoteRequest)
        number, n = next(self._numbers), request.params.n
        here = Stream(asyncio.get_running_loop(), asyncio.Queue(), request)
        with self._lock:
            if self._over is not None:
                raise self._over
            self._places.take(n, self._stats)
            self._streams[number] = here
            self._wire.send("submit", request.number, number, not stream)
        return AsyncStream(RemoteWork(self._wire, number), n, here.chunks, self)

    async def aembed(self, texts: Text | Sequence[Text], **keywords: Unpack[EmbedKeywords]) -> Embeddings:
        """As `LLM.aembed`."""
        number, options = next(self._numbers), plain(EmbedOptions.of(keywords))
        try:
            made = await asyncio.wrap_future(self._call("embed", number, texts, options))
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

    @cached_property
    def prefixes(self) -> RemotePrefixes:
        """As `LLM.prefixes`."""
        return RemotePrefixes(lambda *message: self._call("prefix", next(self._numbers), *message).result())

    def explain(self) -> Explanation:
        """As `LLM.explain`."""
        return self._explanation

    def expert_counts(self, *, wait: bool = True) -> dict[str, list[int]]:
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
                self._handle(message)
            self._outputs.send()
        self._end()

    def _handle(self, message: list[Json]) -> None:
        kind = message[0]
        if kind == "chunk":
            self._put(message[1], chunk_of(message))
        elif kind == "refused":
            for chunk in self._streams[message[1]].failed(unpack_error(message[2])):
                self._put(message[1], chunk)
        elif kind == "beat":
            self._watch.heard(*message[1:])
        elif kind == "state":
            self._activity, self._stats = typed(Activity, message[1]), typed(Stats, message[2])
        elif kind == "experts":
            self._experts = message[1]
        elif kind == "loaded":
            self._answer(0, message[1:])
        elif kind == "unloaded":
            with self._lock:
                self._closing = True
            self._answer(0, None, unpack_error(message[1]))
        elif kind == "done":
            self._answer(message[1], message[2])
        elif kind == "failed":
            self._answer(message[1], None, unpack_error(message[2]))

    def _put(self, number: int, chunk: Chunk) -> None:
        stream = self._streams[number]
        with self._lock:
            stream.count(chunk)
            if chunk.result is not None:
                self._places.free()
            if not stream.open:
                self._streams.pop(number)
        self._outputs.put(stream.events, stream.chunks, chunk)

    def _answer(self, number: int, value: Json, error: QuarrelError | None = None) -> None:
        with self._lock:
            future = self._calls.pop(number, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def _end_stuck(self, seconds: float) -> None:
        """From the watch: there was no progress for so long."""
        self._stuck = seconds
        log.error("process %d has made no progress for %.0f s and is ended", self.pid, seconds)
        self._child.process.kill()
        self._wire.cut()

    def _cause(self, status: int | None) -> str:
        if self._stuck:
            return f"made no progress for {self._stuck:.0f} s and was ended (step_seconds allows {self._watch.limit:g})"
        if status is None:
            return "closed its connection"
        return f"ended by signal {-status}" if status < 0 else f"ended with status {status}"

    def _end(self) -> None:
        """Fails whatever still waits."""
        self._watch.end()
        status = self._child.end()  # it may have closed the wire and live on
        with self._lock:
            self._over = QuarrelError(CLOSED)
            if not self._closing:
                self._over = EngineLost(f"the model's process {self._cause(status)}: try again when it has been restarted")
            streams, self._streams = self._streams, {}
            calls, self._calls = self._calls, {}
            callbacks, lost = self._when_lost, not self._closing
        for stream in streams.values():
            for chunk in stream.failed(self._over):
                self._outputs.put(stream.events, stream.chunks, chunk)
        self._outputs.send()
        for future in calls.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(self._over)
        self._wire.close()
        if lost:
            log.error("%s", self._over)
            for callback in callbacks:
                callback()
