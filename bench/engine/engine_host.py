"""What the engine itself costs a step, on a device that takes no time: scheduling, filling arrays, settling tokens, text.

    python -m bench.engine.engine_host [--seqs 128,256] [--requests 2000] [--profile]
    python -m bench.engine.engine_host --seqs 256 --requests 0 --readers wire,asyncio --device-ms 11

First one round of each number of running sequences, in milliseconds a step of decoding. Then the same in a thread of its
own, with a device that takes `--device-ms` a step, where every token is read: `queue` by a thread with a queue for
each request, `wire` by another process, as the server does, `asyncio` by a task for each request. `period` is from one
launch to the next, `cpu` is what of it the engine's thread computes. At last so many requests at once, some cancelled, some
with deadlines, from several threads, with the memory after each round. One JSON document at the end.
"""

from __future__ import annotations

import asyncio
import cProfile
import gc
import itertools
import json
import multiprocessing
import pstats
import random
import resource
import socket
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.shared import command_line
from quarrel.child.wire import Link, Wire
from quarrel.engine import CacheRules, Engine, Loop, Request, SamplingParams, Service, deliver, start, start_async
from quarrel.engine.generation import Generation
from quarrel.gguf import resolve
from quarrel.llm.texts import VocabularyTexts
from quarrel.ops.contract import Compute
from quarrel.ops.step import ExplainLine, Limits, MemoryPlan, Pending, StepInputs, StepOutputs, Want
from quarrel.process.values import chunk_of, chunk_row
from quarrel.tokenizer import load_tokenizer


class NullStep:
    """Any token, known one step late, as from a device; one launch takes `seconds` behind the launch before."""

    compute: Compute = "float32"

    def __init__(self, limits: Limits, vocabulary: int, seconds: float = 0.0) -> None:
        self.limits, self._seconds, self._free = limits, seconds, 0.0
        self.launches: list[
            tuple[float, float]
        ] = []  # when, and what the thread had computed by then: full steps of decoding
        self._tokens = np.random.default_rng(1).integers(300, vocabulary, 4096).astype(np.int32)
        self._at = 0

    def __call__(self, inputs: StepInputs, want: Want) -> StepOutputs:
        self._at = (self._at + 7) % 3000
        return StepOutputs(tokens=self._tokens[self._at : self._at + len(inputs.out_rows)])

    def launch(self, inputs: StepInputs, want: Want) -> Pending:
        now = time.perf_counter()
        if len(inputs.ids) == len(inputs.kv_len) == self.limits.max_seqs:
            self.launches.append((now, time.thread_time()))
        self._free = max(now, self._free) + self._seconds
        return _Late(self(inputs, want), self._free if self._seconds else 0.0)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None: ...

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None: ...

    def explain(self) -> list[ExplainLine]:
        return []

    def memory(self) -> MemoryPlan:
        return MemoryPlan(0, 0, 0, 0)

    def close(self) -> None: ...


class _Late:
    def __init__(self, outputs: StepOutputs, ready: float) -> None:
        self._outputs, self._ready = outputs, ready

    def result(self) -> StepOutputs:
        if (left := self._ready - time.perf_counter()) > 0:
            time.sleep(left)
        return self._outputs


def limits(seqs: int, groups: int = 0) -> Limits:
    return Limits(2048, seqs, 48, seqs * (26 + 8 * groups), 32, window_groups=groups)


def request(tokenizer: Any, prompt: int, tokens: int, seed: int, service: Service | None = None) -> Request:
    ids = tuple((7919 * (i + 131 * seed) + seed) % tokenizer.n_vocab for i in range(prompt))
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    texts = VocabularyTexts(tokenizer)
    return Request(ids, params, 7, frozenset(), 1536, tokenizer.n_vocab, texts, service=service or Service())


def decode(tokenizer: Any, seqs: int, tokens: int, profile: bool, groups: int) -> dict[str, Any]:
    """Milliseconds a step in which so many sequences decode; prompts of 512 tokens run before."""
    rules = CacheRules(window=128, window_groups=groups) if groups else CacheRules()
    engine = Engine(lambda: NullStep(limits(seqs, groups), tokenizer.n_vocab), tokenizer.n_vocab, rules)
    for i in range(seqs):
        engine.add(Generation(request(tokenizer, 512, tokens, i), 0, lambda chunk: None, stream=False))
    began, steps = time.perf_counter(), 0
    while engine.stats.prompt_tokens < 512 * seqs:
        engine.advance()
        steps += 1
    prefill = time.perf_counter() - began
    profiler = cProfile.Profile()
    took: list[float] = []
    busy = time.thread_time()
    while len(engine.scheduler.running) == seqs:
        before = time.perf_counter()
        if profile:
            profiler.enable()
        engine.advance()
        profiler.disable()
        took.append(time.perf_counter() - before)
    busy = time.thread_time() - busy
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(22)
    took.sort()
    milliseconds = {name: round(1e3 * took[int(q * len(took))], 3) for name, q in (("median", 0.5), ("p90", 0.9))}
    milliseconds["cpu"] = round(1e3 * busy / len(took), 3)
    return {"seqs": seqs, "steps": len(took), **milliseconds, "prefill_ms_a_step": round(1e3 * prefill / steps, 3)}


