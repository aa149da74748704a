"""A step of Mistral-7B in other ways: rows walked with the activations in registers, norms inside, attention by length.

    python bench/decode_rows.py --seconds 100 --out results.json

As `triton_decode.py`, whose parts it takes; what is tried here moves into the backend if it wins.
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

import triton_decode as base
from triton_decode import DEEP, ONE, ROW, WIDE, Call, Log, Tile, timed

from quarrel.triton_backend import attention, stream

E, F, V, LAYERS = base.E, base.F, base.V, base.LAYERS
SMS = 132


@dataclass(frozen=True)
class Way:
    """R rows at a time of W words, by so many programs a multiprocessor; `norm`: the norm is inside."""

    rows: int
    words: int
    warps: int
    each: int
    norm: bool = False


@dataclass(frozen=True)
class Setting:
    """How each part is launched: a Tile as the backend does now, or a Way."""

    name: str
    qkv: Tile | Way = DEEP
    o: Tile | Way = WIDE
    gate: Tile | Way = ROW
    down: Tile | Way = DEEP
    leave_out: str = ""


G2 = Way(2, 512, 4, 5)
SETTINGS = (
    Setting("now"),
    *(Setting(f"now, without {w}", leave_out=w) for w in ("gate_up", "down", "norm", "qkv", "o", "halve", "rotate")),
    Setting("now, gate deep rows", gate=ONE),
    Setting("gate 2 x5", gate=G2),
    Setting("gate 2 x6", gate=Way(2, 512, 4, 6)),
    Setting("gate 2 x4", gate=Way(2, 512, 4, 4)),
    Setting("gate 2 x3", gate=Way(2, 512, 4, 3)),
    Setting("gate 1 x6", gate=Way(1, 512, 4, 6)),
    Setting("gate 4 x3", gate=Way(4, 512, 4, 3)),
    Setting("gate 2 x4 norm", gate=Way(2, 512, 4, 4, True)),
    Setting("gate 2 x3 norm", gate=Way(2, 512, 4, 3, True)),
    Setting("gate 4 x2 norm", gate=Way(4, 512, 4, 2, True)),
    Setting("qkv 4 x4", qkv=Way(4, 512, 4, 4)),
    Setting("qkv 2 x4", qkv=Way(2, 512, 4, 4)),
    Setting("qkv 4 x4 norm", qkv=Way(4, 512, 4, 4, True)),
    Setting("qkv 2 x4 norm", qkv=Way(2, 512, 4, 4, True)),
    Setting("qkv 4 x3 norm", qkv=Way(4, 512, 4, 3, True)),
    Setting("o 4 x4", o=Way(4, 512, 4, 4)),
    Setting("o 4 x5", o=Way(4, 512, 4, 5)),
    Setting("o 2 x5", o=Way(2, 512, 4, 5)),
    Setting("down 4 x1 16 warps", down=Way(4, 2048, 16, 1)),
    Setting("down 2 x1 16 warps", down=Way(2, 2048, 16, 1)),
    Setting("down 2 x2 8 warps", down=Way(2, 2048, 8, 2)),
    Setting("down 1 x3 8 warps", down=Way(1, 2048, 8, 3)),
    Setting("down long 2 x28", down=Way(2, 128, 1, 28)),
    Setting("down long 2 x16", down=Way(2, 128, 1, 16)),
    Setting("down long 1 x32", down=Way(1, 128, 1, 32)),
    Setting("down long 2 x7 wide", down=Way(2, 512, 4, 7)),
    Setting("down long 1 x8 wide", down=Way(1, 512, 4, 8)),
    Setting("all x4 norm", qkv=Way(4, 512, 4, 4, True), o=Way(4, 512, 4, 4), gate=Way(2, 512, 4, 4, True),
            down=Way(2, 2048, 8, 2)),
    Setting("all but down x4 norm", qkv=Way(4, 512, 4, 4, True), o=Way(4, 512, 4, 4), gate=Way(2, 512, 4, 4, True)),
    Setting("all but down", qkv=Way(4, 512, 4, 4), o=Way(4, 512, 4, 4), gate=G2),
)  # fmt: skip


def shape(way: Way, k: int, **more: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((more | {"K": k, "R": way.rows, "W": way.words, "PDL": True, "ASM": True}).items())


def one(type: str, n: int, k: int, way: Way, y: Any, x: Any, w: Sequence[Any], add: Any) -> Call:
    if way.words * 8 < k:
        constants = shape(way, k, FORMAT=type, ADD=True)
        grid = (min(SMS * way.each, -(-n // way.rows)),)
        return Call(stream.stream_long, grid, (y, x, *w, add, 1.0, n), constants, way.warps, True)
    constants = shape(way, k, FORMAT=type, NORM=False, ADD=True)
    return Call(stream.stream, (SMS * way.each,), (y, x, add, 1e-5, *w, add, 1.0, n), constants, way.warps, True)


def three(types: Sequence[str], ns: Sequence[int], k: int, way: Way, ys: Any, x: Any, gain: Any, ws: Any) -> Call:
    programs = SMS * way.each
    size = [base.nbytes(t, n, k) for t, n in zip(types, ns)]
    first, second = (round(programs * s / sum(size)) for s in size[:2])
    constants = shape(way, k, F0=types[0], F1=types[1], F2=types[2], NORM=way.norm)
    args = (*ys, x, gain, 1e-5, *ws[0], *ws[1], *ws[2], *ns, first, second)
    return Call(stream.stream3, (programs,), args, constants, way.warps, True)


def gate_up(type: str, n: int, k: int, way: Way, y: Any, x: Any, gain: Any, g: Any, u: Any) -> Call:
    constants = shape(way, k, FORMAT=type, NORM=way.norm, KIND="silu")
    return Call(stream.stream_gate_up, (SMS * way.each,), (y, x, gain, 1e-5, *g, *u, n), constants, way.warps, True)


def layer(s: Setting, six: bool, b: dict[str, Any], w: dict[str, Any]) -> Iterator[tuple[str, Call]]:
    v = "Q6_K" if six else "Q4_K"
    types, ns = ("Q4_K", "Q4_K", v), (E, 1024, 1024)
    ys, ws = (b["q"], b["k"], b["v"]), (w["q"], w["k"], w["v"])
    inside = isinstance(s.qkv, Way) and s.qkv.norm
    if not inside:
        yield "norm", base.norm(E, True, b["xq"], b["h"], b["gain"])
    if isinstance(s.qkv, Way):
        yield "qkv", three(types, ns, E, s.qkv, ys, b["h"] if inside else b["xq"], b["gain"], ws)
    else:
        yield "qkv", base.qkv(types, ns, E, s.qkv, True, ys, b["xq"], ws)
    yield "rotate", base.rotate(True, b["qr"], b["keys"], b["q"], b["k"], b["v"], b["ints"], b["freq"], b["ints"])
    yield "attend", base.halve(E, True, b["xq"], b["qr"])
    if isinstance(s.o, Way):
        yield "o", one("Q4_K", E, E, s.o, b["h"], b["xq"], w["o"], b["h"])
    else:
        yield "o", base.mv("Q4_K", E, E, s.o, True, b["h"], b["xq"], w["o"], b["h"])
    inside = isinstance(s.gate, Way) and s.gate.norm
    if not inside:
        yield "norm", base.norm(E, True, b["xq"], b["h"], b["gain"])
    if isinstance(s.gate, Way):
        yield "gate_up", gate_up("Q4_K", F, E, s.gate, b["f"], b["h"] if inside else b["xq"], b["gain"], w["gate"], w["up"])
    else:
        yield "gate_up", base.gate_up("Q4_K", F, E, s.gate, True, b["f"], b["fq"], b["xq"], w["gate"], w["up"])
    yield "halve", base.halve(F, True, b["fq"], b["f"])
    if isinstance(s.down, Way):
        yield "down", one(v, E, F, s.down, b["h"], b["fq"], w["down"], b["h"])
    else:
        yield "down", base.mv(v, E, F, s.down, True, b["h"], b["fq"], w["down"], b["h"])


def step_keys() -> dict[tuple[Any, ...], None]:
    fake = base.buffers(True)
    found: dict[tuple[Any, ...], None] = {}
    for s in SETTINGS:
        for six in (False, True):
            for _, call in layer(s, six, fake, base.weights(six, True)):
                found[call.key()] = None
    for call in base.head(base.Setting(""), fake, base.dtypes("Q6_K")):
        found[call.key()] = None
    return found


def step(log: Log) -> None:
    b = base.buffers(False)
    layers = [(i % 2 == 0, base.weights(i % 2 == 0, False)) for i in range(LAYERS)]
    top = base.planes("Q6_K", V, E)
    begin = torch.randn(E, device="cuda")
    want: dict[str, torch.Tensor] = {}
    for s in SETTINGS:
        if log.over(3.0):
            log.note("step", {"stopped": s.name})
            return
        calls = [c for six, w in layers for name, c in layer(s, six, b, w) if name != s.leave_out]
        calls += base.head(base.Setting(""), b, top)
        try:
            # One layer of each kind from the same input: every way gives the same.
            b["h"].copy_(begin)
            b["keys"].zero_()
            off = 0.0
            if not s.leave_out:
                for six, w in layers[:2]:
                    for _, c in layer(s, six, b, w):
                        c()
                made = b["h"].clone()
                first = want.setdefault("h", made)
                off = float((made - first).norm() / (first - begin).norm())
            seconds, spread = timed(calls)
        except Exception as error:
            log.note("step", {"name": s.name, "failed": str(error)[:300]})
            continue
        log.note("step", {"name": s.name, "ms": round(seconds * 1e3, 4), "launches": len(calls), "spread": round(spread, 3),
                          "off": off})  # fmt: skip


HEADS, KV, DIM, SIZE = 32, 8, 128, 32
LENGTHS = (1, 32, 64, 65, 128, 129, 256, 512, 1024, 2048, 4096, 8192, 32000)


def attend_now(
    n_keys: int, out: Any, part: Any, top: Any, arrived: Any, q: Any, k: Any, v: Any, ints: Any, at: Any
) -> Call:
    tile = attention.tiles("float16", DIM, HEADS // KV, True)[0]
    items = int(attention.splits_of(np.array([n_keys]))[0])
    constants = {"HEADS": HEADS, "KV_HEADS": KV, "DIM": DIM, "WIDE": DIM, "SIZE": SIZE, "WINDOW": False, "CAP": False,
                 "SINKS": False, "SHARE": 4, "BLOCK_M": tile.rows, "BLOCK_N": tile.keys, "SHORTEST": attention.LEAST_SPLIT,
                 "MOST": attention.MOST_SPLITS, "AT_ONCE": 16, "HALVED": True, "PLAIN": False, "PDL": True}  # fmt: skip
    begin, length, table, width, item = (ints[name] for name in ("begin", "length", "table", "width", "item"))
    args = (out, out if at is None else at, part, top, arrived, q, k, v, k, begin, length, table, width, item, 1,
            DIM**-0.5 * attention.LOG2E, 0.0, 0)  # fmt: skip
    return Call(attention.attend_one, (items, KV), args, tuple(constants.items()), tile.warps, True)


def attend_keys() -> dict[tuple[Any, ...], None]:
    f16, f32, i32 = torch.float16, torch.float32, torch.int32
    ints = dict.fromkeys(("begin", "length", "table", "width", "item"), i32)
    call = attend_now(64, f16, f32, f32, i32, f16, f16, f16, ints, i32)
    fake = base.buffers(True)
    rotate = base.rotate(True, fake["qr"], fake["keys"], fake["q"], fake["k"], fake["v"], i32, fake["freq"], i32)
    return {call.key(): None, rotate.key(): None}


def attend(log: Log) -> None:
    """Rope, append and attention of 32 layers; the chain alone, without the maps between."""
    b = base.buffers(False)
    caches = [torch.randn(2, 1024 * SIZE * KV * DIM, device="cuda").half() for _ in range(8)]
    part, top = torch.empty(64 * HEADS * DIM, device="cuda"), torch.empty(64 * HEADS * 2, device="cuda")
    arrived = torch.zeros(64, dtype=torch.int32, device="cuda")
    out, at = torch.empty(E, device="cuda").half(), torch.empty(E, dtype=torch.int32, device="cuda")
    for n_keys in LENGTHS:
        if log.over(2.0):
            log.note("attend", {"stopped": n_keys})
            return
        items = int(attention.splits_of(np.array([n_keys]))[0])
        lists = {"begin": [0, 1], "length": [n_keys], "table": list(range(1024)), "width": [1024], "item": [0, items],
                 "slots": [n_keys - 1]}  # fmt: skip
        ints = {name: torch.tensor(x, dtype=torch.int32, device="cuda") for name, x in lists.items()}
        pairs = [
            (base.rotate(True, b["qr"], c[0], b["q"], b["k"], b["v"], ints["slots"], b["freq"], ints["slots"]),
             attend_now(n_keys, out, part, top, arrived, b["qr"], c[0], c[1], ints, at))
            for c in (caches[i % len(caches)] for i in range(LAYERS))
        ]  # fmt: skip
        try:
            both, _ = timed([c for pair in pairs for c in pair])
            alone, _ = timed([pair[1] for pair in pairs])
        except Exception as error:
            log.note("attend", {"keys": n_keys, "failed": str(error)[:300]})
            continue
        log.note("attend", {"keys": n_keys, "splits": items, "rotate_and_attend_us": round(both / LAYERS * 1e6, 2),
                            "attend_us": round(alone / LAYERS * 1e6, 2)})  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--parts", default="attend,step")
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--out", default="rows.json")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2)
    args = parser.parse_args()
    parts = args.parts.split(",")
    log = Log(args.out, args.seconds)
    keys = (step_keys() if "step" in parts else {}) | (attend_keys() if "attend" in parts else {})
    log.note("compile", {"variants": len(keys)})
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        faults = [f for f, _ in pool.map(base.compile_one, keys) if f]
    log.note("compile", {"seconds": time.perf_counter() - base.BEGAN, "faults": faults})
    base.stream(log)
    for part in parts:
        {"attend": attend, "step": step}[part](log)
    log.note("end", {"seconds": time.perf_counter() - base.BEGAN})
    return 0


if __name__ == "__main__":
    sys.exit(main())
