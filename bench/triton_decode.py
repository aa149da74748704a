"""Decode kernels on a CUDA device: checked against NumPy, timed in CUDA graphs over weights that no cache holds.

    python bench/triton_decode.py --parts check,single,step --seconds 80 --out results.json

Weights are packed random blocks, repeated. Every result is written as it comes, so a run that is cut off loses nothing.
Kernels are compiled first, in worker processes that share Triton's cache.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from quarrel.gguf import GGMLType
from quarrel.ops import draw
from quarrel.triton_backend import halved, matvec, rope
from quarrel.triton_backend.few_tiles import Tile
from quarrel.triton_backend.pack import Packed, Uploader, pack

BEGAN = time.perf_counter()
FLOATS = ("F16", "BF16")


@dataclass(frozen=True)
class Call:
    """One launch: tensors may be dtypes when it is only compiled."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int
    pdl: bool
    registers: int = 0
    """At most so many a thread, if not 0."""
    together: bool = False
    """All programs at once, as barriers of the grid need it."""

    def options(self) -> dict[str, Any]:
        told = dict(self.constants) | {"num_warps": self.warps, "num_stages": 2, "enable_fp_fusion": True}
        told |= {"maxnreg": self.registers} if self.registers else {}
        told |= {"launch_cooperative_grid": True} if self.together else {}
        return told | ({"launch_pdl": True} if self.pdl else {})

    def __call__(self) -> Any:
        return self.kernel[self.grid](*self.args, **self.options())

    def key(self) -> tuple[Any, ...]:
        """What its compilation depends on, without tensors; can be sent to a worker."""
        args = tuple(a.dtype if isinstance(a, torch.Tensor) else a for a in self.args)
        told = (self.warps, self.pdl, self.registers, self.together)
        return (self.kernel.__module__, self.kernel.__name__, args, self.constants, *told)


def compile_one(key: tuple[Any, ...]) -> tuple[str, float]:
    """Fills Triton's cache, in a worker."""
    module, name, args, constants, *rest = key
    began = time.perf_counter()
    call = Call(getattr(sys.modules.get(module) or __import__(module, fromlist=["_"]), name), (1,), args, constants, *rest)
    try:
        call.kernel.warmup(*args, grid=(1,), **call.options())
    except Exception as error:
        return f"{name} {dict(constants)}: {str(error)[-300:]}", time.perf_counter() - began
    return "", time.perf_counter() - began


class Log:
    """Rows of results, written after each."""

    def __init__(self, path: str, seconds: float) -> None:
        self._path, self._until = Path(path), BEGAN + seconds
        self._rows: dict[str, list[Any]] = {}

    def note(self, part: str, row: Any) -> None:
        self._rows.setdefault(part, []).append(row)
        self._path.write_text(json.dumps(self._rows))
        print(f"{time.perf_counter() - BEGAN:6.1f} {part} {json.dumps(row)}", flush=True)

    def over(self, spare: float = 0.0) -> bool:
        return time.perf_counter() + spare > self._until


@cache
def base(type: str, k: int) -> Packed:
    """64 packed rows."""
    weight = draw.weight(np.random.default_rng(k), GGMLType[type], 64, k, 0.02)
    return pack(GGMLType[type], 64, k, lambda a, b: weight.raw[a:b], Uploader(torch.device("cuda")))


