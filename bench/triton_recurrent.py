"""State-space and routing kernels on a CUDA device: errors against the references, microseconds against the bytes to move.

python bench/triton_recurrent.py --seconds 30 --out DIR [--only decode,prefill]

Kernels are compiled by forked processes first. Times are of CUDA graphs, medians of 7, over enough copies of the state that
none is found in a cache; the floor is the bytes that must move, at the read bandwidth found in the same run. DIR gets a
recurrent.json as results come.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from quarrel.gguf import GGMLType
from quarrel.ops import draw, reference
from quarrel.ops.compare import errors
from quarrel.ops.contract import Case, Compute, Op, Operand, RawWeight, StateRef, Value, WeightRef
from quarrel.ops.mixer import MAMBA2_MIX, SCAN1_GATE, Mamba2MixSpec
from quarrel.ops.moe import ROUTE, RouteSpec
from quarrel.ops.program import Node, Program
from quarrel.ops.registry import Registry, lower
from quarrel.ops.state import CONV, GATED_NORM, SCAN1, SCAN2, Scan1Spec, Scan2Spec
from quarrel.triton_backend import mixer, ssd
from quarrel.triton_backend.backend import FAMILIES, REGISTRY, create
from quarrel.triton_backend.plan import Plan
from quarrel.triton_backend.runtime import Live, Slot, Work
from quarrel.triton_backend.weights import Weights

H_TINY = Mamba2MixSpec(Scan2Spec(48, 64, 1, 128), 4, 1e-5)
H_SMALL = Mamba2MixSpec(Scan2Spec(128, 64, 1, 128), 4, 1e-5)
NANO = Mamba2MixSpec(Scan2Spec(64, 64, 8, 128), 4, 1e-5)
NAMES = {H_TINY: "granite-4-h-tiny", H_SMALL: "granite-4-h-small", NANO: "nemotron-3-nano"}
PARTS = Registry("triton", [i for f in FAMILIES for i in f.IMPLEMENTATIONS if i.op not in (MAMBA2_MIX, SCAN1_GATE)])


@dataclass(frozen=True)
class Run:
    """One thing to time: so many sequences of so many new tokens."""

    kind: str
    name: str
    op: Op
    spec: Any
    seqs: int
    new: int
    variant: str = ""
    tile: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return self.seqs * self.new

    @property
    def live(self) -> Live:
        return Live(self.tokens, self.seqs, self.seqs, self.new == 1, self.new > 1, 1)

    def floor(self) -> int:
        """Bytes that must be read or written once."""
        params = [*self.op.params(self.spec), *self.op.results(self.spec)]
        size = 0
        for p in params:
            count = int(np.prod([d for d in p.dims(self.spec) if isinstance(d, int)] or [1]))
            if p.kind == "act":
                size += 2 * count * self.tokens
            elif p.kind == "f32" or (p.kind == "i32" and self.op is ROUTE):
                size += 4 * count * self.tokens
            elif p.kind == "weight":
                size += 4 * count
            elif p.kind == "state":
                size += 8 * int(np.prod(p.dims(self.spec) or self.spec.state)) * self.seqs
        return size


def runs() -> Iterator[Run]:
    """The most telling first: time may run out."""
    for spec in (H_TINY, NANO):
        yield Run("decode", NAMES[spec], MAMBA2_MIX, spec, 1, 1)
        yield Run("prefill", NAMES[spec], MAMBA2_MIX, spec, 1, 4096)
    for spec in (H_TINY, NANO):
        yield Run("decode", NAMES[spec], MAMBA2_MIX, spec, 1, 1, "ops apart")
        for tile in ((1024, 4), (4096, 4), (4096, 8), (2048, 8)):
            yield Run("decode", NAMES[spec], MAMBA2_MIX, spec, 1, 1, f"tile {tile}", tile)
        for tile in ((128, 64, 8), (64, 64, 4), (64, 32, 4), (128, 32, 8)):
            yield Run("prefill", NAMES[spec], MAMBA2_MIX, spec, 1, 4096, f"tile {tile}", tile)
    for spec in (H_TINY, NANO):
        for seqs in (8, 32):
            yield Run("decode", NAMES[spec], MAMBA2_MIX, spec, seqs, 1)
        yield Run("prefill", NAMES[spec], MAMBA2_MIX, spec, 1, 512)
        yield Run("prefill", NAMES[spec], MAMBA2_MIX, spec, 8, 512)
    yield Run("decode", "mamba 2.8B", SCAN1_GATE, Scan1Spec(5120, 16), 1, 1)
    yield Run("prefill", "mamba 2.8B", SCAN1_GATE, Scan1Spec(5120, 16), 1, 2048)
    routes = (RouteSpec(64, 6, "softmax"), RouteSpec(128, 6, "sigmoid", True, 2.5, True), RouteSpec(32, 4, "softmax_topk"))
    for spec in routes:
        for tokens in (1, 4096):
            yield Run("route", f"{spec.n_experts} experts, {spec.gate}", ROUTE, spec, tokens, 1)
    for tile in ((1024, 4), (4096, 8)):
        yield Run("decode", NAMES[H_TINY], MAMBA2_MIX, H_TINY, 32, 1, f"tile {tile}", tile)
    yield Run("decode", NAMES[H_SMALL], MAMBA2_MIX, H_SMALL, 1, 1)
    yield Run("decode", "mamba 2.8B", SCAN1_GATE, Scan1Spec(5120, 16), 32, 1)
    yield Run("prefill", "falcon-mamba-7b", SCAN1_GATE, Scan1Spec(8192, 16), 4, 1024)


class Drawn:
    """Weights for a bench: what they hold changes no time."""

    def raw(self, ref: WeightRef) -> RawWeight:
        return RawWeight(ref.type, draw.as_float_type(np.full((ref.rows, ref.k), -0.5, np.float32), GGMLType.F32), ref.k)


Recorded = tuple[str, Callable[[], None]]


def plans(run: Run, device: torch.device, copies: int) -> list[list[Recorded]]:
    """The launches of each copy, by kernel name."""
    params, results = run.op.params(run.spec), run.op.results(run.spec)
    live, act = run.live, torch.float16
    found: list[list[Recorded]] = []
    if run.tile:
        module = mixer if run.kind == "decode" else ssd
        kept, module._TILE = module._TILE, run.tile  # type: ignore[attr-defined]
    starts = torch.arange(run.seqs + 1, dtype=torch.int32, device=device) * run.new
    tables = {
        "query_start": starts, "kv_len": torch.full((run.seqs,), run.new + 64, dtype=torch.int32, device=device),
        "state_slots": torch.arange(run.seqs, dtype=torch.int32, device=device),
    }  # fmt: skip
    types = {"act": act, "f32": torch.float32, "i32": torch.int32}
    for _ in range(copies):
        operands: list[Operand] = []
        inputs: dict[int, Slot] = {}
        states: list[torch.Tensor] = []
        for i, p in enumerate(params):
            dims = p.dims(run.spec)
            if p.kind == "weight":
                rows, k = dims if len(dims) == 2 else (1, dims[0])
                operands.append(WeightRef(f"{i}", GGMLType.F32, int(rows), int(k)))
            elif p.kind == "state":
                operands.append(StateRef(len(states)))
                shape = [int(d) for d in dims or run.spec.state]
                states.append(torch.randn([run.seqs + 1, *shape], device=device))
            else:
                operands.append(Value(i, p.kind, dims, p.name))
                wide = int(np.prod([d for d in dims if isinstance(d, int)] or [1]))
                random = torch.randn(run.tokens * wide, device=device).to(types[p.kind])
                inputs[i] = Slot(tables.get(p.name, random))
        outputs = tuple(Value(100 + i, r.kind, r.dims(run.spec), r.name) for i, r in enumerate(results))
        node = Node(run.op, run.spec, tuple(operands), outputs, "bench")
        values = {o.name: o for o in operands if isinstance(o, Value)}
        choices = lower(Program((node,), values, {}, ()), PARTS if run.variant == "ops apart" else REGISTRY)
        none = Slot(torch.zeros(1, dtype=torch.int32, device=device))
        recorded: list[Recorded] = []

        def note(kernel: Any, grid: Any, *args: Any, warps: int = 4, stages: int = 2, **rest: Any) -> None:
            def go() -> None:
                kernel[grid](*args, **rest, num_warps=warps, num_stages=stages, enable_fp_fusion=True)

            recorded.append((kernel.__name__, go))  # noqa: B023

        rows = {"T": run.tokens, "S": run.seqs, "R": run.seqs, "items": 1}
        weights = Weights(Drawn(), device, "float16")
        plan = Plan(
            choices, inputs, {v.id for v in outputs}, rows, weights, [], states, Work(none, none), "float16", device, note
        )
        for go in plan.launches:
            go(live)
        recorded.append(("keep", lambda plan=plan: None))  # type: ignore[misc]
        found.append(recorded)
    if run.tile:
        module._TILE = kept  # type: ignore[attr-defined]
    return found


def seconds(calls: list[Callable[[], None]], repeats: int) -> float:
    """Of one pass over the calls, in a graph that makes `repeats` of them; median of 7."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    times = []
    for _ in range(8):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / repeats)
    return statistics.median(times[1:])


