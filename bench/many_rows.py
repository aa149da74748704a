"""Maps of 33 to 128 rows by warpgroups on a CUDA device of capability 9: checks, then times of tiles around those in force.

    python bench/many_rows.py --out many.jsonl [--seconds 60] [--jobs 14] [--list]

Processes compile every candidate and check it: ops of each format against their references in a few rows of weights, the
maps of Mistral-7B against the exact kernel. Then all are timed alone, in graphs over copies of the weights that no cache
holds, medians of 7; a map's own tile is first, `tiles` is what `tuned/sm_90.json` has for the kernels of `matmul.py`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import triton_batch
from notes import Notes

from quarrel.gguf import GGMLType
from quarrel.ops.compare import case_error
from quarrel.ops.contract import Case, Compute, Op
from quarrel.ops.linear import (
    LINEAR,
    LINEAR_ADD,
    NORM_GATE_UP,
    NORM_LINEAR,
    LinearAddSpec,
    LinearSpec,
    NormGateUpSpec,
    NormLinearSpec,
)
from quarrel.ops.norm import NormSpec
from quarrel.ops.registry import backend
from quarrel.triton_backend import many_rows, warpgroup_x
from quarrel.triton_backend.many_rows import Tile
from quarrel.triton_backend.runtime import Alone, Live, Slot, launch
from quarrel.triton_backend.tuned import key, table

BEGAN = time.perf_counter()
TOKENS = (33, 64, 65, 101, 128)
MAPS: dict[str, tuple[tuple[str, ...], tuple[int, ...], int]] = {
    "gated": (("Q4_K", "Q4_K"), (14336, 14336), 4096),
    "down": (("Q4_K",), (4096,), 14336),
    "three": (("Q4_K", "Q4_K", "Q6_K"), (4096, 1024, 1024), 4096),
    "down Q6_K": (("Q6_K",), (4096,), 14336),
    "head": (("Q6_K",), (32000,), 4096),
    "out": (("Q4_K",), (4096,), 4096),
    "gated Q8_0": (("Q8_0", "Q8_0"), (14336, 14336), 4096),
    "down Q8_0": (("Q8_0",), (4096,), 14336),
    "down Q5_K": (("Q5_K",), (4096,), 14336),
    "down Q4_0": (("Q4_0",), (4096,), 14336),
}
"""Formats, outputs and columns."""
OTHERS: dict[str, tuple[tuple[int, int], ...]] = {
    "gated": ((64, 1), (128, 1)),
    "down": ((64, 4), (128, 4)),
    "down Q6_K": ((64, 4), (128, 4)),
    "three": ((64, 2), (128, 2)),
    "out": ((64, 4), (128, 4)),
    "head": ((64, 1), (128, 1)),
}
"""Rows and parts of other tiles."""
Job = tuple[str, Tile, int]
"""Map, tile, width of rows."""


class Site(Alone):
    """Arrays of a device, and launches as they come."""

    generation, deterministic, float8, group = 9, False, False, None
    compute: Compute = "float16"
    launch = staticmethod(launch)

    def __init__(self) -> None:
        self._held: dict[tuple[int, torch.dtype], Slot] = {}

    def scratch(self, dim: str, width: int, dtype: torch.dtype = torch.float32) -> Slot:
        if (width, dtype) not in self._held:
            make = torch.zeros if dtype == torch.int32 else torch.empty
            self._held[width, dtype] = Slot(make(width, dtype=dtype, device=triton_batch.device()))
        return self._held[width, dtype]

    def zeros(self, dim: str, width: int) -> Slot:
        return self.scratch(dim, width, torch.int32)


def own_tile(name: str, width: int) -> Tile:
    _, ns, k = MAPS[name]
    return many_rows.tile_for(ns if name == "three" else ns[:1], k, width, name.startswith("gated"), name.endswith("Q8_0"))


def candidates() -> Iterator[Job]:
    """The most wanted first."""
    for width in (128, 64):
        for name in MAPS:
            yield name, own_tile(name, width), width
        for name, others in OTHERS.items():
            for other in others:
                yield name, Tile(*other), width


def made(job: Job, tokens: int, small: bool) -> tuple[Callable[[int], None], int, Callable[[], float]]:
    """Run turn i, number of turns, and the relative error. x is in its order already."""
    name, tile, width = job
    formats, ns, k = MAPS[name]
    device, site = triton_batch.device(), Site()
    sets = [triton_batch.turns(triton_batch.packed(f, n, k), small) for f, n in zip(formats, ns, strict=True)]
    gated, three = len(ns) == 2, len(ns) == 3
    if gated:
        sets[1] = [*sets[1][1:], sets[1][0]]  # the same values from other addresses
    x = triton_batch.activations(tokens, k)
    there = torch.empty(many_rows.MOST * k, device=device, dtype=torch.float16)
    launch(warpgroup_x.arrange, (k // 128, width // 16), there, x, tokens, K=k, BT=width, PDL=False)
    site.scratch("one", many_rows.MOST * k, torch.float16).tensor = there
    add = name.startswith(("down", "out"))
    residual = torch.randn(tokens, ns[0], device=device) if add else None
    wide = torch.float32 if add or name == "head" else torch.float16
    ys = [torch.full((tokens, n), float("nan"), device=device, dtype=wide) for n in (ns if three else ns[:1])]
    outs, added = [Slot(y) for y in ys], None if residual is None else Slot(residual)
    kind, before = "silu" if gated else "none", many_rows.tile_for
    many_rows.tile_for, many_rows._SMALL = lambda ns, k, width, gated=False, wide=False: tile, 0
    try:
        runs = []
        for weights in zip(*sets, strict=True):
            if three:
                few = many_rows.linears(site, outs[0], outs, weights, (), "T", lambda *a: None)  # type: ignore[arg-type]
            else:
                few = many_rows._one(site, outs[0], outs[0], weights, (), added, 0.5, "T", kind, lambda *a: None)  # type: ignore[arg-type]
            assert few is not None, job
            runs.append(few.run)
    finally:
        many_rows.tile_for = before
    live = Live(tokens, tokens, tokens, True, False, tokens)

    def error() -> float:
        sums = [x.float() @ triton_batch.exact(f, n, k).T for f, n in zip(formats, ns, strict=True)]
        if gated:
            sums = [torch.nn.functional.silu(sums[0]) * sums[1]]
        if residual is not None:
            sums = [residual + 0.5 * sums[0]]
        return max(triton_batch.relative(y.float(), s) for y, s in zip(ys, sums, strict=True))

    return lambda i: runs[i](live), len(runs), error


def cases(format: str) -> Iterator[tuple[Op, Case]]:
    """Every form of launch in small shapes: bias, residual, activation, three maps, a tile and a part that overhang."""
    type, k = GGMLType[format], 1024
    norm, same = NormSpec("rms", k, 1e-5), LinearSpec(type, 200, k)
    maps = tuple(LinearSpec(t, n, k) for t, n in ((type, 130), (type, 64), (GGMLType.Q6_K, 65)))
    for tokens in TOKENS:
        dims = {"T": tokens}
        yield LINEAR, Case(LinearSpec(type, 200, k, bias=True), dims)
        yield LINEAR_ADD, Case(LinearAddSpec(same, 0.5), dims)
        yield NORM_GATE_UP, Case(NormGateUpSpec(norm, same, same, "silu"), dims)
        yield NORM_LINEAR, Case(NormLinearSpec(norm, maps), dims)
    if format == "Q8_0":  # 33 steps in 8 parts, of which one is empty
        yield LINEAR, Case(LinearSpec(type, 100, 4224), {"T": 66})


def compiled(job: Job | str) -> tuple[str, dict[str, Any]]:
    """Fills Triton's cache in a worker and checks what it made."""
    try:
        if isinstance(job, str):
            many_rows._SMALL = 0
            format, _, name = job.partition(" ")
            found = {}
            for op, case in cases(format):
                if op.name == name:
                    found[case.dims["T"]] = float(f"{case_error(backend('triton'), op, case, 'float16'):.1e}")
            limit = LINEAR.tolerance["float16"]
            return str(job), {"op": job, "errors": found, "wrong": [t for t, e in found.items() if not e <= limit]}
        errors = {}
        for tokens in (t for t in TOKENS if many_rows.width_of(t) == job[2]):
            go, _, error = made(job, tokens, True)
            go(0)
            go(0)
            torch.cuda.synchronize()
            errors[tokens] = float(f"{error():.1e}")
        return str(job), {"map": job[0], "tile": str(job[1]), "errors": errors}
    except Exception:
        return str(job), {"job": str(job), "raised": traceback.format_exc(limit=-4)[-1200:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("many.jsonl"))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--list", action="store_true", help="print what would be done")
    args = parser.parse_args()
    tiles = list(dict.fromkeys(candidates()))
    ops = (LINEAR, LINEAR_ADD, NORM_GATE_UP, NORM_LINEAR)
    jobs: list[Job | str] = [*tiles[:22], *(f"{format} {op.name}" for format in many_rows.TAKEN for op in ops), *tiles[22:]]
    if args.list:
        print(*jobs, sep="\n")
        return 0
    say = Notes(args.out, BEGAN).say
    good: set[str] = set()
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        waiting = pool.imap_unordered(compiled, jobs)
        try:
            for _ in jobs:
                name, row = waiting.next(max(0.1, BEGAN + args.seconds * 0.75 - time.perf_counter()))
                say(**row)
                if all(e < 2e-3 for e in row.get("errors", {0: 1.0}).values()):
                    good.add(name)
        except multiprocessing.TimeoutError:
            say(fault="the time was over", left=[str(j) for j in jobs if str(j) not in good])
        pool.terminate()
    known = json.loads((Path(many_rows.__file__).parent / "tuned" / "sm_90.json").read_text())["us"]
    assert table(9).tiles
    lines = [f"{'map':12s} {'x':>4s} {'rows, parts':>9s} {'us':>7s} {'tiles':>7s}"]
    for job in jobs:
        if isinstance(job, str) or str(job) not in good or time.perf_counter() > BEGAN + args.seconds:
            continue
        name, tile, width = job
        formats, ns, k = MAPS[name]
        kind: Any = {1: "one", 2: "gated", 3: "three"}[len(ns)]
        tiles = known.get(key(kind, formats, ns, k), {}).get(str(width))
        try:
            go, count, _ = made(job, width, False)
            us = round(triton_batch.timed(go, count) * 1e6, 1)
        except Exception as failure:
            say(map=name, tile=str(tile), raised=f"{type(failure).__name__}: {failure}"[:300])
            continue
        say(map=name, x=width, rows=tile.rows, parts=tile.parts, us=us, tiles=tiles)
        lines.append(f"{name:12s} {width:4d} {tile.rows:4d}, {tile.parts:2d} {us:7.1f} {tiles or 0:7.1f}")
    print("\n".join(sorted(lines[1:])))
    print(lines[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
