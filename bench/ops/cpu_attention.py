"""Attention of one new token behind many keys, by this package's CPU kernel, beside reading as many bytes.

    python -m bench.ops.cpu_attention --out FILE.jsonl [--kinds float16,int8,fp8] [--shapes 4x8x128,...] [--level avx2]

A shape is query heads of a key/value head, key/value heads, head_dim. A figure is the least processor time of many runs, a
key/value head each, in turns with `max` of NumPy over as many bytes. Both come from memory: caches take turns. With
`--threads` above one it is the time by the clock over the runs of all threads, the least of several stretches. `--tree` is
kept in the record: run two checkouts in turns.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from bench.shared import Notes, command_line
from quarrel.cpu_backend.attention.attention import attention
from quarrel.cpu_backend.attention.cache import Cache, head_bytes, new_cache
from quarrel.cpu_backend.attention.integer import in_integers
from quarrel.cpu_backend.attention.shape import Shape
from quarrel.cpu_backend.runtime.features import Level, allowed_cores, level
from quarrel.cpu_backend.runtime.pool import aligned
from quarrel.ops.program import KVLayer

BLOCK = 32
ROTATING = 128 << 20
"""Bytes that take turns, of keys and values and of what is read: more than a third-level cache."""
Kernel = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kinds", default="float16,int8,fp8")
    parser.add_argument("--shapes", default="4x8x128,8x4x64,1x8x64,4x1x128")
    parser.add_argument("--keys", default="8192")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each figure")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--level", help="the best one, or one of quarrel/cpu_backend/runtime/features.py")
    parser.add_argument("--tree", default="")
    args = parser.parse_args()
    notes, chosen = Notes(args.out), level(args.level)
    for shape in args.shapes.split(","):
        for keys in map(int, args.keys.split(",")):
            for kind in args.kinds.split(","):
                runs, size = attended(kind, keys, chosen, args.threads, *map(int, shape.split("x")))
                words = np.ones((len(runs), size // 8), np.int64)
                sides: list[list[Callable[[], Any]]] = [[*runs], [part.max for part in words]]
                if args.threads == 1:
                    ours, read = least([cycle(side) for side in sides], args.seconds)
                else:
                    ours, read = least_together(sides, args.threads, args.seconds)
                figures = {"us": round(ours / 1e3), "read_us": round(read / 1e3), "over_bytes": round(ours / read, 2)}
                notes.say(
                    tree=args.tree,
                    kind=kind,
                    shape=shape,
                    keys=keys,
                    mb=round(size / 1e6, 2),
                    level=chosen.name,
                    threads=args.threads,
                    **figures,
                )
    return 0


def least(runs: list[Iterator[Callable[[], Any]]], seconds: float) -> list[int]:
    """Nanoseconds of this thread's processor time that the quickest of each takes, in turns."""
    best, end = [1 << 62] * len(runs), time.perf_counter() + seconds
    while time.perf_counter() < end:
        for i, run in enumerate(map(next, runs)):
            began = time.thread_time_ns()
            run()
            best[i] = min(best[i], time.thread_time_ns() - began)
    return best


def least_together(sides: list[list[Callable[[], Any]]], threads: int, seconds: float) -> list[int]:
    """Nanoseconds by the clock for each run of each side, whose runs so many threads share, in turns."""
    best, end = [1 << 62] * len(sides), time.perf_counter() + seconds
    while time.perf_counter() < end:
        for i, runs in enumerate(sides):
            workers = [threading.Thread(target=_all, args=(t, 2 * runs[t::threads])) for t in range(threads)]
            began = time.perf_counter_ns()
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            best[i] = min(best[i], (time.perf_counter_ns() - began) // (2 * len(runs)))
    return best


def _all(worker: int, runs: list[Callable[[], Any]]) -> None:
    """On a core of its own: short-lived threads begin on the same one."""
    if hasattr(os, "sched_setaffinity"):
        cores = allowed_cores()
        os.sched_setaffinity(0, {cores[worker % len(cores)]})
    for run in runs:
        run()


def attended(
    kind: Any, keys: int, chosen: Level, threads: int, group: int, n_kv: int, dim: int
) -> tuple[list[Callable[[], None]], int]:
    """One query's chunks of several caches, a key/value head each, and the bytes of its keys and values. Each of so many
    threads, which take the chunks in turns, has scratch memory of its own."""
    size = 2 * keys * head_bytes(kind, dim)
    caches = [_filled(kind, keys // BLOCK, n_kv, dim) for _ in range(-(-ROTATING // (size * n_kv)))]
    rng = np.random.default_rng(1)
    q = rng.standard_normal((1, n_kv * group * dim)).astype(np.float32)
    y, item, live = np.zeros_like(q), np.array([0, 0, 1, keys - 1]), np.array([1, keys // BLOCK])
    table = np.arange(keys // BLOCK, dtype=np.int32)
    shape = in_integers(Shape(group, n_kv, dim, BLOCK, dim**-0.5, kind=kind), chosen)
    kernel = attention(shape, chosen)
    scratches, function = [aligned(kernel.scratch + 64) for _ in range(threads)], Kernel(kernel.address(chosen))

    def chunk(cache: Cache, head: int, scratch: np.ndarray) -> Callable[[], None]:
        arrays = {"q": q, "y": y, "k_cache": cache.k, "v_cache": cache.v, "items": item, "block_table": table}
        fields = {name: array.ctypes.data for name, array in arrays.items()}
        fields |= {"live_items": live.ctypes.data, "live_blocks": live.ctypes.data + 8, "sinks": 0, "see_to": 0}
        packed = kernel.pack(fields)

        def run() -> None:
            assert arrays
            function(packed.ctypes.data, head, scratch.ctypes.data)

        return run

    chunks = [(cache, head) for cache in caches for head in range(n_kv)]
    return [chunk(*one, scratches[i % threads]) for i, one in enumerate(chunks)], size


def _filled(kind: Any, blocks: int, n_kv: int, dim: int) -> Cache:
    rng, cache = np.random.default_rng(0), new_cache(KVLayer(n_kv, dim), blocks, BLOCK, kind)
    for array in (cache.k, cache.v):
        if array.dtype == np.float16:
            array[...] = rng.standard_normal((1, BLOCK, n_kv, dim)).astype(np.float16)
        else:
            array[..., :dim] = rng.integers(0, 120, (1, BLOCK, n_kv, dim))
            array[..., dim:] = np.array([0.01], np.float32).view(np.uint8)
    return cache


if __name__ == "__main__":
    sys.exit(main())
