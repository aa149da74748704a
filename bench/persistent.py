"""One row on CUDA: a layer, or its second half (o, norm, gate and up, down), in one launch, against the launches of today.

    python bench/persistent.py --out persistent.jsonl [--layers 16] [--keys 100] [--seconds 90] [--jobs 14]
    python bench/persistent.py --aot                  # no GPU: registers, spills and shared memory of each kernel for sm_90

A layer is Mistral-7B's in Q4_K_M, v and down of every other one in Q6_K. Kernels are compiled by several processes first.
Every way is then checked against float64 on all layers, and only those that are right are timed: graphs of all layers, in
turns, medians of 9 with their spread. A program that waits in vain goes on after some 30 ms and says so, which fails the
check, so a mistake cannot hold the device. A line of JSON each as it comes, most of the time spent compiling.

Kept if it wins: build it in from 1.5 us a layer on (docs/kernel-log.md).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import persistent_kernels as kernels
import triton.language as tl
import triton_decode as decode
from notes import Notes
from triton_decode import Call

from quarrel.gguf import GGMLType
from quarrel.ops import draw
from quarrel.triton_backend.attend_one import LOG2E, attend_one
from quarrel.triton_backend.few_tiles import gate_tile_for, tile_for, tiles_for
from quarrel.triton_backend.halved import norm_halve_rows, words
from quarrel.triton_backend.matvec import wide
from quarrel.triton_backend.pack import Packed, Uploader, blank, pack
from quarrel.triton_backend.runtime import INTERPRETED, cdiv, power_of_two

BEGAN = time.perf_counter()
EPS = 1e-5
PATIENCE = 1 << 15
"""Looks at a barrier, 0.7 to 1 us each."""
LIMIT = 2e-3
"""Of the change of h over all layers: what float16 between the ops of today leaves is 3e-4 to 1e-3."""
ROUNDS, REPLAYS, ROWS = 9, 10, 64
ASKED = 1 << 16
"""Bytes of codes a program asks the L2 cache for before a barrier: all of a unit of o, a unit of gate and of up."""


@dataclass(frozen=True)
class Shape:
    """Of a layer; `keys` before a token at most, `words` to a tile, `programs` of a launch, each on a multiprocessor."""

    e: int
    f: int
    heads: int
    kv_heads: int
    dim: int
    size: int
    keys: int
    words: int
    programs: int
    per: int
    """Units of gate and up a program."""

    @property
    def kv(self) -> int:
        return self.kv_heads * self.dim

    @property
    def busy(self) -> tuple[int, ...]:
        """Programs that have something to do, by phase: two units of q, k and v, a head, a unit of o and of down."""
        return (self.e + 2 * self.kv) // 64, self.heads, self.e // 32, cdiv(self.f // 32, self.per), self.e // 32


MISTRAL = Shape(4096, 14336, 32, 8, 128, size=32, keys=128, words=128, programs=132, per=4)
NAMES = ("q", "k", "v", "o", "gate", "up", "down")


class Weight:
    """A weight of ROWS random rows, repeated and turned by `turn`, so that layers differ."""

    def __init__(self, base: Packed, dense: torch.Tensor, n: int, turn: int) -> None:
        self.dense, self.turn = dense, turn
        self.packed = blank(GGMLType[base.format], n, base.k, base.buffer.device)
        for to, plane in zip(self.packed.planes, base.planes, strict=True):
            to.view(-1, ROWS, plane.shape[1]).copy_(plane.roll(turn, 0))
        self.planes = wide(base.format, self.packed.planes)

    def times(self, x: torch.Tensor) -> torch.Tensor:
        """In float64."""
        return (self.dense @ x).roll(self.turn).repeat(self.packed.n // ROWS)


@dataclass(frozen=True)
class Layer:
    six: bool
    maps: dict[str, Weight]
    gains: tuple[torch.Tensor, torch.Tensor]
    keys: torch.Tensor  # [blocks, kv_heads, size, dim] float16
    values: torch.Tensor


def formats(six: bool) -> dict[str, str]:
    return {name: "Q6_K" if six and name in ("v", "down") else "Q4_K" for name in NAMES}


def layers_of(shape: Shape, count: int, device: torch.device) -> list[Layer]:
    s, rng = shape, np.random.default_rng(0)
    sizes = {"q": (s.e, s.e), "k": (s.kv, s.e), "v": (s.kv, s.e), "o": (s.e, s.e), "gate": (s.f, s.e), "up": (s.f, s.e)}
    sizes["down"] = (s.e, s.f)
    upload, bases = Uploader(device), {}
    for name, (_, k) in sizes.items():
        for type in {formats(six)[name] for six in (False, True)}:
            weight = draw.weight(rng, GGMLType[type], ROWS, k, k**-0.5)
            raw = weight.raw
            packed = pack(GGMLType[type], ROWS, k, lambda a, b, raw=raw: raw[a:b], upload)
            bases[name, type] = packed, torch.from_numpy(weight.dense().astype(np.float64)).to(device)
    made = []
    cached = (cdiv(s.keys + 1, s.size) + 1, s.kv_heads, s.size, s.dim)
    drawn = torch.Generator(device="cpu").manual_seed(1)
    for i in range(count + 1):  # the last is there for its gain
        six = i % 2 == 0
        maps = {} if i == count else {
            name: Weight(*bases[name, type], sizes[name][0], 5 * i + j)
            for j, (name, type) in enumerate(formats(six).items())
        }  # fmt: skip
        gains = tuple((0.5 + torch.rand(s.e, generator=drawn)).to(device) for _ in range(2))
        keys, values = (torch.randn(cached, generator=drawn).half().to(device) for _ in range(2))
        made.append(Layer(six, maps, gains, keys, values))  # type: ignore[arg-type]
    return made


class State:
    """What a step reads and writes."""

    def __init__(self, shape: Shape, layers: Sequence[Layer], position: int, device: torch.device) -> None:
        s = self.shape = shape
        assert max(s.busy) <= s.programs, f"programs for each phase: {s.busy} of {s.programs}"
        assert s.e == s.heads * s.dim, s
        self.layers, self.position, self.device = layers, position, device

        def array(size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        def ints(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        self.start = torch.randn(s.e, generator=torch.Generator().manual_seed(2)).to(device)
        self.h = self.start.clone()
        self.x, self.mid, self.inner = (array(words(k), torch.int32) for k in (s.e, s.e, s.f))
        self.squares = array(s.e // 32, torch.float32)
        self.qkv, self.f = array(s.e + 2 * s.kv, torch.float16), array(s.f, torch.float16)
        self.q, self.k, self.v = self.qkv[: s.e], self.qkv[s.e : s.e + s.kv], self.qkv[s.e + s.kv :]
        self.out, self.part = array(s.e, torch.float16), array(s.e, torch.float32)
        self.top_sum = array(2 * s.heads, torch.float32)
        self.arrived, self.barrier = array(s.kv_heads, torch.int32), array(2, torch.int32)
        self.freq = 10000.0 ** (-torch.arange(0, s.dim, 2, device=device) / s.dim).float()
        # The blocks of the cache in reverse, so that the table is read.
        blocks = list(range(cdiv(s.keys + 1, s.size)))[::-1]
        self.block_table, self.width = ints(*blocks), ints(len(blocks))
        self.slot = ints(blocks[position // s.size] * s.size + position % s.size)
        self.where, self.kv_len, self.zero_one = ints(position), ints(position + 1), ints(0, 1)

    def reset(self) -> None:
        torch.mul(self.start, 1.0, out=self.h)  # a kernel, as all that may be started early follow one


def reference(state: State) -> torch.Tensor:
    """h after all layers, in float64; the cache is only read."""
    s, h, n = state.shape, state.start.double(), state.position
    angle = n * state.freq.double()
    sin, cos = angle.sin(), angle.cos()

    def normed(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean() + EPS) * gain

    def turned(x: torch.Tensor) -> torch.Tensor:
        a, b = x.view(-1, s.dim // 2, 2).unbind(-1)
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).view(-1, s.dim)

    for layer in state.layers[:-1]:
        m = layer.maps
        x = normed(h, layer.gains[0])
        q, k, v = turned(m["q"].times(x)), turned(m["k"].times(x)), m["v"].times(x).view(-1, s.dim)
        old = [t[state.block_table.long()].double().transpose(0, 1).reshape(s.kv_heads, -1, s.dim)[:, :n]
               for t in (layer.keys, layer.values)]  # fmt: skip
        keys, values = (torch.cat((t, new[:, None]), 1).repeat_interleave(s.heads // s.kv_heads, 0)
                        for t, new in zip(old, (k, v), strict=True))  # fmt: skip
        p = torch.softmax((keys @ q[:, :, None])[..., 0] * s.dim**-0.5, -1)
        h = h + m["o"].times((p[:, None] @ values).reshape(-1))
        x = normed(h, layer.gains[1])
        h = h + m["down"].times(torch.nn.functional.silu(m["gate"].times(x)) * m["up"].times(x))
    return h


def half_reference(state: State, x: torch.Tensor) -> torch.Tensor:
    """The same for halves of layers, of which each gets x."""
    h = state.start.double()
    for layer in state.layers[:-1]:
        m = layer.maps
        h = h + m["o"].times(x)
        n = h / torch.sqrt((h * h).mean() + EPS) * layer.gains[1]
        h = h + m["down"].times(torch.nn.functional.silu(m["gate"].times(n)) * m["up"].times(n))
    return h


def first_half(state: State, i: int) -> Iterator[Call]:
    """Norm, query, key and value, attention with rotation and append: the launches of today."""
    s, layer = state.shape, state.layers[i]
    types = formats(layer.six)
    ns, kinds = (s.e, s.kv, s.kv), tuple(types[n] for n in "qkv")
    yield norm(state, layer.gains[0])
    tile = tiles_for(kinds, sum(ns), s.e)[0]
    yield decode.qkv(
        kinds, ns, s.e, tile, True, (state.q, state.k, state.v), state.mid, [layer.maps[n].planes for n in "qkv"]
    )
    cache = (layer.keys, layer.values) * 2
    args = (state.out, state.x, state.part, state.top_sum, state.arrived, state.q, state.k, state.v, state.where,
            state.freq, state.slot, 1.0, 1.0, *cache, layer.keys, state.zero_one, state.kv_len, state.block_table,
            state.width, state.zero_one, 1, s.dim**-0.5 * LOG2E, 0.0, 0)  # fmt: skip
    share = power_of_two(s.heads // s.kv_heads)
    constants = {
        "HEADS": s.heads, "KV_HEADS": s.kv_heads, "DIM": s.dim, "WIDE": s.dim, "SIZE": s.size, "WINDOW": False,
        "CAP": False, "SINKS": False, "ROTATE": True, "NEOX": False, "SHARE": share, "BLOCK_M": 16, "BLOCK_N": 64,
        "SPLIT": 128, "MOST": 64, "AT_ONCE": max(1, 8192 // (s.dim * share)), "HALVED": True, "PLAIN": False,
        "EARLY": True, "KIND": "plain", "COMPUTE": tl.float16, "PDL": True,
    }  # fmt: skip
    yield Call(attend_one, (1, s.kv_heads), args, tuple(constants.items()), 4, True)


def norm(state: State, gain: torch.Tensor) -> Call:
    e = state.shape.e
    constants = {"K": e, "B": power_of_two(e // 32), "HALVED": True, "PLAIN": False, "PDL": True}
    return Call(norm_halve_rows, (1,), (state.mid, state.h, state.h, gain, EPS), tuple(constants.items()), 8, True)


def today(state: State, i: int) -> Iterator[Call]:
    """The other half in five launches."""
    s, layer, h = state.shape, state.layers[i], state.h
    types, planes = formats(layer.six), {n: w.planes for n, w in layer.maps.items()}
    yield decode.mv("Q4_K", s.e, s.e, tile_for("Q4_K", s.e, s.e), True, h, state.x, planes["o"], h)
    yield norm(state, layer.gains[1])
    tile = gate_tile_for("Q4_K", s.f, s.e)
    yield decode.gate_up("Q4_K", s.f, s.e, tile, True, state.f, state.mid, planes["gate"], planes["up"])
    yield decode.halve(s.f, True, state.inner, state.f)
    tile = tile_for(types["down"], s.e, s.f)
    yield decode.mv(types["down"], s.e, s.f, tile, True, h, state.inner, planes["down"], h)


def together(
    state: State, i: int, first: int, last: int, asked: int = ASKED, early: bool = False, more: bool = False
) -> Call:
    """Phases first to last of layer i in one launch. early: dependent on what is ahead, not cooperative. more: what comes
    next is a layer of this kind."""
    s, layer = state.shape, state.layers[i]
    types = formats(layer.six)
    # A phase alone is given no planes of others, so that it is compiled once for both formats.
    read = {0: ("q", "k", "v"), 2: ("o",), 3: ("gate", "up"), 4: ("down",)}
    used = {n for phase in range(first, last + 1) for n in read.get(phase, ())} or {"o"}
    planes = (p for n in NAMES for p in layer.maps[n if n in used else min(used)].planes)
    args = (state.h, state.x, state.mid, state.squares, state.inner, state.qkv, state.freq, state.block_table,
            state.position, EPS, layer.keys, layer.values, layer.gains[1], state.layers[i + 1].gains[0], *planes,
            state.barrier, PATIENCE, asked)  # fmt: skip
    constants = {
        "E": s.e, "F": s.f, "BLOCKS": power_of_two(s.e // 32), "HEADS": s.heads, "KV_HEADS": s.kv_heads, "DIM": s.dim,
        "SIZE": s.size, "KEYS": s.keys, "KIND": "silu", "FV": types["v"] if "v" in used else "Q4_K",
        "FD": types["down"] if "down" in used else "Q4_K", "FIRST": first, "LAST": last, "NEXT": more, "PER": s.per,
        "W": s.words, "PDL": early and not INTERPRETED, "ASM": not INTERPRETED,
    }  # fmt: skip
    alone = first == last
    grid = (s.busy[first] if alone else s.programs,)
    return Call(kernels.layer, grid, args, tuple(constants.items()), 16, early, together=not (alone or early))


def enter(state: State) -> Call:
    s = state.shape
    args = (state.h, state.mid, state.squares, state.layers[0].gains[0])
    return Call(kernels.enter, (s.e // 32,), args, (("E", s.e),), 1, False)


Part = Callable[[State, int], Iterable[Call]]
HALVES: dict[str, Part] = {
    "today": today,
    "one launch": lambda state, i: [together(state, i, 2, 4)],
    "one launch, nothing asked of L2": lambda state, i: [together(state, i, 2, 4, asked=0)],
    "one launch, started early": lambda state, i: [together(state, i, 2, 4, early=True)],
    "three launches": lambda state, i: [together(state, i, phase, phase, early=True) for phase in (2, 3, 4)],
}
"""Of the second half of a layer: o, norm, gate and up, down."""
LAYERS: dict[str, Part] = {
    "the layer in one launch": lambda state, i: [together(state, i, 0, 4, more=True)],
    "the layer in one launch, started early": lambda state, i: [together(state, i, 0, 4, early=True, more=True)],
    "the layer in five launches": lambda state, i: [
        together(state, i, phase, phase, early=True, more=True) for phase in range(5)
    ],
}


def calls_of(state: State, part: str, name: str) -> list[Call]:
    """Of all layers, or of their second halves."""
    layers = range(len(state.layers) - 1)
    if name in LAYERS:
        return [enter(state), *(c for i in layers for c in LAYERS[name](state, i))]
    begin: Part = first_half if part == "layer" else lambda state, i: ()
    return [c for i in layers for c in (*begin(state, i), *HALVES[name](state, i))]


def off(state: State, want: torch.Tensor) -> float:
    """Of the change of h."""
    return float((state.h.double() - want).norm() / (want - state.start.double()).norm())


def run(state: State, calls: Sequence[Call]) -> None:
    state.reset()
    with np.errstate(all="ignore"):
        for call in calls:
            call()


@dataclass
class Way:
    """One that is right, as a graph, and its times."""

    part: str
    name: str
    graph: Any
    launches: int
    seconds: list[float]


def checked(state: State, part: str, name: str, want: torch.Tensor, notes: Notes) -> Way | None:
    """Captured, if it is right twice and nobody waited in vain."""
    calls = calls_of(state, part, name)
    state.barrier.zero_()
    found = []
    for _ in range(2):
        run(state, calls)
        torch.cuda.synchronize()
        found.append(off(state, want))
    stuck = bool(state.barrier[1].item())
    right = max(found) <= LIMIT and not stuck
    notes.say(part=part, way=name, off=max(found), stuck=stuck, right=right, launches=len(calls))
    if not right:
        return None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(state, calls)
    graph.replay()
    torch.cuda.synchronize()
    again = off(state, want)
    notes.say(part=part, way=name, captured=again <= LIMIT, off=again)
    return Way(part, name, graph, len(calls), []) if again <= LIMIT else None


def timed(ways: Sequence[Way], layers: int, notes: Notes) -> None:
    for i in range(ROUNDS):
        for way in ways[:: 1 if i % 2 == 0 else -1]:
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            for _ in range(REPLAYS):
                way.graph.replay()
            b.record()
            torch.cuda.synchronize()
            way.seconds.append(a.elapsed_time(b) * 1e-3 / REPLAYS)
    for way in ways:
        now = next((w for w in ways if (w.part, w.name) == (way.part, "today")), way)
        us = [median(w.seconds) / layers * 1e6 for w in (way, now)]
        notes.say(part=way.part, way=way.name, us_a_layer=round(us[0], 3), gain_us=round(us[1] - us[0], 3),
                  spread=round(max(way.seconds) / min(way.seconds) - 1, 4))  # fmt: skip


WAYS = [*(("half", name) for name in HALVES), *(("layer", name) for name in (*HALVES, *LAYERS))]


def distinct(state: State) -> list[Call]:
    """Every kernel once."""
    return list({call.key(): call for way in WAYS for call in calls_of(state, *way)}.values())


Key = tuple[Any, ...]


def compiled(key: Key) -> tuple[Key, str]:
    """Fills Triton's cache, in a worker; what went wrong."""
    return key, decode.compile_one(key)[0]