def measure(run: Run, device: torch.device, bandwidth: float) -> dict[str, Any]:
    copies = max(2, min(40, (160 << 20) // max(run.floor(), 1)))
    turn = plans(run, device, copies)
    calls = [go for recorded in turn for name, go in recorded if name != "keep"]
    whole = seconds(calls, 1 if len(calls) > 8 else 2) / copies
    row = {
        "kind": run.kind, "model": run.name, "variant": run.variant, "seqs": run.seqs, "new": run.new,
        "us": round(whole * 1e6, 2), "floor_us": round(run.floor() / bandwidth * 1e6, 2),
        "share": round(run.floor() / bandwidth / whole, 3),
    }  # fmt: skip
    names = [name for name, _ in turn[0] if name != "keep"]
    if len(names) > 1:
        parts = [[recorded[i][1] for recorded in turn] for i in range(len(names))]
        row["kernels_us"] = {n: round(seconds(p, 1) / copies * 1e6, 2) for n, p in zip(names, parts, strict=True)}
    return row


CHECKS: tuple[tuple[Op, Case], ...] = (
    *((op, case) for op in (MAMBA2_MIX, SCAN2, SCAN1_GATE, SCAN1, CONV, GATED_NORM, ROUTE) for case in op.cases()),
    (MAMBA2_MIX, Case(H_TINY, {"S": 2, "Q": 150}, "real")),
    (MAMBA2_MIX, Case(NANO, {"S": 9, "Q": 1}, "real")),
    (MAMBA2_MIX, Case(NANO, {"S": 2, "Q": 70, "extreme": 1}, "real, extreme steps")),
    (SCAN1_GATE, Case(Scan1Spec(5120, 16), {"S": 2, "Q": 150}, "real")),
)


def check(i: int, backend: Any) -> dict[str, Any]:
    op, case = CHECKS[i]
    assert op.make is not None
    inputs = op.make(case, np.random.default_rng(i))
    want = reference.run_op(op, case.spec, inputs)
    row: dict[str, Any] = {"op": op.name, "case": str(case.spec), "dims": dict(case.dims), "note": case.note}
    computes: tuple[Compute, ...] = ("float16", "bfloat16", "float32")
    for compute in computes:
        try:
            found = errors(op, case.spec, backend.run_op(op, case.spec, inputs, compute), want, case)
            row[compute] = {name: float(f"{e:.2e}") for name, e in found.items()}
            row["ok"] = row.get("ok", True) and max(found.values()) <= op.tolerance[compute]
        except Exception as error:
            row |= {"ok": False, compute: f"{type(error).__name__}: {error}"[:300]}
    return row


def ahead(jobs: int, wanted: list[Run], folder: Path, deadline: float) -> None:
    """Compiles and checks in forked processes, each with a share of the work; results go to files."""
    work: list[tuple[str, int]] = [("run", i) for i in range(len(wanted))] + [("check", i) for i in range(len(CHECKS))]
    children = []
    for job in range(jobs):
        child = os.fork()
        if child:
            children.append(child)
            continue
        try:
            backend, device = create(), torch.device("cuda", 0)
            rows = []
            for what, i in work[job::jobs]:
                if time.monotonic() > deadline:
                    break
                if what == "check":
                    rows.append(check(i, backend))
                    continue
                for name, go in plans(replace(wanted[i], seqs=min(wanted[i].seqs, 2)), device, 1)[0]:
                    if name != "keep":
                        go()
                torch.cuda.synchronize()
            (folder / f"recurrent-checks-{job}.json").write_text(json.dumps(rows))
        except Exception as error:
            (folder / f"recurrent-checks-{job}.json").write_text(json.dumps([{"ok": False, "raised": repr(error)[:500]}]))
        finally:
            os._exit(0)
    for child in children:
        os.waitpid(child, 0)


def bandwidth_of(device: torch.device) -> float:
    """Bytes a second of a plain sum over 2 GiB."""
    source = torch.ones(1 << 29, device=device)
    return source.numel() * 4 / seconds([lambda: source.sum()], 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--jobs", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--only", default="", help="kinds of runs, separated by commas: decode, prefill, route")
    args = parser.parse_args()
    began = time.monotonic()
    wanted = [r for r in runs() if not args.only or r.kind in args.only.split(",")]
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        ahead(args.jobs, wanted, Path(folder), began + 0.6 * args.seconds)
        checks = [row for path in sorted(Path(folder).glob("*.json")) for row in json.loads(path.read_text())]
    document: dict[str, Any] = {"triton": triton.__version__, "compiled_after_s": round(time.monotonic() - began, 1)}
    document |= {"checks": checks, "checks_failed": [c for c in checks if not c["ok"]], "rows": []}
    device = torch.device("cuda", 0)
    bandwidth = bandwidth_of(device)
    document |= {"device": torch.cuda.get_device_name(), "read_bytes_per_s": bandwidth}
    for run in wanted:
        if time.monotonic() - began > args.seconds - 1.5:
            document["stopped_before"] = f"{run.kind} {run.name} {run.variant}"
            break
        try:
            row = measure(run, device, bandwidth)
        except Exception as error:
            row = {"kind": run.kind, "model": run.name, "variant": run.variant, "raised": repr(error)[:300]}
        document["rows"].append(row)
        print(json.dumps(row), flush=True)
        (args.out / "recurrent.json").write_text(json.dumps(document, indent=1) + "\n")
    document["seconds"] = round(time.monotonic() - began, 1)
    (args.out / "recurrent.json").write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps({"checks": len(checks), "failed": document["checks_failed"], "seconds": document["seconds"]}))
    return 1 if document["checks_failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
