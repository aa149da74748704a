"""Finds the fastest tiles of linear maps for 2 to 128 rows on this GPU and writes the table that models load.

    python -m bench.tune.tune [--out TABLE.json] [--seconds 300] [--only mistral-7b] [--rows 8,16,32] [--list]

Several processes compile the candidates first. Then each is timed as a model runs it: a compiled step holds enough copies
of the map to outgrow the device's cache; its time, less that of a step with one copy, is the time of the others. If a
candidate's results differ from those of the tile in force, it is refused. The best of a width replaces the tile in force
only if it is 3% faster, so that noise changes nothing; shapes and widths that were not reached keep what the table has.
The figures of all candidates go to a .jsonl beside the table.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.shared import Notes, command_line
from quarrel.bench.kernel import TABLE as TABLE_ROWS
from quarrel.bench.kernel import step_inputs, step_seconds
from quarrel.gguf import GGMLType
from quarrel.ops import draw
from quarrel.ops.contract import Array, RawWeight, WeightRef, rel_error
from quarrel.ops.embedding import embedding, gather_rows
from quarrel.ops.linear import add, linear, linear_add, norm_gate_up, norm_linear
from quarrel.ops.norm import NormSpec
from quarrel.ops.null import Builder
from quarrel.ops.program import Program
from quarrel.ops.registry import backend
from quarrel.ops.step import Limits, Step
from quarrel.triton_backend.linear import tuned

WRONG = 4e-3
"""A relative error that no right candidate comes near."""
GAIN = 0.97
BYTES = 240 << 20
"""Weights of all copies together: more than the second-level cache holds."""
GENERATION = 9
DRAWN_ROWS = 512
FAMILIES = ("rows", "tiles")
Choice = tuple[str, tuple[int, ...]]
"""A family of kernels and a row of its table: (rows, tall, turns, deep) or (rows, blocks, parts, warps, stages)."""


@dataclass(frozen=True)
class Map:
    """The weights of one launch: one map, gate and up, or query, key and value."""

    kind: tuned.Kind
    formats: tuple[str, ...]
    ns: tuple[int, ...]
    k: int

    @property
    def name(self) -> str:
        return tuned.key(self.kind, self.formats, self.ns, self.k)

    def refs(self, copy: int) -> list[WeightRef]:
        return [WeightRef(f"{copy}.{i}", GGMLType[f], n, self.k) for i, (f, n) in enumerate(self._parts)]

    def raw(self, ref: WeightRef) -> RawWeight:
        """Some drawn rows over and over; every copy has the same."""
        if ref.rows == 1:
            return draw.weight(np.random.default_rng(0), ref.type, 1, ref.k, 1.0)
        some = draw.weight(np.random.default_rng(ref.rows), ref.type, min(ref.rows, DRAWN_ROWS), ref.k)
        return RawWeight(ref.type, some.raw[np.arange(ref.rows) % len(some.raw)], ref.k)

    @property
    def nbytes(self) -> int:
        return sum(draw.weight(np.random.default_rng(0), GGMLType[f], 1, self.k).raw.nbytes * n for f, n in self._parts)

    @property
    def _parts(self) -> list[tuple[str, int]]:
        return list(zip(self.formats, self.ns, strict=True))

    def program(self, copies: int) -> Program:
        b = Builder()
        x = embedding(b, b.input("ids"), WeightRef("table", GGMLType.F32, TABLE_ROWS, self.k))
        gain, spec = WeightRef("gain", GGMLType.F32, 1, self.k), NormSpec("rms", self.k, 1e-5)
        y = linear(b, x, self.refs(0)[0], out="f32") if self.kind == "one" else x
        for i in range(1, copies + 1):
            weights = self.refs(i)
            if self.kind == "one":
                y = linear_add(b, y, x, weights[0])
            elif self.kind == "gated":
                y = norm_gate_up(b, spec, x, [gain], *((w, None) for w in weights), "silu")
            else:
                y = norm_linear(b, spec, x, [gain], [(w, None) for w in weights])[-1]
        if self.kind != "one":  # a result of a step is float32
            y = add(b, embedding(b, b.input("ids"), WeightRef("table", GGMLType.F32, TABLE_ROWS, self.ns[-1])), y)
        return b.program(hidden=gather_rows(b, y, b.input("out_rows")))


def layer(hidden: int, kv: int, ffn: int) -> list[Map]:
    """The maps of a layer in a Q4_K_M file: value and down matrices are Q6_K in half of the layers."""
    return [
        Map("gated", ("Q4_K", "Q4_K"), (ffn, ffn), hidden),
        *(Map("one", (f,), (hidden,), ffn) for f in ("Q4_K", "Q6_K")),
        *(Map("three", ("Q4_K", "Q4_K", f), (hidden, kv, kv), hidden) for f in ("Q4_K", "Q6_K")),
        Map("one", ("Q4_K",), (hidden,), hidden),
    ]


MODELS = {
    "mistral-7b": [*layer(4096, 1024, 14336), Map("one", ("Q6_K",), (32000,), 4096)],
    "granite-4-micro": [*layer(2560, 512, 8192), Map("one", ("Q6_K",), (100352,), 2560)],
    "tinyllama-1.1b": [*layer(2048, 256, 5632), Map("one", ("Q6_K",), (32000,), 2048)],
}


def candidates(map: Map, width: int) -> list[Choice]:
    """Tiles worth a trial; the one that the table has, if any, is the first."""
    table, n = tuned.table(GENERATION), sum(map.ns) if map.kind == "three" else map.ns[0]
    entries: dict[str, Mapping[str, tuned.Measured]] = {family: getattr(table, family) for family in FAMILIES}
    known = [(f, e[map.name][width]) for f, e in entries.items() if width in e.get(map.name, {})]
    return list(dict.fromkeys([*known, *_mma_tiles(n, map.k, width), *_shared_tiles(map, n, width)]))


def _mma_tiles(n: int, k: int, width: int) -> Iterator[Choice]:
    """Weights in the registers of `mma`: about as many warps as keep a device busy, and sums that fit registers."""
    if width > 32 or k % 256:
        return
    high = {8: ((16, 1), (32, 2)), 16: ((16, 1), (32, 1), (32, 2)), 32: ((16, 1), (32, 2), (64, 4))}[width]
    for rows, tall in high:
        for turns in (1, 2, 4, 8):
            warps = -(-n // rows) * tall * turns
            if turns * tall > 16 or k < 256 * turns or (turns > 1 and warps > 6000) or (turns < 8 and warps < 700):
                continue
            yield from (("rows", (rows, tall, turns, deep)) for deep in (0, 1))


def _shared_tiles(map: Map, n: int, width: int) -> Iterator[Choice]:
    """Weights decoded to shared memory, for more than 16 rows; what asks for too much memory fails as it is compiled."""
    if width < 32:
        return
    shapes = ((64, 8, 4, 3), (64, 4, 4, 3), (128, 4, 8, 3), (128, 4, 8, 4), (128, 4, 8, 2), (128, 2, 8, 3))
    for rows, blocks, warps, stages in shapes:
        if map.kind == "gated" and blocks == 8:
            continue
        for parts in (1, 2, 4, 8):
            programs, steps = -(-n // rows) * parts, map.k // 32 // blocks
            if 90 <= programs <= 520 and (map.k // 32) % blocks == 0 and steps >= 4 * parts:
                yield "tiles", (rows, blocks, parts, warps, stages)


@contextmanager
def in_force(map: Map, width: int, choice: Choice | None) -> Iterator[None]:
    """The backend's table with this choice; None leaves it as it is."""
    entries: dict[str, dict[str, Any]] = {family: getattr(tuned.table(GENERATION), family) for family in FAMILIES}
    saved = {family: e.get(map.name) for family, e in entries.items()}
    if choice is not None:
        for e in entries.values():
            e[map.name] = {w: row for w, row in e.get(map.name, {}).items() if w != width}
        entries[choice[0]][map.name][width] = choice[1]
    try:
        yield
    finally:
        for family, before in saved.items():
            if before is None:
                entries[family].pop(map.name, None)
            else:
                entries[family][map.name] = before