def planes(type: str, n: int, k: int) -> tuple[torch.Tensor, ...]:
    """n rows, as the kernels read them."""
    given = base(type, k).planes
    made = {id(p): p.view(64, -1).repeat(-(-n // 64), 1)[:n].contiguous() for p in given}
    return matvec.wide(type, [made[id(p)] for p in given])


def nbytes(type: str, n: int, k: int) -> float:
    return n * k * {"Q4_K": 148 / 256, "Q5_K": 180 / 256, "Q6_K": 210 / 256, "Q8_0": 34 / 32, "Q4_0": 18 / 32,
                    "MXFP4": 17 / 32, "F16": 2, "BF16": 2}[type]  # fmt: skip


def timed(calls: Sequence[Callable[[], Any]], rounds: int = 7) -> tuple[float, float]:
    """Median and spread of the seconds of a graph of all calls."""
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    took = []
    for _ in range(rounds):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        torch.cuda.synchronize()
        took.append(a.elapsed_time(b) * 1e-3)
    return float(np.median(took)), max(took) / min(took) - 1


def act(type: str, k: int, x: Any, xq: Any) -> Any:
    return x if type in FLOATS else xq


def mv(type: str, n: int, k: int, tile: Tile, pdl: bool, y: Any, x: Any, w: Sequence[Any], add: Any = None) -> Call:
    constants = {"K": k, "FORMAT": type, "BIAS": False, "ADD": add is not None, "R": tile.rows, "W": tile.words, "PDL": pdl,
                 "DEEP": tile.deep, "ASM": True}  # fmt: skip
    args = (y, x, *w, y, y if add is None else add, 1.0, n)
    return Call(matvec.matvec, (-(-n // tile.rows),), args, tuple(constants.items()), tile.warps, pdl)


def qkv(types: Sequence[str], ns: Sequence[int], k: int, tile: Tile, pdl: bool, ys: Any, x: Any, ws: Any) -> Call:
    constants = {"K": k, "F0": types[0], "F1": types[1], "F2": types[2], "BIAS": False, "R": tile.rows, "W0": tile.words,
                 "W1": tile.words, "W2": tile.words, "PDL": pdl, "DEEP": tile.deep, "ASM": True}  # fmt: skip
    args = (*ys, x, x, x, *ws[0], *ws[1], *ws[2], *ys, *ns)
    return Call(matvec.matvec3, (sum(-(-n // tile.rows) for n in ns),), args, tuple(constants.items()), tile.warps, pdl)


def gate_up(type: str, n: int, k: int, tile: Tile, pdl: bool, y: Any, x: Any, g: Any, u: Any) -> Call:
    constants = {"K": k, "FORMAT": type, "KIND": "silu", "BIAS": False, "R": tile.rows, "W": tile.words, "PDL": pdl,
                 "ASM": True}  # fmt: skip
    args = (y, x, *g, *u, y, y, n)
    return Call(matvec.gate_up, (-(-n // tile.rows),), args, tuple(constants.items()), tile.warps, pdl)


def halve(k: int, pdl: bool, to: Any, x: Any) -> Call:
    constants = {"K": k, "B": 16, "PDL": pdl}
    return Call(halved.halve_rows, (1, -(-k // 512)), (to, x), tuple(constants.items()), 4, pdl)


def norm(k: int, pdl: bool, to: Any, x: Any, gain: Any, warps: int = 8) -> Call:
    constants = {"K": k, "B": 1 << (k // 32 - 1).bit_length(), "HALVED": True, "PLAIN": False, "PDL": pdl}
    return Call(halved.norm_halve_rows, (1,), (to, x, x, gain, 1e-5), tuple(constants.items()), warps, pdl)


def rotate(pdl: bool, y: Any, keys: Any, q: Any, k: Any, v: Any, positions: Any, freq: Any, slots: Any) -> Call:
    constants = {"Q_HEADS": 32, "HEADS": 8, "SIZE": 32, "NEOX": False, "DIM": 128, "ROT": 128, "HALF": 64, "REST": 1,
                 "WIDE": 128, "R": 4, "KIND": "plain", "PDL": pdl}  # fmt: skip
    args = (y, keys, keys, keys, keys, q, k, v, positions, freq, slots, 1.0, 1.0, 1)
    return Call(rope.rope_append_rows, (8, 3), args, tuple(constants.items()), 4, pdl)


SHAPES = ((4096, 4096), (6144, 4096), (14336, 4096), (4096, 14336))
ONE, DEEP, WIDE = Tile(2, 128, 1), Tile(2, 128, 1, True), Tile(4, 512, 4)
ROW, LONG = Tile(1, 128, 1), Tile(1, 512, 1)
TYPES = ("Q4_K", "Q6_K", "Q8_0", "F16", "MXFP4", "Q5_K", "Q4_0", "BF16")


def singles(quick: bool) -> Iterator[tuple[str, int, int, Tile, bool]]:
    """In the order of what matters most."""
    for type in TYPES[:2] if quick else TYPES:
        for n, k in ((4096, 14336), (4096, 4096)):
            tiles = (
                (ONE, DEEP, Tile(1, 128, 1, True), WIDE) if type not in FLOATS else (ONE, Tile(2, 256, 1, True), LONG, WIDE)
            )
            for tile in tiles:
                yield type, n, k, tile, True


def dtypes(type: str) -> tuple[torch.dtype, ...]:
    i8, i16, i32, i64, f16 = torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16
    return {"Q4_K": (i32, i32, i16, i32), "Q5_K": (i32, i32, i16, i32), "Q6_K": (i32, i64, i16, f16),
            "Q8_0": (i32, i32, f16, i32), "Q4_0": (i32, i32, f16, i32), "MXFP4": (i32, i32, i8, i32),
            "F16": (f16,) * 4, "BF16": (i16,) * 4}[type]  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """How a whole step is launched."""

    name: str
    qkv: Tile = DEEP
    o: Tile = WIDE
    down: Tile = DEEP
    gate: Tile = ROW
    head: Tile = ONE
    leave_out: str = ""
    pdl: bool = True


SETTINGS = (
    Setting("chosen"),
    Setting("not early", pdl=False),
    Setting("gate 2 rows", gate=ONE),
    Setting("gate wide", gate=WIDE),
    Setting("gate long", gate=LONG),
    Setting("gate 256", gate=Tile(1, 256, 1)),
    Setting("down near", down=ONE),
    Setting("down 1 row", down=Tile(1, 128, 1, True)),
    Setting("down 256", down=Tile(1, 256, 1, True)),
    Setting("down wide", down=Tile(4, 512, 4, True)),
    Setting("o deep", o=DEEP),
    Setting("o long", o=LONG),
    Setting("qkv wide", qkv=WIDE),
    Setting("qkv long", qkv=LONG),
    Setting("qkv near", qkv=ONE),
    Setting("head deep", head=DEEP),
    Setting("head long", head=LONG),
    *(
        Setting(f"without {what}", leave_out=what)
        for what in ("gate_up", "down", "norm", "qkv", "o", "halve", "rotate", "head")
    ),
)
E, F, V, LAYERS = 4096, 14336, 32000, 32


def layer(s: Setting, six: bool, b: dict[str, Any], w: dict[str, Any]) -> Iterator[tuple[str, Call]]:
    """A Mistral-7B layer without attention itself; `b` are buffers (or dtypes), `w` planes (or dtypes)."""
    v = "Q6_K" if six else "Q4_K"
    yield "norm", norm(E, s.pdl, b["xq"], b["h"], b["gain"])
    yield "qkv", qkv(("Q4_K", "Q4_K", v), (E, 1024, 1024), E, s.qkv, s.pdl, (b["q"], b["k"], b["v"]), b["xq"],
                     (w["q"], w["k"], w["v"]))  # fmt: skip
    yield "rotate", rotate(s.pdl, b["qr"], b["keys"], b["q"], b["k"], b["v"], b["ints"], b["freq"], b["ints"])
    yield "halve", halve(E, s.pdl, b["xq"], b["qr"])
    yield "o", mv("Q4_K", E, E, s.o, s.pdl, b["h"], b["xq"], w["o"], b["h"])
    yield "norm", norm(E, s.pdl, b["xq"], b["h"], b["gain"])
    yield "gate_up", gate_up("Q4_K", F, E, s.gate, s.pdl, b["f"], b["xq"], w["gate"], w["up"])
    yield "halve", halve(F, s.pdl, b["fq"], b["f"])
    yield "down", mv(v, E, F, s.down, s.pdl, b["h"], b["fq"], w["down"], b["h"])


def buffers(fake: bool) -> dict[str, Any]:
    f16, f32, i32 = torch.float16, torch.float32, torch.int32
    sizes = {
        "h": (E, f32),
        "gain": (E, f32),
        "q": (E, f16),
        "k": (1024, f16),
        "v": (1024, f16),
        "qr": (E, f16),
        "f": (F, f16),
    }
    sizes |= {"keys": (64 * 32 * 1024, f16), "ints": (16, i32), "freq": (64, f32), "logits": (V, f32)}
    sizes |= {"xq": (halved.words(E), i32), "fq": (halved.words(F), i32)}
    if fake:
        return {name: dtype for name, (_, dtype) in sizes.items()}
    made = {n: torch.randn(s, device="cuda").to(t) if t.is_floating_point else torch.ones(s, dtype=t, device="cuda")
            for n, (s, t) in sizes.items()}  # fmt: skip
    made["gain"].abs_()
    return made


def weights(six: bool, fake: bool) -> dict[str, Any]:
    v = "Q6_K" if six else "Q4_K"
    shapes = {"q": ("Q4_K", E, E), "k": ("Q4_K", 1024, E), "v": (v, 1024, E), "o": ("Q4_K", E, E), "gate": ("Q4_K", F, E),
              "up": ("Q4_K", F, E), "down": (v, E, F)}  # fmt: skip
    return {name: dtypes(t) if fake else planes(t, n, k) for name, (t, n, k) in shapes.items()}


def head(s: Setting, b: dict[str, Any], w: Any) -> list[Call]:
    return [norm(E, s.pdl, b["xq"], b["h"], b["gain"]), mv("Q6_K", V, E, s.head, s.pdl, b["logits"], b["xq"], w)]


def keys_of(parts: Sequence[str], quick: bool) -> list[tuple[Any, ...]]:
    found: dict[tuple[Any, ...], None] = {}
    if "check" in parts:
        for type in TYPES:
            for k in (4096, 2048 + 512, 14336):
                x = act(type, k, torch.float16, torch.int32)
                found[mv(type, 64, k, ONE, False, torch.float32, x, dtypes(type)).key()] = None
    if "single" in parts:
        for type, n, k, tile, pdl in singles(quick):
            x = torch.float16 if type in FLOATS else torch.int32
            found[mv(type, n, k, tile, pdl, torch.float16, x, dtypes(type)).key()] = None
        for k in (4096, 14336):
            found[halve(k, False, torch.int32, torch.float16).key()] = None
    if "step" in parts:
        fake = buffers(True)
        for s in SETTINGS:
            for six in (False, True):
                for _, call in layer(s, six, fake, weights(six, True)):
                    found[call.key()] = None
            for call in head(s, fake, dtypes("Q6_K")):
                found[call.key()] = None
    return list(found)


def halved_of(x: torch.Tensor) -> torch.Tensor:
    to = torch.empty(halved.words(x.numel()), dtype=torch.int32, device="cuda")
    halve(x.numel(), False, to, x)()
    return to


def check(log: Log) -> None:
    """Against float64 in NumPy, from the raw blocks."""
    for type in TYPES:
        for k in (4096, 2048 + 512, 14336):
            weight = draw.weight(np.random.default_rng(k), GGMLType[type], 64, k, 0.02)
            x = torch.randn(k, device="cuda", dtype=torch.float16)
            y = torch.full((64,), float("nan"), device="cuda")
            w = matvec.wide(type, base(type, k).planes)
            mv(type, 64, k, ONE, False, y, act(type, k, x, halved_of(x)), w)()
            want = weight.dense().astype(np.float64) @ x.double().cpu().numpy()
            error = float(np.linalg.norm(y.double().cpu().numpy() - want) / np.linalg.norm(want))
            log.note("check", {"type": type, "k": k, "error": error, "ok": error < 3e-4})


def stream(log: Log) -> None:
    """Read-only bandwidth, for shares."""
    a = torch.randint(0, 2**30, (1 << 28,), dtype=torch.int32, device="cuda")
    seconds, spread = timed([lambda: torch.amax(a)])
    log.note("read", {"tb_s": a.numel() * 4 / seconds / 1e12, "how": "torch.amax", "spread": spread})


def single(log: Log, quick: bool) -> None:
    made: dict[Any, Any] = {}
    truth: dict[Any, torch.Tensor] = {}
    for type, n, k, tile, pdl in singles(quick):
        if log.over(2.0):
            log.note("single", {"stopped": [type, n, k]})
            return
        if (type, n, k) not in made:
            made.clear()
            copies = max(2, int(3e8 // nbytes(type, n, k)))
            x = torch.randn(k, device="cuda", dtype=torch.float16)
            made[type, n, k] = ([planes(type, n, k) for _ in range(copies)], act(type, k, x, halved_of(x)))
        packs, x = made[type, n, k]
        y = torch.full((n,), float("nan"), device="cuda", dtype=torch.float16)
        calls = [mv(type, n, k, tile, pdl, y, x, w) for w in packs]
        try:
            kernel = calls[0]()
            torch.cuda.synchronize()
            first = truth.setdefault((type, n, k), y.clone())
            off = float((y.float() - first.float()).norm() / first.float().norm())
            seconds, spread = timed(calls)
        except Exception as error:
            log.note("single", {"type": type, "n": n, "k": k, "tile": str(tile), "failed": str(error)[:200]})
            continue
        seconds /= len(calls)
        log.note("single", {"type": type, "n": n, "k": k, "tile": [tile.rows, tile.words, tile.warps], "pdl": pdl,
                            "deep": tile.deep, "us": round(seconds * 1e6, 2), "off": off, "spread": round(spread, 3),
                            "tb_s": round(nbytes(type, n, k) / seconds / 1e12, 3), "regs": kernel.n_regs,
                            "spills": kernel.n_spills})  # fmt: skip


def step(log: Log) -> None:
    b = buffers(False)
    layers = [(i % 2 == 0, weights(i % 2 == 0, False)) for i in range(LAYERS)]
    top = planes("Q6_K", V, E)
    torch.cuda.synchronize()
    total = sum(t.numel() * t.element_size() for _, w in layers for p in w.values() for t in dict.fromkeys(p))
    log.note("step", {"weight_bytes": total, "head_bytes": sum(t.numel() * t.element_size() for t in dict.fromkeys(top))})
    for s in SETTINGS:
        if log.over(2.0):
            log.note("step", {"stopped": s.name})
            return
        calls = [c for six, w in layers for name, c in layer(s, six, b, w) if name != s.leave_out]
        calls += head(s, b, top) if s.leave_out != "head" else []
        b["h"].normal_()
        try:
            seconds, spread = timed(calls)
        except Exception as error:
            log.note("step", {"name": s.name, "failed": str(error)[:300]})
            continue
        finite = bool(torch.isfinite(b["h"]).all())
        log.note("step", {"name": s.name, "ms": round(seconds * 1e3, 4), "launches": len(calls), "spread": round(spread, 3),
                          "finite": finite})  # fmt: skip


def wait_for(process: subprocess.Popen[bytes], seconds: float) -> float:
    """Until it is over or that has passed: what else runs on the device would show in the timings."""
    began = time.perf_counter()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--parts", default="check,step,single")
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--out", default="decode.json")
    parser.add_argument("--quick", action="store_true", help="fewer single kernels")
    parser.add_argument("--beside", default="", help="a command to run while kernels are compiled")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2)
    args = parser.parse_args()
    parts = args.parts.split(",")
    log = Log(args.out, args.seconds)
    beside = subprocess.Popen(args.beside, shell=True) if args.beside else None
    keys = keys_of(parts, args.quick)
    log.note("compile", {"variants": len(keys)})
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        faults = [f for f, _ in pool.map(compile_one, keys, chunksize=2) if f]
    log.note("compile", {"seconds": time.perf_counter() - BEGAN, "faults": faults})
    if beside is not None:
        log.note("beside", {"seconds": wait_for(beside, 6.0)})
    log.note("device", {"name": torch.cuda.get_device_name(), "torch": torch.__version__})
    runs = {"check": check, "stream": stream, "single": lambda log: single(log, args.quick), "step": step}
    for part in ["stream", *parts]:
        if not log.over():
            try:
                runs[part](log)
            except Exception as error:
                log.note(part, {"failed": repr(error)[:500]})
    log.note("end", {"seconds": time.perf_counter() - BEGAN})
    return 0


if __name__ == "__main__":
    sys.exit(main())
