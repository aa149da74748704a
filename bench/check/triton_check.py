"""The Triton backend on a CUDA device against the references; prints a table, then one JSON document.

python -m bench.check.triton_check ops        every op, case and arithmetic; rows alone against rows in a batch
python -m bench.check.triton_check models     logits of every reference model, and graphs against plain launches
python -m bench.check.triton_check smallest   the smallest case of each op, to run under compute-sanitizer
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

from bench.shared import command_line
from quarrel.gguf import GGMLType, GGUFFile
from quarrel.models import ARCHITECTURES, Tensors, assemble
from quarrel.ops import ALL_OPS, EXTRA_OPS, draw, reference
from quarrel.ops.activation import Activation
from quarrel.ops.attention import ATTENTION, AttentionSpec
from quarrel.ops.compare import errors
from quarrel.ops.contract import Case, Compute, Op, RawWeight, rel_error
from quarrel.ops.formats import WEIGHT_TYPES
from quarrel.ops.host import ExpertPool, HostExperts, computing_parts, expert_refs
from quarrel.ops.linear import LINEAR, LINEAR_ADD, NORM_GATE_UP, LinearAddSpec, LinearSpec, NormGateUpSpec
from quarrel.ops.moe import EXPERT_DOWN, EXPERT_UP, ExpertDownSpec, ExpertUpSpec
from quarrel.ops.norm import NormSpec
from quarrel.ops.program import Program
from quarrel.ops.registry import backend as backend_named
from quarrel.ops.step import Limits, SampleInputs, StepInputs
from quarrel.triton_backend.backend import TritonBackend, create
from quarrel.triton_backend.formats.table import RING, by_name
from quarrel.triton_backend.linear import ring
from quarrel.triton_backend.step import TritonStep
from tests.models.test_reference_logits import architecture, chunk, limit, specify, wanted
from tests.paths import CASE_SETS

COMPUTES: tuple[Compute, ...] = ("float32", "float16", "bfloat16")
MODEL_LIMITS = {"float16": 3e-3, "bfloat16": 2e-2}
# Models of more layers: a quarter more than what NumPy has when it rounds alike (bench/check/rounded.py).
DEEP_LIMITS = {
    "deepseek2_lite": {"float16": 8e-3, "bfloat16": 8.3e-2},
    "gemma4": {"float16": 4.3e-3, "bfloat16": 3.3e-2},
    "gemma4_e": {"float16": 6.1e-3, "bfloat16": 4.7e-2},
}
# Where two experts all but tie, rounding may choose the other one. In granitehybrid/q4_k_m three of 192 choices are nearer
# (0.01 to 0.07) than bfloat16's noise in a router's logits (0.08). One that moves puts its row off by a fifth and, through
# the state, as many as six later ones over the limit. So where experts took other numbers of tokens than in float32, the
# limit is of all rows but the worst eighth, and the one below of all rows. The reference rounded to bfloat16 has 0.015
# with none moved, 0.029 to 0.039 with one, 0.054 with all three.
MOVED_LIMIT = 0.1
EVERY_OP = (*ALL_OPS.values(), *EXTRA_OPS.values())
Found = list[dict[str, Any]]


def one_case(backend: TritonBackend, op: Op, case: Case, seed: int, compute: Compute) -> dict[str, Any]:
    inputs = op.make(case, np.random.default_rng(seed))  # type: ignore[misc]
    want = reference.run_op(op, case.spec, inputs)
    row: dict[str, Any] = {"op": op.name, "case": str(case.spec), "dims": dict(case.dims), "compute": compute}
    began = time.perf_counter()
    try:
        row["error"] = max(errors(op, case.spec, backend.run_op(op, case.spec, inputs, compute), want, case).values())
    except Exception as error:
        row |= {"error": float("inf"), "raised": f"{type(error).__name__}: {error}"[:400]}
    return row | {"limit": op.tolerance[compute], "seconds": round(time.perf_counter() - began, 2)}


def check_ops(backend: TritonBackend, ops: Sequence[Op], share: tuple[int, int]) -> Found:
    """Every case and arithmetic of some ops; of which this process takes one share."""
    cases = [(op, i, case, compute) for op in ops for i, case in enumerate(op.cases()) for compute in COMPUTES]
    return [one_case(backend, op, case, i, compute) for op, i, case, compute in cases[share[0] :: share[1]]]


def check_invariance(backend: TritonBackend) -> Found:
    """A row alone against the same row in larger batches, bit for bit: in float32, and attention of up to four sequences.

    For what steps promise of rows in any batch see `invariance.py`.
    """
    rng = np.random.default_rng(5)
    found: Found = []
    for type in (GGMLType.F16, GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.Q8_0, GGMLType.MXFP4):
        spec = LinearSpec(type, 131, 1024)
        weight = draw.weight(rng, type, spec.n, spec.k)
        x = draw.activations(rng, 150, spec.k)
        (whole,) = backend.run_op(LINEAR, spec, (x, weight), "float32")
        differ = 0.0
        for count in (1, 2, 5, 16, 17, 64, 65):
            (part,) = backend.run_op(LINEAR, spec, (np.ascontiguousarray(x[:count]), weight), "float32")
            differ = max(differ, float(np.abs(part - whole[:count]).max()))
        found.append({"op": "linear, rows alone", "case": str(spec), "compute": "float32", "error": differ, "limit": 0.0})
    attention = AttentionSpec(8, 2, 128, 0.088)
    for compute in COMPUTES:
        for new in (1, 37):
            dims = {"S": 4, "Q": new, "KV": 1500, "block_size": 32}
            q, starts, kv_len, table, cache = ATTENTION.make(Case(attention, dims), np.random.default_rng(new))  # type: ignore[misc]
            (whole,) = backend.run_op(ATTENTION, attention, (q, starts, kv_len, table, cache), compute)
            differ = 0.0
            for s in range(4):
                a, b = int(starts[s]), int(starts[s + 1])
                alone = (q[a:b], np.array([0, b - a], np.int32), kv_len[s : s + 1], table[s : s + 1], cache)
                (part,) = backend.run_op(ATTENTION, attention, alone, compute)
                differ = max(differ, float(np.abs(part - whole[a:b]).max()))
            row = {"op": "attention, sequences alone", "case": str(attention), "dims": dims}
            # One sequence that decodes in 16 bits has a tile of its own (`attention/paged.py: single`).
            limit = 0.0 if compute == "float32" or new > 1 else ATTENTION.tolerance[compute]
            found.append(row | {"compute": compute, "error": differ, "limit": limit})
    return found + check_experts_alone(backend)


def check_experts_alone(backend: TritonBackend) -> Found:
    """The same for experts: a few tokens against many, in which tiles are wider and hold other tokens of an expert."""
    found: Found = []
    for type in (GGMLType.F16, GGMLType.Q4_K, GGMLType.Q8_0, GGMLType.MXFP4):
        up, down = ExpertUpSpec(type, 6, 2, 195, 1024, "silu"), ExpertDownSpec(type, 6, 2, 195, 1024)
        for op, spec in ((EXPERT_UP, up), (EXPERT_DOWN, down)):
            inputs = op.make(Case(spec, {"T": 150}), np.random.default_rng(6))  # type: ignore[misc]
            (whole,) = backend.run_op(op, spec, inputs, "float32")
            differ = 0.0
            for count in (1, 2, 16, 17, 64, 90):
                some = [np.ascontiguousarray(g[:count]) if isinstance(g, np.ndarray) else g for g in inputs]
                (part,) = backend.run_op(op, spec, some, "float32")
                differ = max(differ, float(np.abs(part - whole[:count]).max()))
            row = {"op": f"{op.name}, rows alone", "case": str(spec), "compute": "float32"}
            found.append(row | {"error": differ, "limit": 0.0})
    return found


def check_ring(backend: TritonBackend, share: tuple[int, int]) -> Found:
    """Small maps through the kernel of large ones: every format and width of rows, tails of rows, columns and tiles."""
    cases: list[tuple[Op, Any, int]] = []
    for i, name in enumerate(RING):
        n, k = ((131, 1024), (72, 768), (300, 2560))[i % 3] if by_name(name).top else ((131, 896), (72, 1152))[i % 2]
        one = LinearSpec(GGMLType[name], n, k, bias=i % 2 == 0)
        activation: Activation = ("silu", "gelu_tanh")[i % 2]
        gated = NormGateUpSpec(NormSpec("rms", k, 1e-5), one, one, activation)
        specs = ((LINEAR, one), (LINEAR_ADD, LinearAddSpec(one, 0.7)), (NORM_GATE_UP, gated))
        cases += [(op, spec, rows) for op, spec in specs for rows in (2, 9, 17, 33, 65, 129, 300)]
    least = ring._LEAST
    ring._LEAST = {0: 2}
    try:
        return [
            one_case(backend, op, Case(spec, {"T": rows}), rows, "float16") | {"op": f"{op.name}, ring"}
            for op, spec, rows in cases[share[0] :: share[1]]
        ]
    finally:
        ring._LEAST = least


def check_refusals(backend: TritonBackend) -> Found:
    """A type with no kernel still computes, from values that the reference decoded."""
    spec = LinearSpec(GGMLType.IQ2_XS, 40, 512)
    raw = np.random.default_rng(1).integers(0, 256, (40, 2 * 74), dtype=np.uint8)
    raw.reshape(40, 2, 74)[..., :2] = np.full((40, 2), 0.01, np.float16)[..., None].view(np.uint8)
    weight = RawWeight(GGMLType.IQ2_XS, raw, 512)
    x = draw.activations(np.random.default_rng(2), 3, 512)
    want = reference.run_op(LINEAR, spec, (x, weight))
    return [
        {"op": "linear", "case": str(spec), "compute": c, "limit": LINEAR.tolerance[c],
         "error": max(errors(LINEAR, spec, backend.run_op(LINEAR, spec, (x, weight), c), want).values())}
        for c in COMPUTES
    ]  # fmt: skip


def sequence(ids: np.ndarray, past: int = 0) -> StepInputs:
    """One sequence whose first `past` tokens are in the cache; every new row is an output row, drawn greedily."""
    rows = len(ids) - past
    off, on = np.zeros(rows, np.float32), np.ones(rows, np.float32)
    return replace(chunk(ids, past, len(ids)), sample=SampleInputs(off, np.zeros(rows, np.int32), on, off, on / 2))


def check_models(sets: Sequence[Path], share: tuple[int, int], only: str) -> Found:
    """Logits of whole prompts; then token by token, plain and with graphs, which must agree bit for bit.

    Where there are experts also with those of the first layer in host memory (with llvmlite, which computes them there):
    prompts take them to the device.
    """
    found: Found = []
    paths = [p for cases in sets for p in sorted(cases.glob("*/model-*.gguf")) if (p.parent / "tokens.npy").exists()]
    paths = [p for p in paths if p.parent.name in only.split(",")] if only else paths
    for path in [p for p in paths if architecture(p) in ARCHITECTURES][share[0] :: share[1]]:
        folder, variant = path.parent, path.name[6:-5]
        with GGUFFile.open(path) as file:
            want = wanted(folder, variant)
            ids = np.load(folder / "tokens.npy").reshape(-1).astype(np.int32)
            tensors = Tensors(file)
            program = assemble(specify(file, folder, variant), tensors)
            exact = None
            for compute in COMPUTES:
                row = one_model(f"{folder.name}/{variant}", program, tensors, ids, want, compute, exact=exact)
                exact = exact or row.get("experts")
                found.append(row)
            layers = list(expert_refs(program))
            if layers and find_spec("llvmlite"):
                cpu = computing_parts(backend_named("cpu", 1))
                first = frozenset(layers[:1])
                name = f"{folder.name}/{variant}, experts of a layer in host memory"
                host = HostExperts(cpu, first, streams=True, stream_from=8)
                found.append(one_model(name, program, tensors, ids, want, "float32", host))
                host = HostExperts(cpu, first, pools=(ExpertPool(tuple(layers[:1]), 2),))
                found.append(one_model(f"{name}, two of them on the device", program, tensors, ids, want, "float32", host))
    return found


def one_model(
    name: str,
    program: Program,
    tensors: Tensors,
    ids: np.ndarray,
    want: np.ndarray,
    compute: Compute,
    host: HostExperts | None = None,
    exact: dict[str, list[int]] | None = None,
) -> dict[str, Any]:
    """`exact`: how many tokens each expert took in float32."""
    began = time.perf_counter()
    limits = Limits(len(ids), 4, 16, 32, 16)
    most = DEEP_LIMITS.get(name.split("/")[0], MODEL_LIMITS).get(compute) or limit(*name.split("/")[:2])
    row: dict[str, Any] = {"model": name, "compute": compute, "limit": most}
    try:
        backends = [create(graphs) for graphs in (True, False)]
        for backend in backends:
            backend.leave_to_host(host)
        steps = [backend.compile(program, tensors, limits, compute) for backend in backends]
        if "logits" in program.outputs:
            logits = steps[0](sequence(ids), "logits").logits[-len(want) :]
            row["experts"] = {path: counts.tolist() for path, counts in steps[0].expert_counts().items()}
            row["error"] = rel_error(logits, want)
            if exact and row["experts"] != exact:
                row["moved_error"] = row["error"]
                row["error"] = without_worst(logits, want)
            captured, plain = (decode(step, ids) for step in steps)
            row["decode_error"] = rel_error(captured[-len(want) :], want[-len(captured) :])
            # Experts that move to the device between steps are rounded there as they are not on the host.
            moves = host is not None and bool(host.pools)
            alike = moves and rel_error(captured, plain) <= most
            row["graph_difference"] = 0.0 if alike else float(np.abs(captured - plain).max())
        else:
            row["error"] = rel_error(steps[0](sequence(ids), "hidden").hidden, want)
        if "logits" in program.outputs and not program.states:
            top = steps[0](sequence(ids, len(ids) - 1), "tokens").tokens[0]
            row["greedy"] = bool(top == captured[-1].argmax())
            row["logprobs_error"] = logprobs_error(steps, sequence(ids, len(ids) - 1), captured[-1], not moves)
        for step in steps:
            step.close()
    except Exception as error:
        row |= {"error": float("inf"), "raised": f"{type(error).__name__}: {error}"[:600]}
    return row | {"seconds": round(time.perf_counter() - began, 2)}


def without_worst(got: np.ndarray, want: np.ndarray) -> float:
    """The error of all rows but the worst eighth."""
    kept = np.argsort(((got - want) ** 2).sum(1))[: len(want) - len(want) // 8]
    return rel_error(got[kept], want[kept])


def logprobs_error(steps: Sequence[TritonStep], inputs: StepInputs, logits: np.ndarray, bits: bool) -> float:
    """The error of a step's logprobs, as plain launches, while captured and as a graph; infinite where `bits` differ."""
    runs = [step(inputs, "logprobs") for step in (steps[0], *steps, steps[0])]
    first = runs[0]
    assert first.logprobs is not None
    assert first.best is not None
    same = not bits or all(np.array_equal(t.logprobs, first.logprobs) and np.array_equal(t.best, first.best) for t in runs)  # type: ignore[arg-type]
    x = logits.astype(np.float64) - logits.max()
    want = (x - np.log(np.exp(x).sum()))[first.best[0]]
    return float(np.abs(first.logprobs[0, 1:] - want).max()) if same else float("inf")