def compiled(map: Map, width: int, choice: Choice | None, copies: int) -> Step:
    limits = Limits(width, width, 2, 2 * width, 32)
    with in_force(map, width, choice):
        return backend("triton").compile(map.program(copies), map, limits, "float16")


def tried(job: tuple[Map, int, Choice]) -> str:
    """Compiles the kernels of a candidate, in a worker; returns what went wrong."""
    map, width, choice = job
    try:
        step = compiled(map, width, choice, 1)
        step(step_inputs(step.limits, width), "hidden")
        step.close()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return ""


def measured(map: Map, width: int, choice: Choice | None) -> tuple[float, Array]:
    """Microseconds of one map, and its results."""
    copies = max(3, min(24, -(-BYTES // map.nbytes)))
    one, many = (compiled(map, width, choice, n) for n in (1, copies + 1))
    inputs = step_inputs(many.limits, width)
    rows = one(inputs, "hidden").hidden
    assert rows is not None
    seconds = [step_seconds(many, inputs) - step_seconds(one, inputs) for _ in range(5)]
    for step in (one, many):
        step.close()
    return median(seconds) / copies * 1e6, rows


def choose(kept: dict[str, Any], map: Map, width: int, times: Mapping[Choice | None, float]) -> Choice | None:
    """Enters the best choice in the table, if it beats what is in force (the time of None); returns it."""
    best = min(times, key=lambda choice: times[choice])
    if best is None or times[best] > GAIN * times[None]:
        return None
    for family in FAMILIES:
        kept.setdefault(family, {}).get(map.name, {}).pop(str(width), None)
    kept[best[0]].setdefault(map.name, {})[str(width)] = list(best[1])
    kept.setdefault("us", {}).setdefault(map.name, {})[str(width)] = round(times[best], 1)
    return best


def dumps(kept: dict[str, Any]) -> str:
    """JSON with a line for each shape."""
    parts = []
    for name, value in kept.items():
        if isinstance(value, dict):
            lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items() if v)
            parts.append(f" {json.dumps(name)}: {{\n{lines}\n }}" if lines else f" {json.dumps(name)}: {{}}")
        else:
            parts.append(f" {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> int:
    table = Path(str(resources.files(tuned.__name__).joinpath("sm_90.json")))
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, default=table, help="the table; by default the one in the package")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--only", default=",".join(MODELS), help="models by name")
    parser.add_argument("--rows", default="8,16,32", help="numbers of rows")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--list", action="store_true", help="print the candidates and stop")
    args = parser.parse_args()
    began = time.perf_counter()
    maps = list(dict.fromkeys(m for name in args.only.split(",") for m in MODELS[name]))
    todo = [(m, width, choice) for m in maps for width in map_int(args.rows) for choice in candidates(m, width)]
    if args.list:
        for m, width, (family, row) in todo:
            print(m.name, width, family, row)
        return 0
    notes, kept, failed = Notes(args.out.with_suffix(".jsonl")), json.loads(table.read_text()), set()
    with multiprocessing.get_context("spawn").Pool(min(args.jobs, len(todo))) as pool:
        for job, fault in zip(todo, pool.imap(tried, todo), strict=True):
            if fault:
                failed.add(job)
                notes.say(shape=job[0].name, rows=job[1], choice=job[2], failed=fault)
    notes.say(candidates=len(todo), failed=len(failed))
    for m in maps:
        for width in map_int(args.rows):
            if time.perf_counter() - began > args.seconds:
                print("the time is over")
                return 0
            before, right = measured(m, width, None)
            times: dict[Choice | None, float] = {None: before}
            for choice in (c for other, w, c in todo if (other, w) == (m, width) and (m, width, c) not in failed):
                us, rows = measured(m, width, choice)
                error = rel_error(rows, right)
                notes.say(shape=m.name, rows=width, choice=choice, us=round(us, 2), error=error)
                if error < WRONG:
                    times[choice] = us
            best = choose(kept, m, width, times)
            notes.say(shape=m.name, rows=width, in_force_us=round(before, 2), best=best)
            args.out.write_text(dumps(kept | {"device": backend("triton").device()}))
    return 0


def map_int(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
