"""On a GPU: `deterministic=True` beside the default: the same bits in every number of rows, speeds in turns, kernels.

    python -m bench.steps.deterministic --out RESULTS.jsonl [--model mistral-7b:Q4_K_M] [--layers N] [--seconds 150]
        [--part cuts speeds kernels maps]

cuts: the logits of the last row of a prompt in one step, and in steps of several cuts, down to a single token, with
neighbours; two layers of the model. speeds: tokens/s of both ways, median of the rounds, and what they make of 256 requests
of 512 + 256 tokens, 128 at once. kernels: microseconds of each kernel of a step. maps: linear maps of several formats and
shapes on 1 to 2048 rows of the same x, bit by bit, several at a time. Exits with 1 if a bit differs.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from bench.shared import FOLDER, Notes, command_line, synthetic
from quarrel.bench.measure import measure
from quarrel.bench.measure import run as run_steps
from quarrel.bench.precompile import Job, jobs_for, precompile
from quarrel.bench.subject import Source, Subject, limits_for
from quarrel.bench.workload import Test
from quarrel.gguf import GGMLType, GGUFFile
from quarrel.llm.memory import decoded_room
from quarrel.ops import draw
from quarrel.ops.contract import Array, Op, RawWeight, Value, WeightRef
from quarrel.ops.linear import (
    LINEAR_ADD,
    NORM_GATE_UP,
    NORM_LINEAR,
    LinearAddSpec,
    LinearSpec,
    NormGateUpSpec,
    NormLinearSpec,
)
from quarrel.ops.norm import NormSpec
from quarrel.ops.program import Node, Program
from quarrel.ops.registry import backend, lower
from quarrel.triton_backend.backend import REGISTRY
from quarrel.triton_backend.formats.weights import Weights
from quarrel.triton_backend.plan import Plan
from quarrel.triton_backend.runtime.arrays import DTYPES, Slot
from quarrel.triton_backend.runtime.site import Batch, Tables
from tools.triton_aot import operand

Say = Callable[..., None]
ROWS = (1, 2, 8, 9, 16, 32, 33, 64, 65, 128, 129, 256, 300, 512, 1000, 1024, 1030, 2048)
TYPES = ("Q4_K", "Q6_K", "Q8_0", "MXFP4", "Q5_0", "Q3_K")
LONG = 1500
CUTS = ((1499, 1), (1498, 1, 1), (988, 512), (1372, 128), (1468, 32), (1492, 8), (700, 300, 500), (64,) * 23 + (28,))
TESTS = (
    Test("decode", 32), Test("decode", 32, 128, 8), Test("decode", 32, 128, 32), Test("decode", 32, 128, 128),
    Test("decode", 16, 640, 128), Test("prefill", 512), Test("prefill", 4096),
)  # fmt: skip
STEP_TOKENS = 4096
REQUESTS, PROMPT, ANSWER = 256, 512, 256


class _Drawn:
    """Random blocks of any matrix that is asked for."""

    def raw(self, ref: WeightRef) -> RawWeight:
        return draw.weight(np.random.default_rng(ref.rows + ref.k), ref.type, ref.rows, ref.k)


def ops_of(type: GGMLType) -> Iterator[tuple[str, Op, Any]]:
    """Maps with a residual, gate and up, and query, key and value in one format and in two."""
    norm = NormSpec("rms", 2048, 1e-5)
    yield "one, few tiles", LINEAR_ADD, LinearAddSpec(LinearSpec(type, 1024, 4096), 0.7)
    yield "one, many tiles", LINEAR_ADD, LinearAddSpec(LinearSpec(type, 4096, 2048))
    gate = LinearSpec(type, 5632, 2048)
    yield "gate and up", NORM_GATE_UP, NormGateUpSpec(norm, gate, gate, "silu")
    for other in (type, GGMLType.Q6_K):
        maps = tuple(LinearSpec(t, n, 2048) for t, n in ((type, 2048), (type, 512), (other, 512)))
        yield f"three, {other.name}", NORM_LINEAR, NormLinearSpec(norm, maps)


def bits(op: Op, spec: Any) -> dict[str, Any]:
    """For which numbers of rows results differ from those of the most rows, and the error of a map with a residual."""
    device, params = torch.device("cuda"), op.params(spec)
    operands = [operand(i, p, spec) for i, p in enumerate(params)]
    outputs = tuple(Value(100 + i, r.kind, r.dims(spec), r.name) for i, r in enumerate(op.results(spec)))
    values = [o for o in operands if isinstance(o, Value)]
    generator, most = torch.Generator("cuda").manual_seed(1), ROWS[-1]
    types = {"act": DTYPES["float16"], "f32": torch.float32}
    given = {v.id: torch.randn(most * int(v.dims[1]), generator=generator, device=device).to(types[v.kind]) for v in values}
    nothing = Slot(torch.empty(1, dtype=torch.int32, device=device))
    program = Program((Node(op, spec, tuple(operands), outputs, op.name),), {str(v.id): v for v in values}, {}, ())
    plan = Plan(
        lower(program, REGISTRY),
        {i: Slot(t) for i, t in given.items()}, {v.id for v in outputs},
        {"T": most, "S": 1, "R": 1, "items": 1}, Weights(_Drawn(), device, "float16"), [], [], Tables(nothing, nothing),
        "float16", device, deterministic=True,
    )  # fmt: skip

    def results(rows: int) -> list[torch.Tensor]:
        plan.fill(255)
        for go in plan.launches:
            go(Batch(rows, 1, 1, rows == 1, rows > 1, 1))
        return [plan.slots[v.id].tensor[: rows * int(v.dims[1])].clone() for v in outputs]

    whole = results(most)
    row: dict[str, Any] = {"by": [go.describe() for go in plan.described.values()], "unlike": []}
    for rows in ROWS:
        found = results(rows)
        if not all(torch.equal(f, w[: f.numel()]) for f, w in zip(found, whole, strict=True)):
            row["unlike"].append(rows)
    if op is LINEAR_ADD:
        residual, x = (given[v.id].float().view(most, -1) for v in values)
        ref = next(o for o in operands if isinstance(o, WeightRef))
        dense = torch.from_numpy(_Drawn().raw(ref).dense()).to(device)
        want = residual + spec.scale * (x @ dense.T)
        row["error"] = float(((whole[0].view(most, -1) - want).norm() / want.norm()).cpu())
    return row


def one(job: tuple[str, int]) -> dict[str, Any]:
    """What `bits` finds, in a process of its own: compiling takes the time."""
    name, i = job
    what, op, spec = list(ops_of(GGMLType[name]))[i]
    try:
        return {"format": name, "what": what, **bits(op, spec)}
    except Exception as error:
        return {"format": name, "what": what, "unlike": None, "raised": f"{type(error).__name__}: {str(error)[:300]}"}


def maps(say: Say, jobs: int, until: float) -> bool:
    work = [(name, i) for name in TYPES for i in range(len(list(ops_of(GGMLType[name]))))]
    same = True
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(work))) as pool:
        waiting = pool.imap_unordered(one, work)
        try:
            for _ in work:
                row = waiting.next(max(0.1, until - time.perf_counter()))
                same &= row["unlike"] == [] and row.get("error", 0.0) < 5e-3
                say(part="maps", **row)
        except multiprocessing.TimeoutError:
            say(part="maps", late=True)
    return same


@contextmanager
def subjects(path: Path, tests: Sequence[Test]) -> Iterator[dict[bool, Subject]]:
    """The default, and the other."""
    with GGUFFile.open([path]) as file:
        source = Source.of(file, max(t.length for t in tests))
        limits = limits_for(tests, STEP_TOKENS, False)
        made = {}
        for same in (False, True):
            room = 0 if same else decoded_room(source.program, 1 << 40)
            made[same] = Subject(source, backend("triton"), replace(limits, deterministic=same, decoded_bytes=room), "auto")
        yield made
        for subject in made.values():
            subject.close()


def last_rows(subject: Subject, cut: Sequence[int], beside: int = 0) -> Array:
    """Logits behind a prompt of LONG tokens that is cut so, the last step beside so many neighbours."""
    at, found = 0, None
    for i, count in enumerate(cut):
        parts = [(0, at, count)]
        if i == len(cut) - 1:
            parts += [(s, 0, 1 + s % 3) for s in range(1, 1 + beside)]
        inputs = replace(subject.layout.step(parts, 64), sample=None)
        found = subject.step(inputs, "logits").logits
        at += count
    assert found is not None
    return np.array(found[0])


def cuts(say: Say, path: Path) -> bool:
    tests = [Test("decode", 1, 1600, 64)]
    with subjects(path, tests) as made:
        subject, default = made[True], made[False]
        whole = last_rows(subject, (LONG,))
        unlike = [str(cut[-3:]) for cut in CUTS if not np.array_equal(last_rows(subject, cut), whole)]
        for beside in (1, 7, 31, 63):
            if not np.array_equal(last_rows(subject, (LONG - 1, 1), beside), whole):
                unlike.append(f"{beside} neighbours")
        other = last_rows(default, (LONG,))
        error = float(np.abs(whole - other).max() / np.abs(other).max())
        say(part="cuts", model=path.stem, unlike=unlike, from_default=error, kernels=sorted(taken(subject)))
        return not unlike


def taken(subject: Subject) -> set[str]:
    return {f"{line.op}: {line.implementation}" for line in subject.step.explain()}


def speeds(say: Say, path: Path, rounds: int, kernels: bool, until: float) -> None:
    with subjects(path, TESTS) as made:
        found: dict[bool, dict[str, float]] = {False: {}, True: {}}
        for test in TESTS:
            for same, subject in made.items():
                if time.perf_counter() > until:
                    say(part="speeds", late=test.name)
                    return
                seconds = measure(subject, test, rounds, until).seconds
                found[same][test.name] = test.work / median(seconds)
            fast, slow = found[False][test.name], found[True][test.name]
            share = {"default": round(fast, 1), "deterministic": round(slow, 1), "share": round(slow / fast, 3)}
            say(part="speeds", model=path.stem, test=test.name, **share)
        prompts, answers = TESTS[-1].name, TESTS[4].name
        engine = {
            same: REQUESTS * ANSWER / (REQUESTS * PROMPT / speed[prompts] + REQUESTS * ANSWER / speed[answers])
            for same, speed in found.items()
        }
        say(part="engine, estimated", share=round(engine[True] / engine[False], 3), tokens_s=engine)
        for test in (TESTS[4], TESTS[-1], TESTS[0]) if kernels else ():
            for same, subject in made.items():
                say(part="kernels", test=test.name, deterministic=same, us=profiled(subject, test))


def profiled(subject: Subject, test: Test) -> list[tuple[str, int, float]]:
    """Each kernel of a step: its name, launches, and microseconds in all."""
    from torch.profiler import ProfilerActivity, profile

    layout = subject.layout

    def steps() -> Any:
        if test.kind == "prefill":
            return layout.prefill(0, test.tokens)
        return [layout.decode(test.depth + 8, test.batch, False)]

    run_steps(subject, steps())
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        run_steps(subject, steps())
        torch.cuda.synchronize()
    found = [(e.key[:40], e.count, round(e.device_time_total, 1)) for e in prof.key_averages()]
    return sorted(found, key=lambda each: -each[2])[:14]


def shares(path: Path, jobs: int) -> list[Job]:
    """What both ways compile."""
    made = jobs_for(str(path), "triton", "auto", STEP_TOKENS, TESTS, False, jobs)
    return [replace(job, deterministic=same) for same in (True, False) for job in made]


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="mistral-7b:Q4_K_M", help="of tools/synthetic_shapes.toml, or a file")
    parser.add_argument("--layers", type=int, help="of the model that is timed; all by default")
    parser.add_argument("--part", nargs="*", default=["cuts", "speeds", "kernels", "maps"])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--jobs", type=int, default=14, help="processes that compile kernels first; 1 for none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=150.0, help="nothing further begins after this")
    args = parser.parse_args()
    until, say = time.perf_counter() + args.seconds, Notes(args.out).say
    path = synthetic(args.model, args.folder, args.layers) if {"speeds", "kernels"} & set(args.part) else None
    say(part="start", device=backend("triton").device(), torch=torch.__version__)
    if path is not None and args.jobs > 1:
        say(compiled_s=round(precompile(shares(path, args.jobs), args.jobs, args.seconds / 3), 1))
    same = True
    if "cuts" in args.part:
        same &= cuts(say, synthetic(args.model, args.folder, 2))
    if "speeds" in args.part and path is not None:
        speeds(say, path, args.rounds, "kernels" in args.part, until)
    if "maps" in args.part:  # last, as it compiles most
        same &= maps(say, args.jobs, until)
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