def decode(step: TritonStep, ids: np.ndarray, count: int = 8) -> np.ndarray:
    """Logits of the last `count` tokens, one step each; a graph is captured at the second of them."""
    start = len(ids) - count
    step(sequence(ids[:start]), "hidden")
    return np.concatenate([step(sequence(ids[: i + 1], i), "logits").logits for i in range(start, len(ids))])


def smallest(backend: TritonBackend) -> Found:
    """One case of each op and one of each format, the fewest values first."""
    found: Found = []
    for op in EVERY_OP:
        cases = op.cases()
        chosen = cases if op.name == "attention" else cases[:1]
        if op.name in ("linear", "embedding"):
            chosen = [next(c for c in cases if c.spec.type == t) for t in WEIGHT_TYPES]
        found += [one_case(backend, op, case, 0, "float16") for case in chosen]
    return found


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("what", choices=["ops", "models", "smallest"])
    parser.add_argument("--cases", type=Path, nargs="+", default=CASE_SETS, help="folders of reference models")
    parser.add_argument("--jobs", type=int, default=1, help="processes; most of the time goes into compiling kernels")
    parser.add_argument("--only", default="", help="only these ops or model folders, separated by commas")
    parser.add_argument("--share", default="0/1", help="which part of the work this process does")
    parser.add_argument("--out", type=Path, help="where the JSON goes as well")
    args = parser.parse_args()
    backend = create()
    began = time.perf_counter()
    part, parts = map(int, args.share.split("/"))
    if args.jobs > 1:
        found = in_processes([args.what, "--cases", *map(str, args.cases), "--only", args.only], args.jobs)
    elif args.what == "ops":
        names = args.only.split(",") if args.only else [op.name for op in EVERY_OP]
        found = check_ops(backend, [op for op in EVERY_OP if op.name in names], (part, parts))
        found += check_invariance(backend) if part == 0 else []
        found += check_refusals(backend) if part == parts - 1 else []
        found += check_ring(backend, (part, parts))
    elif args.what == "models":
        found = check_models(args.cases, (part, parts), args.only)
    else:
        found = smallest(backend)
    bad = [r for r in found if "skipped" not in r and not fine(r)]
    for row in bad:
        print("FAIL", json.dumps(row))
    document = {
        "what": args.what, "device": backend.device(), "torch": torch.__version__, "triton": triton.__version__,
        "checked": len(found), "failed": len(bad), "seconds": round(time.perf_counter() - began, 1), "rows": found,
    }  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document | {"rows": summary(found)}))
    return 1 if bad else 0