def read(tokenizer: Any, seqs: int, tokens: int, reader: str, device: float) -> dict[str, Any]:
    """Milliseconds from launch to launch where every token of every request is read."""
    loop, made = Loop(), []

    def make() -> NullStep:
        made.append(NullStep(limits(seqs), tokenizer.n_vocab, device / 1e3))
        return made[-1]

    loop.serve(make, tokenizer.n_vocab, CacheRules(), max_waiting=seqs)
    requests = [request(tokenizer, 64, tokens, i) for i in range(seqs)]
    chunks = {"queue": _by_queue, "wire": _by_wire, "asyncio": _by_asyncio}[reader](loop, requests)
    assert chunks == seqs * tokens, chunks
    loop.close()
    launches = made[0].launches
    gaps = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(launches)]
    period, cpu = (round(1e3 * statistics.median(g), 3) for g in zip(*gaps))
    return {"reader": reader, "seqs": seqs, "device": device, "steps": len(gaps), "period": period, "cpu": cpu}


def _by_queue(loop: Loop, requests: list[Request]) -> int:
    streams = [start(loop, r, stream=True) for r in requests]
    return sum(sum(1 for _ in s) for s in streams)


def _by_asyncio(loop: Loop, requests: list[Request]) -> int:
    async def one(request: Request) -> int:
        return sum([1 async for _ in start_async(loop, request, stream=True)])

    async def all_of_them() -> int:
        return sum(await asyncio.gather(*(one(r) for r in requests)))

    return asyncio.run(all_of_them())


def _by_wire(loop: Loop, requests: list[Request]) -> int:
    here, there = socket.socketpair()
    ends, other = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_count, args=(there, other, len(requests)))
    process.start()
    wire = Wire(Link(here))
    for i, asked in enumerate(requests):
        deliver(loop, asked, lambda chunk, i=i: wire.send(*chunk_row(i, chunk)), stream=True)  # type: ignore[misc]
    chunks: int = ends.recv()
    process.join()
    wire.close()
    return chunks


def _count(end: socket.socket, result: Any, left: int) -> None:
    chunks = 0
    for frame in Wire(Link(end)).frames():
        for row in frame:
            chunks += 1
            left -= chunk_of(row).result is not None
        if not left:
            break
    result.send(chunks)


def crowd(tokenizer: Any, requests: int, rounds: int) -> dict[str, Any]:
    """So many requests at once, round after round; memory must not grow once the cache is full."""
    loop = Loop()
    loop.serve(lambda: NullStep(limits(256), tokenizer.n_vocab), tokenizer.n_vocab, CacheRules(), max_waiting=requests)
    memory, seconds, ends = [], [], 0
    for number in range(rounds):
        began = time.perf_counter()
        ends += _round(loop, tokenizer, requests, number)
        seconds.append(time.perf_counter() - began)
        gc.collect()
        memory.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 10)
    assert loop.engine is not None
    stats = loop.engine.stats
    made = {"drawn_tokens": stats.drawn_tokens, "steps": stats.steps, "outcomes": dict(stats.ends)}
    loop.close()
    return {"requests": requests, "ended": ends, "rss_kib": memory, "seconds": [round(s, 2) for s in seconds], **made}


def _round(loop: Loop, tokenizer: Any, requests: int, number: int) -> int:
    done = []

    def caller(first: int) -> None:
        rng = random.Random(first + 97 * number)
        streams = []
        for i in range(first, requests, 8):
            service = Service(priority="batch" if i % 3 else "interactive", total_seconds=60.0)
            asked = request(tokenizer, rng.randrange(1, 600), rng.randrange(1, 120), i, service)
            streams.append(start(loop, asked, stream=bool(i % 2)))
        for i, stream in enumerate(streams):
            if i % 10 == 3:
                stream.cancel()
            done.append(stream.wait().finish_reason)

    threads = [threading.Thread(target=caller, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(done)


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--seqs", default="128,256")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=6, help="of so many requests")
    parser.add_argument("--readers", default="", help="some of queue, wire, asyncio")
    parser.add_argument("--device-ms", type=float, default=11.0)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--window-groups", type=int, default=0, help="of layers with a window of 128 tokens")
    args = parser.parse_args()
    tokenizer = load_tokenizer(resolve("demo").paths[0])
    how = (args.tokens, args.profile, args.window_groups)
    found: dict[str, Any] = {"decode": [decode(tokenizer, int(n), *how) for n in args.seqs.split(",")]}
    if args.readers:
        many = max(int(n) for n in args.seqs.split(","))
        readers = args.readers.split(",")
        found["read"] = [read(tokenizer, many, args.tokens, reader, args.device_ms) for reader in readers]
    if args.requests:
        found["crowd"] = crowd(tokenizer, args.requests, args.rounds)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
