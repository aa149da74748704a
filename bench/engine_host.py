"""What the engine itself costs a step, on a device that takes no time: scheduling, filling arrays, settling tokens, text.

    python bench/engine_host.py [--seqs 128,256] [--requests 2000] [--profile]

First one round of each number of running sequences, in milliseconds a step of decoding; then so many requests at once, some
cancelled, some with deadlines, from several threads, with the memory before and after. One JSON document at the end.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import random
import resource
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from quarrel.engine import CacheRules, Engine, Loop, Request, SamplingParams, Service, start  # noqa: E402
from quarrel.engine.generation import Generation  # noqa: E402
from quarrel.gguf import resolve  # noqa: E402
from quarrel.ops.contract import Compute  # noqa: E402
from quarrel.ops.step import Limits, MemoryPlan, Pending, StepInputs, StepOutputs, Taken, Want  # noqa: E402
from quarrel.tokenizer import load_tokenizer  # noqa: E402


class NullStep:
    """Any token, at once, but told of one step late, as by a device."""

    compute: Compute = "float32"

    def __init__(self, limits: Limits, vocabulary: int) -> None:
        self.limits = limits
        self._tokens = np.random.default_rng(1).integers(300, vocabulary, 4096).astype(np.int32)
        self._at = 0

    def __call__(self, inputs: StepInputs, want: Want) -> StepOutputs:
        self._at = (self._at + 7) % 3000
        return StepOutputs(tokens=self._tokens[self._at : self._at + len(inputs.out_rows)])

    def launch(self, inputs: StepInputs, want: Want) -> Pending:
        return _Late(self(inputs, want))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None: ...

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None: ...

    def explain(self) -> list[Taken]:
        return []

    def memory(self) -> MemoryPlan:
        return MemoryPlan(0, 0, 0, 0)

    def close(self) -> None: ...


class _Late:
    def __init__(self, outputs: StepOutputs) -> None:
        self._outputs = outputs

    def result(self) -> StepOutputs:
        return self._outputs


def limits(seqs: int) -> Limits:
    return Limits(2048, seqs, 48, seqs * 26, 32)


def request(tokenizer: Any, prompt: int, tokens: int, seed: int, service: Service | None = None) -> Request:
    ids = tuple((7919 * (i + 131 * seed) + seed) % tokenizer.n_vocab for i in range(prompt))
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return Request(ids, params, 7, frozenset(), 1536, tokenizer.n_vocab, tokenizer, service=service or Service())


def decode(tokenizer: Any, seqs: int, tokens: int, profile: bool) -> dict[str, Any]:
    """Milliseconds a step in which so many sequences decode; prompts of 512 tokens run before."""
    engine = Engine(lambda: NullStep(limits(seqs), tokenizer.n_vocab), tokenizer.n_vocab, CacheRules())
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


def crowd(tokenizer: Any, requests: int) -> dict[str, Any]:
    """So many requests at once, round after round; memory must not grow once the cache is full."""
    loop = Loop()
    loop.serve(lambda: NullStep(limits(256), tokenizer.n_vocab), tokenizer.n_vocab, CacheRules(), max_waiting=requests)
    memory, seconds, ends = [], [], 0
    for number in range(6):
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqs", default="128,256")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    tokenizer = load_tokenizer(resolve("demo").paths[0])
    found: dict[str, Any] = {"decode": [decode(tokenizer, int(n), args.tokens, args.profile) for n in args.seqs.split(",")]}
    if args.requests:
        found["crowd"] = crowd(tokenizer, args.requests)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