def in_processes(arguments: list[str], jobs: int) -> Found:
    """The rows of so many copies of this program."""
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / f"{i}.json" for i in range(jobs)]
        command = [sys.executable, __file__, *arguments]
        running = [
            subprocess.Popen([*command, "--share", f"{i}/{jobs}", "--out", str(out)], stdout=subprocess.DEVNULL)
            for i, out in enumerate(outs)
        ]
        for process in running:
            process.wait()
        lost = [{"op": "process", "compute": "", "error": float("inf"), "limit": 0.0} for out in outs if not out.exists()]
        return lost + [row for out in outs if out.exists() for row in json.loads(out.read_text())["rows"]]


def fine(row: dict[str, Any]) -> bool:
    return (
        row["error"] <= row["limit"]
        and row.get("moved_error", 0.0) <= MOVED_LIMIT
        and row.get("decode_error", 0.0) <= row["limit"]
        and row.get("graph_difference", 0.0) == 0.0
        and row.get("logprobs_error", 0.0) <= 1e-4
        and row.get("greedy", True)
    )


def summary(found: Found) -> dict[str, float]:
    """The largest error of each op or model, by arithmetic."""
    most: dict[str, float] = {}
    for row in found:
        if "skipped" not in row:
            key = f"{row.get('op', row.get('model'))} {row['compute']}"
            most[key] = max(most.get(key, 0.0), row["error"])
    return most


if __name__ == "__main__":
    sys.exit(main())
