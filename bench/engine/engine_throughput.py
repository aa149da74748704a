"""Offline throughput through the whole engine: many requests at once, prompts and answers of a fixed length.

    python -m bench.engine.engine_throughput MODEL.gguf --out RESULTS.jsonl [--requests 256 --prompt 512 --tokens 256]
        [--seqs 128,256] [--kv-cache auto,fp8] [--deterministic 0,1] [--sampling '{}' '{"repetition_penalty": 1.1}']

A line of JSON for each number of sequences that run at once and each way to load. Speeds are of the second round; the first
one compiles kernels and captures graphs. `output` counts generated tokens over all the time, prompts included; `decode`
counts those of steps that ran no prompt, over the time of these. `full` leaves out the tail, in which one sequence after
the other ends: only steps in which all `seqs` took part. Text is made too, as a caller gets it.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.shared import command_line
from quarrel.bench.precompile import jobs_for, precompile
from quarrel.bench.workload import Test
from quarrel.llm import LLM, load
from quarrel.ops.registry import backend


@dataclass(frozen=True)
class Load:
    """Requests that are submitted at once, and how many of them run together."""

    requests: int
    prompt: int
    tokens: int
    seqs: int


def prompts_of(llm: LLM, work: Load) -> list[list[int]]:
    """All different from the first token on, so that no prefix is shared."""
    n = llm.spec.n_vocab
    return [[(7919 * (i + 131 * s) + s + 1) % n for i in range(work.prompt)] for s in range(work.requests)]


def run(llm: LLM, work: Load, sampling: dict[str, Any]) -> dict[str, Any]:
    """One round; figures of the whole, of decoding alone, and of the caller's waits."""
    before, stats = snapshot(llm), llm.stats()
    with Watched(llm) as watched:
        began = time.perf_counter()
        how = {"temperature": 0, "max_tokens": work.tokens, "ignore_eos": True} | sampling
        results = llm.generate(prompts_of(llm, work), **how)
        seconds = time.perf_counter() - began
    after = snapshot(llm)
    bad = [r.error for r in results if r.error]
    if bad:
        raise SystemExit(f"{len(bad)} requests failed, the first so: {bad[0]}")
    spent = {name: after[name] - before[name] for name in after}
    drawn = sum(len(r.token_ids) for r in results)
    assert drawn == work.requests * work.tokens, drawn
    decode = [r.timings.decode for r in results]
    return {
        "seconds": round(seconds, 3),
        "output_tokens_s": round(drawn / seconds, 1),
        "all_tokens_s": round((drawn + work.requests * work.prompt) / seconds, 1),
        "decode_tokens_s": round(spent["decode_tokens"] / spent["decode_seconds"], 1) if spent["decode_seconds"] else None,
        "full_tokens_s": full_speed(watched.seen, work.seqs),
        "decode_steps": spent["decode_steps"],
        "mean_decode_step_ms": round(1e3 * spent["decode_seconds"] / max(1, spent["decode_steps"]), 3),
        "steps": spent["steps"],
        "prefill_seconds": round(spent["prefill_seconds"], 3),
        "decode_seconds": round(spent["decode_seconds"], 3),
        "preempted": llm.activity().preempted,
        "ttft_s": round(sorted(r.timings.queued + r.timings.prefill for r in results)[len(results) // 2], 3),
        "tokens_s_a_request": round(work.tokens * len(decode) / max(sum(decode), 1e-9), 1),
        "restarts": stats.restarts,
    }


def snapshot(llm: LLM) -> dict[str, float]:
    s = llm.stats()
    names = ("steps", "prefill_seconds", "decode_seconds", "decode_steps", "decode_tokens")
    return {name: getattr(s, name) for name in names}


class Watched:
    """What has been decoded so far, looked at all the time."""

    PAUSE = 0.004
    """Seconds: a step of 128 sequences takes two or three times that."""

    def __init__(self, llm: LLM) -> None:
        self.seen: list[dict[str, float]] = []
        self._llm, self._over = llm, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self.PAUSE):
            self.seen.append(snapshot(self._llm))


def full_speed(seen: Sequence[dict[str, float]], seqs: int) -> float | None:
    """Tokens a second between those looks between which every step had a token of each of `seqs` sequences."""
    tokens = seconds = 0.0
    for earlier, later in pairwise(seen):
        spent = {name: later[name] - earlier[name] for name in later}
        if spent["decode_steps"] == spent["steps"] > 0 and spent["decode_tokens"] == seqs * spent["decode_steps"]:
            tokens += spent["decode_tokens"]
            seconds += spent["decode_seconds"]
    return round(tokens / seconds, 1) if seconds else None


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--seqs", default="128,256")
    parser.add_argument("--kv-cache", default="auto", help="several, separated by commas, are loaded one after the other")
    parser.add_argument("--deterministic", default="0", help="0, 1 or 0,1")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--sampling", nargs="*", default=["{}"], help="JSON of sampling parameters, several one after the other"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile kernels first")
    parser.add_argument("--seconds", type=float, default=1e9, help="nothing begins after this")
    args = parser.parse_args()
    began = time.perf_counter()
    seqs = [int(n) for n in args.seqs.split(",")]
    if args.jobs > 1:
        tests = [Test("decode", args.tokens, args.prompt, n) for n in (1, 2, 4, 8, 16, 32, 64, *seqs)]
        tests += [Test("prefill", 2048), Test("prefill", 100), Test("prefill", args.prompt)]
        rows = backend(args.backend).step_tokens
        shares = [
            replace(job, deterministic=mode == "1")
            for mode in args.deterministic.split(",")
            for job in jobs_for(args.model, args.backend, "auto", rows, tests, False, args.jobs)
        ]
        print(f"kernels compiled in {precompile(shares, args.jobs, args.seconds / 2):.1f} s", flush=True)
    for deterministic in args.deterministic.split(","):
        for kv in args.kv_cache.split(","):
            for n in seqs:
                if time.perf_counter() - began > args.seconds:
                    print("the time is over")
                    return 0
                work = Load(args.requests, args.prompt, args.tokens, n)
                options = {"kv_cache": kv} if kv != "auto" else {}
                options |= {"deterministic": True} if deterministic == "1" else {}
                measure(args, work, options)
    return 0


def measure(args: argparse.Namespace, work: Load, options: dict[str, Any]) -> None:
    unknown = options.keys() - inspect.signature(load).parameters.keys()
    if unknown:
        raise SystemExit(f"this version cannot be loaded with {', '.join(unknown)}")
    length = work.prompt + work.tokens
    loading = time.perf_counter()
    with load(args.model, backend=args.backend, n_ctx=length, max_seqs=work.seqs, prefix_cache=False, **options) as llm:
        explained = llm.explain()
        base = {"model": Path(args.model).stem, "backend": explained.backend, "device": explained.device, **asdict(work)}
        base |= {"compute": explained.compute, **options, "load_s": round(time.perf_counter() - loading, 1)}
        base |= {"cache_tokens": explained.cache_tokens, "step_tokens": llm.explain().plan.limits.max_tokens}
        for i, sampling in ((i, json.loads(text)) for text in args.sampling for i in range(args.rounds)):
            row = {**base, "sampling": sampling, "round": i, **run(llm, work, sampling)}
            print(json.dumps(row), flush=True)
            with args.out.open("a") as out:
                print(json.dumps(row), file=out)


if __name__ == "__main__":
    sys.exit(main())