def warm(state: State, jobs: int, until: float, notes: Notes) -> set[Key]:
    """The kernels that are ready by then, the longest begun first."""
    keys = sorted((call.key() for call in distinct(state)), key=lambda key: -span(key))
    ready, faults = set(), []
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(keys))) as pool:
        waiting = pool.imap_unordered(compiled, keys)
        try:
            for _ in keys:
                key, fault = waiting.next(max(0.1, until - time.perf_counter()))
                faults += [fault] if fault else []
                ready |= set() if fault else {key}
        except multiprocessing.TimeoutError:
            pass
        pool.terminate()
    notes.say(part="compile", kernels=len(keys), ready=len(ready), faults=faults)
    return ready


def span(key: Key) -> int:
    """Phases of a launch."""
    told = dict(key[3])
    return told.get("LAST", 0) - told.get("FIRST", 0)


def aot(jobs: int) -> None:
    """Registers of every kernel of ours, for sm_90, here."""
    from tools.triton_aot import compile_for, variant

    state = State(MISTRAL, layers_of(MISTRAL, 2, torch.device("cpu")), 100, torch.device("cpu"))
    calls = [c for c in distinct(state) if c.kernel.__module__ == "persistent_kernels"]
    found = [variant(c.kernel, "float16", c.args, dict(c.constants), c.options()) for c in calls]
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for made, report in zip(found, pool.map(compile_for, [(v, "sm_90") for v in found]), strict=True):
            told = dict(made.constants)
            shown = {name.lower(): told[name] for name in ("FIRST", "LAST", "FD", "PDL") if name in told}
            print(json.dumps({"kernel": report.kernel, **shown, "registers": report.registers, "stack": report.stack,
                              "spills": report.spills, "shared": report.shared,
                              "seconds": report.seconds}), flush=True)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("persistent.jsonl"))
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--keys", type=int, default=100, help="older keys of each layer, at most 128")
    parser.add_argument("--seconds", type=float, default=90.0, help="after which no other way is begun")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--aot", action="store_true", help="compile for sm_90 without a GPU, and print what ptxas says")
    args = parser.parse_args()
    if args.aot:
        aot(args.jobs)
        return 0
    notes, until, device = Notes(args.out, BEGAN), BEGAN + args.seconds, torch.device("cuda")
    state = State(MISTRAL, layers_of(MISTRAL, args.layers, device), args.keys, device)
    there = torch.cuda.get_device_properties(device)
    notes.say(part="device", name=there.name, multiprocessors=there.multi_processor_count, layers=args.layers)
    assert there.multi_processor_count >= MISTRAL.programs, "a program would have to wait for another's multiprocessor"
    ready = warm(state, args.jobs, BEGAN + args.seconds * 0.75, notes)
    x = torch.randn(MISTRAL.e, device=device, dtype=torch.float16)
    wants = {"half": half_reference(state, x.double()), "layer": reference(state)}
    ways = []
    for part, name in WAYS:
        if time.perf_counter() > until:
            notes.say(part=part, way=name, over=True)
            break
        if not ready >= {call.key() for call in calls_of(state, part, name)}:
            notes.say(part=part, way=name, compiled=False)
            continue
        try:
            if part == "half":
                decode.halve(MISTRAL.e, False, state.x, x)()
            made = checked(state, part, name, wants[part], notes)
        except Exception:
            notes.say(part=part, way=name, failed=traceback.format_exc(limit=-4)[-900:])
            continue
        ways += [] if made is None else [made]
    decode.halve(MISTRAL.e, False, state.x, x)()
    timed(ways, args.layers, notes)
    notes.say(part="end")
    return 0


if __name__ == "__main__":
    sys.exit(main())
