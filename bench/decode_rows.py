"""Steps of one row in other ways: rows walked with the activations in registers, norms inside, attention by length.

    python bench/decode_rows.py --parts attend,mistral,tinyllama,granite --seconds 100 --out results.json

As `triton_decode.py`, whose parts it takes. A step is all linear maps of a model with their norms, over random weights that
no cache holds, with a launch of the least work in attention's place; what wins here moves into the backend.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import decode_kernels
import triton_decode as base
from triton_decode import Call, Log, Tile, timed

from quarrel.triton_backend import attend_one, attention, few_tiles, halved, stream
from quarrel.triton_backend.codes import TL_TYPES
from quarrel.triton_backend.runtime import power_of_two

SMS = 132


@dataclass(frozen=True)
class Model:
    """Widths of a step, and the types of its matrices; every second layer has values and down in Q6_K."""

    e: int
    f: int
    kv: int
    vocab: int
    layers: int


MODELS = {
    "mistral": Model(4096, 14336, 1024, 32000, 32),
    "tinyllama": Model(2048, 5632, 256, 32000, 22),
    "granite": Model(2560, 8192, 512, 100352, 40),
}


@dataclass(frozen=True)
class Way:
    """`rows` at a time in so many warps, by so many programs a multiprocessor; `norm`: the norm is inside."""

    rows: int
    warps: int
    each: int
    norm: bool = False
    registers: int = 0


@dataclass(frozen=True)
class Setting:
    """How each part is launched: as the backend does now, by a Tile, or a Way."""

    name: str
    qkv: Tile | Way | None = None
    o: Tile | Way | None = None
    gate: Tile | Way | None = None
    down: Tile | Way | None = None
    leave_out: str = ""


def settings(m: Model) -> list[Setting]:
    """Warps of a Way such that a thread has a block of 32 columns, by the width."""
    e, f = power_of_two(m.e // 8) // 128, power_of_two(m.f // 8) // 128
    gate5, gate6 = Way(2, e, 20 // e, True), Way(2, e, 24 // e, True, 80)
    gate4 = Way(4, e, 16 // e, True)
    down2 = Way(2, f // 2, max(1, 16 // (f // 2)))
    found = [
        Setting("now"),
        *(Setting(f"without {w}", leave_out=w) for w in ("gate_up", "down", "norm", "qkv", "o", "halve", "attend")),
        Setting("gate 2, 20 warps, norm", gate=gate5),
        Setting("gate 2, 24 warps, norm", gate=gate6),
        Setting("gate 2, 16 warps, norm", gate=Way(2, e, 16 // e, True)),
        Setting("gate 4, 16 warps, norm", gate=gate4),
        Setting("gate 4, 12 warps, norm", gate=Way(4, e, 12 // e, True)),
        Setting("qkv 4, 16 warps, norm", qkv=Way(4, e, 16 // e, True)),
        Setting("qkv 2, 24 warps, norm", qkv=Way(2, e, 24 // e, True, 80)),
        Setting("qkv 2, 16 warps, norm", qkv=Way(2, e, 16 // e, True)),
        Setting("qkv 4, 20 warps", qkv=Way(4, e, 20 // e)),
        Setting("o 2, 24 warps", o=Way(2, e, 24 // e)),
        Setting("o 4, 16 warps", o=Way(4, e, 16 // e)),
        Setting("down 2, two blocks, 16 warps", down=down2),
        Setting("down 2, two blocks, 24 warps", down=Way(2, f // 2, max(1, 24 // (f // 2)))),
        Setting("down 1, two blocks, 16 warps", down=Way(1, f // 2, max(1, 16 // (f // 2)))),
        Setting("down 2, four blocks, 12 warps", down=Way(2, max(1, f // 4), max(1, 12 // max(1, f // 4)))),
        Setting("down 2, four blocks, 8 warps", down=Way(2, max(1, f // 4), max(1, 8 // max(1, f // 4)))),
        Setting("down 1, four blocks, 12 warps", down=Way(1, max(1, f // 4), max(1, 12 // max(1, f // 4)))),
        Setting("down 2, one block, 16 warps", down=Way(2, f, max(1, 16 // f))),
        Setting("down 1 row tile", down=Tile(1, 128, 1, True)),
        Setting("down 2 rows tile", down=Tile(2, 128, 1, True)),
        Setting("down 1 row, 64 words", down=Tile(2, 64, 1, True)),
        Setting("qkv 4 x 512 tile", qkv=Tile(4, 512, 4)),
        Setting("qkv 2 x 128 deep tile", qkv=Tile(2, 128, 1, True)),
        Setting("o 4 x 512 tile", o=Tile(4, 512, 4)),
        Setting("o 2 x 128 deep tile", o=Tile(2, 128, 1, True)),
        Setting("gate 2 x 128 tile", gate=Tile(2, 128, 1)),
        Setting("gate 2 x 256 tile", gate=Tile(2, 256, 2)),
        Setting("gate 20 and down", gate=gate5, down=down2),
        Setting("gate 24 and down", gate=gate6, down=down2),
        Setting("gate 24, down, qkv norm", gate=gate6, down=down2, qkv=gate6),
        Setting("gate 24, down, qkv norm, o", gate=gate6, down=down2, qkv=gate6, o=Way(2, e, 24 // e)),
    ]  # fmt: skip
    return [s for s in found if not any(isinstance(w, Way) and w.warps < 1 for w in (s.qkv, s.o, s.gate, s.down))]


def shape(way: Way, k: int, **more: Any) -> tuple[tuple[str, Any], ...]:
    told = {"K": k, "R": way.rows, "W": power_of_two(k // 8), "PDL": True, "ASM": True}
    return tuple((more | told).items())


def one(type: str, n: int, k: int, way: Tile | Way | None, y: Any, x: Any, w: Sequence[Any]) -> Call:
    if not isinstance(way, Way):
        return base.mv(type, n, k, way or base_tile(few_tile(type, n, k)), True, y, x, w, y)
    constants = shape(way, k, FORMAT=type, NORM=False, ADD=True)
    args = (y, x, y, 1e-5, *w, y, 1.0, n)
    return Call(decode_kernels.stream, (SMS * way.each,), args, constants, way.warps, True, way.registers)


def few_tile(type: str, n: int, k: int) -> few_tiles.Tile:
    return few_tiles.tile_for(type, n, k)


def base_tile(tile: few_tiles.Tile) -> Tile:
    return Tile(tile.rows, tile.words, tile.warps, tile.deep)


def three(types: Sequence[str], ns: Sequence[int], k: int, way: Tile | Way | None, ys: Any, x: Any, gain: Any,
          ws: Any) -> Call:  # fmt: skip
    if not isinstance(way, Way):
        return base.qkv(types, ns, k, way or base_tile(few_tiles.tiles_for(types, sum(ns), k)[0]), True, ys, x, ws)
    programs = SMS * way.each
    size = [base.nbytes(t, n, k) for t, n in zip(types, ns)]
    first, second = (round(programs * s / sum(size)) for s in size[:2])
    constants = shape(way, k, F0=types[0], F1=types[1], F2=types[2], NORM=way.norm)
    args = (*ys, x, gain, 1e-5, *ws[0], *ws[1], *ws[2], *ns, first, second)
    return Call(decode_kernels.stream3, (programs,), args, constants, way.warps, True, way.registers)


def gate_up(m: Model, way: Tile | Way | None, b: dict[str, Any], g: Any, u: Any) -> Call:
    if not isinstance(way, Way):
        tile = way or base_tile(few_tile("Q4_K", m.f, m.e))
        return base.gate_up("Q4_K", m.f, m.e, tile, True, b["f"], b["xq"], g, u)
    constants = shape(way, m.e, FORMAT="Q4_K", NORM=way.norm, KIND="silu", BIAS=False)
    args = (b["f"], b["h"] if way.norm else b["xq"], b["gain"], 1e-5, *g, *u, b["gain"], b["gain"], m.f)
    return Call(stream.stream_gate_up, (SMS * way.each,), args, constants, way.warps, True, way.registers)


def layer(m: Model, s: Setting, six: bool, b: dict[str, Any], w: dict[str, Any]) -> Iterator[tuple[str, Call]]:
    v = "Q6_K" if six else "Q4_K"
    inside = isinstance(s.qkv, Way) and s.qkv.norm
    if not inside:
        yield "norm", base.norm(m.e, True, b["xq"], b["h"], b["gain"])
    yield "qkv", three(("Q4_K", "Q4_K", v), (m.e, m.kv, m.kv), m.e, s.qkv, (b["q"], b["k"], b["v"]),
                       b["h"] if inside else b["xq"], b["gain"], (w["q"], w["k"], w["v"]))  # fmt: skip
    yield "attend", base.halve(m.e, True, b["xq"], b["q"])
    yield "o", one("Q4_K", m.e, m.e, s.o, b["h"], b["xq"], w["o"])
    if not (isinstance(s.gate, Way) and s.gate.norm):
        yield "norm", base.norm(m.e, True, b["xq"], b["h"], b["gain"])
    yield "gate_up", gate_up(m, s.gate, b, w["gate"], w["up"])
    yield "halve", base.halve(m.f, True, b["fq"], b["f"])
    yield "down", one(v, m.e, m.f, s.down, b["h"], b["fq"], w["down"])


def head(m: Model, b: dict[str, Any], w: Any) -> list[Call]:
    tile = base_tile(few_tile("Q6_K", m.vocab, m.e))
    return [base.norm(m.e, True, b["xq"], b["h"], b["gain"]),
            base.mv("Q6_K", m.vocab, m.e, tile, True, b["logits"], b["xq"], w)]  # fmt: skip


def buffers(m: Model, fake: bool) -> dict[str, Any]:
    f16, f32, i32 = torch.float16, torch.float32, torch.int32
    sizes = {"h": (m.e, f32), "gain": (m.e, f32), "q": (m.e, f16), "k": (m.kv, f16), "v": (m.kv, f16), "f": (m.f, f16),
             "logits": (m.vocab, f32), "xq": (halved.words(m.e), i32), "fq": (halved.words(m.f), i32)}  # fmt: skip
    if fake:
        return {name: dtype for name, (_, dtype) in sizes.items()}
    made = {n: torch.randn(s, device="cuda").to(t) for n, (s, t) in sizes.items()}
    made["gain"].abs_()
    return made


def weights(m: Model, six: bool, fake: bool) -> dict[str, Any]:
    v = "Q6_K" if six else "Q4_K"
    shapes = {"q": ("Q4_K", m.e, m.e), "k": ("Q4_K", m.kv, m.e), "v": (v, m.kv, m.e), "o": ("Q4_K", m.e, m.e),
              "gate": ("Q4_K", m.f, m.e), "up": ("Q4_K", m.f, m.e), "down": (v, m.e, m.f)}  # fmt: skip
    return {name: base.dtypes(t) if fake else base.planes(t, n, k) for name, (t, n, k) in shapes.items()}


def step_keys(m: Model) -> dict[tuple[Any, ...], None]:
    fake = buffers(m, True)
    found: dict[tuple[Any, ...], None] = {}
    for s in settings(m):
        for six in (False, True):
            for _, call in layer(m, s, six, fake, weights(m, six, True)):
                found[call.key()] = None
    for call in head(m, fake, base.dtypes("Q6_K")):
        found[call.key()] = None
    return found


def step(log: Log, name: str) -> None:
    m = MODELS[name]
    b = buffers(m, False)
    layers = [(i % 2 == 0, weights(m, i % 2 == 0, False)) for i in range(m.layers)]
    top = base.planes("Q6_K", m.vocab, m.e)
    begin = torch.randn(m.e, device="cuda")
    want: dict[str, torch.Tensor] = {}
    for s in settings(m):
        if log.over(3.0):
            log.note(name, {"stopped": s.name})
            return
        calls = [c for six, w in layers for part, c in layer(m, s, six, b, w) if part != s.leave_out]
        calls += head(m, b, top)
        try:
            # One layer of each kind from the same input: every way gives the same.
            b["h"].copy_(begin)
            off = 0.0
            if not s.leave_out:
                for six, w in layers[:2]:
                    for _, c in layer(m, s, six, b, w):
                        c()
                made = b["h"].clone()
                first = want.setdefault("h", made)
                off = float((made - first).norm() / (first - begin).norm())
            seconds, spread = timed(calls)
        except Exception as error:
            log.note(name, {"name": s.name, "failed": str(error)[:300]})
            continue
        log.note(name, {"name": s.name, "ms": round(seconds * 1e3, 4), "launches": len(calls), "spread": round(spread, 3),
                        "off": round(off, 6)})  # fmt: skip


HEADS, KV, DIM, SIZE = 32, 8, 128, 32
LENGTHS = (1, 64, 128, 129, 256, 512, 1024, 4096, 32000)


@dataclass(frozen=True)
class Split:
    """Tiles of `keys` in so many warps; splits of at least `shortest` keys."""

    keys: int
    warps: int
    shortest: int = 128
    rotate: bool = True
    most: int = 64


SPLITS = (
    Split(64, 4),
    Split(64, 4, rotate=False),
    Split(128, 8),
    Split(64, 8),
    Split(32, 4),
    Split(64, 4, 64),
    Split(64, 4, 256),
    Split(128, 8, 256),
    Split(64, 4, most=32),
    Split(32, 2),
)


def attend(n_keys: int, s: Split, b: dict[str, Any], ints: dict[str, Any]) -> Call:
    items = int(attention.splits_of(np.array([n_keys]), s.shortest, s.most)[0])
    constants = {"HEADS": HEADS, "KV_HEADS": KV, "DIM": DIM, "WIDE": DIM, "SIZE": SIZE, "WINDOW": False, "CAP": False,
                 "SINKS": False, "ROTATE": s.rotate, "NEOX": False, "SHARE": 4, "BLOCK_M": 16, "BLOCK_N": s.keys,
                 "SHORTEST": s.shortest, "MOST": s.most, "AT_ONCE": 16, "HALVED": True, "PLAIN": False, "EARLY": True,
                 "KIND": "plain", "COMPUTE": TL_TYPES["float16"], "PDL": True}  # fmt: skip
    new = (b["q"], b["k"], b["v"], ints["last"], b["freq"], ints["last"], 1.0, 1.0)
    tables = tuple(ints[name] for name in ("begin", "length", "table", "width", "item"))
    cache = (b["keys"], b["values"])
    args = (b["out"], b["at"], b["part"], b["top"], b["arrived"], *new, *cache, *cache, b["keys"], *tables, 1,
            DIM**-0.5 * attend_one.LOG2E, 0.0, 0)  # fmt: skip
    return Call(attend_one.attend_one, (items, KV), args, tuple(constants.items()), s.warps, True)


def attend_keys() -> dict[tuple[Any, ...], None]:
    f16, f32, i32 = torch.float16, torch.float32, torch.int32
    b = {"q": f16, "k": f16, "v": f16, "freq": f32, "out": f16, "at": i32, "part": f32, "top": f32, "arrived": i32,
         "keys": f16, "values": f16}  # fmt: skip
    ints = dict.fromkeys(("begin", "length", "table", "width", "item", "last"), i32)
    return {attend(64, s, b, ints).key(): None for s in SPLITS}


def attend_all(log: Log) -> None:
    """Attention of 32 layers, one after the other without the maps between."""
    e = HEADS * DIM
    b: dict[str, Any] = {
        n: torch.randn(w, device="cuda").half() for n, w in (("q", e), ("k", 1024), ("v", 1024), ("out", e))
    }
    b |= {"freq": torch.rand(64, device="cuda"), "at": torch.empty(e, dtype=torch.int32, device="cuda")}
    b |= {"part": torch.empty(64 * e, device="cuda"), "top": torch.empty(64 * HEADS * 2, device="cuda")}
    b["arrived"] = torch.zeros(64, dtype=torch.int32, device="cuda")
    caches = [torch.randn(2, 1024 * SIZE * KV * DIM, device="cuda").half() for _ in range(8)]
    for s in SPLITS:
        row = {}
        for n_keys in LENGTHS:
            if log.over(2.0):
                log.note("attend", {"stopped": str(s)})
                return
            items = int(attention.splits_of(np.array([n_keys]), s.shortest, s.most)[0])
            lists = {"begin": [0, 1], "length": [n_keys], "table": list(range(1024)), "width": [1024], "item": [0, items],
                     "last": [n_keys - 1]}  # fmt: skip
            ints = {name: torch.tensor(x, dtype=torch.int32, device="cuda") for name, x in lists.items()}
            calls = [attend(n_keys, s, b | {"keys": c[0], "values": c[1]}, ints) for c in (caches * 4)]
            try:
                row[n_keys] = round(timed(calls)[0] / len(calls) * 1e6, 2)
            except Exception as error:
                row[n_keys] = str(error)[:200]
        log.note("attend", {"split": str(s), "us": row})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--parts", default="attend,mistral,tinyllama,granite")
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--out", default="rows.json")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2)
    args = parser.parse_args()
    parts = args.parts.split(",")
    log = Log(args.out, args.seconds)
    keys: dict[tuple[Any, ...], None] = {}
    for part in parts:
        keys |= attend_keys() if part == "attend" else step_keys(MODELS[part])
    log.note("compile", {"variants": len(keys)})
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        faults = [f for f, _ in pool.map(base.compile_one, keys) if f]
    log.note("compile", {"seconds": time.perf_counter() - base.BEGAN, "faults": faults})
    base.stream(log)
    for part in parts:
        if part == "attend":
            attend_all(log)
        else:
            step(log, part)
    log.note("end", {"seconds": time.perf_counter() - base.BEGAN})
    return 0


if __name__ == "__main__":
    sys.exit(main())
