"""On a GPU: the gated delta net of Qwen3-Next and Qwen3.5, 32 value heads over 16 keys of 128: right, then timed.

python -m bench.ops.delta_net --out RESULTS.jsonl [--part ahead|right|steps|prompts|tiles ...]

ahead    what `prompts` runs compiled by twelve processes, FLA's kernels with every tile that it tries
steps    one token of 1 to 128 sequences: microseconds, and bytes of state a second against a copy of as many
prompts  the delta rule and the whole mixer on 4096 tokens, by kernel; FLA's chunks beside them where `fla` is installed
tiles    both kernels with other tiles than the ones chosen
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.shared import Notes, command_line, graph_us
from quarrel.ops.contract import Case, Compute, Concrete, Op, rel_error
from quarrel.ops.delta import DELTA, DELTA_MIX, DeltaMixSpec, DeltaSpec
from quarrel.ops.reference import run_op as reference
from quarrel.triton_backend.backend import REGISTRY
from quarrel.triton_backend.recurrent import delta_chunks, delta_step
from quarrel.triton_backend.run_op import Bound, bind, run_op

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RULE = DeltaSpec(16, 32, 128, 128, 1e-6)
MIX = DeltaMixSpec(RULE, 4, 1e-6)
SMALL = DeltaSpec(2, 4, 128, 128, 1e-6, grouped=True)
PROMPT = 4096
STEPS = (1, 8, 32, 128)
STEP_TILES = ((2048, 2), (2048, 4), (4096, 2), (4096, 4), (8192, 4), (8192, 8), (16384, 8))
SCAN_TILES = ((32, 4, 2), (32, 4, 3), (32, 8, 3), (16, 4, 3), (64, 4, 2), (64, 4, 3), (64, 8, 3), (128, 8, 2))
PAIR_WARPS = (2, 4, 8)
PROMPTS: tuple[tuple[Op, Any, int, int], ...] = tuple(
    (op, spec, seqs, new)
    for seqs, new in ((1, PROMPT), (4, PROMPT // 4), (1, 512))
    for op, spec in ((DELTA, RULE), (DELTA_MIX, MIX))
)
JOBS = 12
Say = Callable[..., None]


def inputs_of(op: Op, spec: Any, seqs: int, new: int) -> tuple[Concrete, ...]:
    """Sequences that all go on from a state, activations as float16 has them."""
    assert op.make is not None
    rng = np.random.default_rng(1)
    made = list(op.make(Case(spec, {"S": 1, "Q": seqs * new}), rng))
    for i, (param, given) in enumerate(zip(op.params(spec), made, strict=True)):
        if param.name == "query_start":
            made[i] = np.arange(seqs + 1, dtype=np.int32) * new
        elif param.name == "kv_len":
            made[i] = np.full(seqs, new + 64, np.int32)
        elif param.name == "state_slots":
            made[i] = np.arange(seqs, dtype=np.int32)
        elif param.kind == "state":
            assert isinstance(given, np.ndarray)
            made[i] = rng.standard_normal((seqs + 1, *given.shape[1:]), np.float32) * np.float32(0.1)
        elif param.kind == "act":
            assert isinstance(given, np.ndarray)
            made[i] = given.astype(np.float16).astype(np.float32)
    return tuple(made)


def bound(op: Op, spec: Any, seqs: int, new: int, compute: Compute = "float16") -> Bound:
    return bind(REGISTRY, DEVICE, op, spec, inputs_of(op, spec, seqs, new), compute)


def right(say: Say) -> None:
    """Against the reference in NumPy; the whole prompt against the kernel that takes one token after the other."""
    mixed = DeltaMixSpec(SMALL, 4, 1e-6)
    for op, spec, seqs, new in (
        (DELTA, SMALL, 3, 150),
        (DELTA_MIX, mixed, 3, 150),
        (DELTA_MIX, mixed, 5, 1),
        (DELTA_MIX, MIX, 2, 1),
    ):
        given = inputs_of(op, spec, seqs, new)
        want = reference(op, spec, given)
        for compute in ("float32", "float16", "bfloat16"):
            got = run_op(REGISTRY, DEVICE, op, spec, given, compute)
            errors = [float(rel_error(g, w)) for g, w in zip(got, want, strict=True)]  # type: ignore[arg-type]
            limit = op.tolerance[compute]
            say(what="right", op=op.name, seqs=seqs, new=new, compute=compute, errors=errors, ok=max(errors) <= limit)
    given = inputs_of(DELTA, RULE, 1, PROMPT if DEVICE.type == "cuda" else 130)
    want = run_op(REGISTRY, DEVICE, DELTA, RULE, given, "float32")
    for compute in ("float16", "bfloat16"):
        got = run_op(REGISTRY, DEVICE, DELTA, RULE, given, compute)
        errors = [float(rel_error(g, w)) for g, w in zip(got, want, strict=True)]  # type: ignore[arg-type]
        say(what="right, chunks against tokens", compute=compute, errors=errors, ok=max(errors) <= DELTA.tolerance[compute])


def state_bytes(seqs: int) -> int:
    return 2 * 4 * seqs * RULE.n_v * RULE.v_dim * RULE.k_dim


def copy_us(nbytes: int) -> float:
    """A copy that reads and writes as many bytes together."""
    source = torch.empty(nbytes // 8, dtype=torch.float32, device=DEVICE)
    target = torch.empty_like(source)
    return graph_us(lambda: target.copy_(source))


def steps(say: Say) -> None:
    for seqs in STEPS:
        mixer, rule = (graph_us(bound(op, spec, seqs, 1)) for op, spec in ((DELTA_MIX, MIX), (DELTA, RULE)))
        copy = copy_us(state_bytes(seqs))
        rate = state_bytes(seqs) / mixer / 1e6
        say(
            what="step",
            seqs=seqs,
            mixer_us=mixer,
            rule_us=rule,
            copy_us=copy,
            TB_per_s=round(rate, 3),
            share=round(copy / mixer, 3),
        )


def by_kernel(call: Callable[[], None]) -> dict[str, float]:
    """Microseconds of each kernel of a call."""
    from torch.profiler import ProfilerActivity, profile

    call()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(10):
            call()
        torch.cuda.synchronize()
    return {e.key[:60]: round(e.device_time_total / 10, 2) for e in seen.key_averages() if e.device_time_total}


def prompts(say: Say) -> None:
    for op, spec, seqs, new in PROMPTS:
        call = bound(op, spec, seqs, new)
        say(what="prompt", op=op.name, seqs=seqs, new=new, us=graph_us(call), kernels=by_kernel(call))
        if op is DELTA and new == PROMPT:
            say(what="FLA", **fla_us())


def fla_call() -> Callable[[], None]:
    """`fla`'s chunked kernels on the same shape: queries and keys of 16 heads, which it normalises, and a first state."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found]

    def drawn(heads: int, width: int) -> torch.Tensor:
        return torch.randn((1, PROMPT, heads, width), device=DEVICE, dtype=torch.float16)

    q, k, v = drawn(RULE.n_k, RULE.k_dim), drawn(RULE.n_k, RULE.k_dim), drawn(RULE.n_v, RULE.v_dim)
    g = -torch.rand((1, PROMPT, RULE.n_v), device=DEVICE)
    beta = torch.rand((1, PROMPT, RULE.n_v), device=DEVICE, dtype=torch.float16)
    state = torch.randn((1, RULE.n_v, RULE.k_dim, RULE.v_dim), device=DEVICE)
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}

    def call() -> None:
        with torch.no_grad():
            chunk_gated_delta_rule(q, k, v, g, beta, **options)

    return call


def fla_us() -> dict[str, Any]:
    try:
        call = fla_call()
    except ImportError as error:
        return {"missing": str(error)}
    call()
    return {"us": graph_us(call), "kernels": by_kernel(call)}


def ahead(say: Say) -> None:
    began, context = time.perf_counter(), multiprocessing.get_context("spawn")
    with context.Pool(JOBS) as pool:
        said = pool.starmap(share, [(i, JOBS) for i in range(JOBS)], 1)
    say(what="compiled ahead", seconds=round(time.perf_counter() - began, 1), said=sorted({*said}))


def share(first: int, of: int) -> str:
    """Runs each `of`-th of our prompts, and `fla` with each `of`-th tile that it would try, so that all are in Triton's
    cache."""
    for op, spec, seqs, new in PROMPTS[first::of]:
        bound(op, spec, seqs, new)()
    os.environ["FLA_CACHE_RESULTS"] = "0"
    from triton.runtime.autotuner import Autotuner

    every = Autotuner.prune_configs

    def some(tuner: Any, given: dict[str, Any]) -> list[Any]:
        found = every(tuner, given)
        return found[first::of] or found[:1]

    Autotuner.prune_configs = some
    try:
        fla_call()()
    except ImportError as error:
        return str(error)
    torch.cuda.synchronize()
    return "ok"


@contextmanager
def tile(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def tiles(say: Say) -> None:
    given = {seqs: inputs_of(DELTA_MIX, MIX, seqs, 1) for seqs in STEPS}
    for chosen in STEP_TILES:
        with tile(delta_step, "_TILE", chosen):
            times = {f"x{s}_us": timed(DELTA_MIX, MIX, inputs) for s, inputs in given.items()}
        say(what="tiles of delta_step: state values, warps", tile=chosen, **times)
    prompt = inputs_of(DELTA, RULE, 1, PROMPT)
    for scan in SCAN_TILES:
        with tile(delta_chunks, "_SCAN", scan):
            say(what="tiles of delta_scan: rows, warps, stages", tile=scan, us=timed(DELTA, RULE, prompt))
    for warps in PAIR_WARPS:
        with tile(delta_chunks, "_PAIRS", warps):
            say(what="warps of delta_pairs", warps=warps, us=timed(DELTA, RULE, prompt))


def timed(op: Op, spec: Any, inputs: tuple[Concrete, ...]) -> float | str:
    """Microseconds, or why there are none."""
    try:
        return graph_us(bind(REGISTRY, DEVICE, op, spec, inputs, "float16"))
    except Exception as error:  # a tile that does not fit is a result too
        return f"{type(error).__name__}: {error}"[:120]


def main() -> int:
    parts = {"ahead": ahead, "right": right, "steps": steps, "prompts": prompts, "tiles": tiles}
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", nargs="*", choices=list(parts), default=list(parts))
    args = parser.parse_args()
    failed, say = 0, Notes(args.out).say
    for part in args.part:
        try:
            parts[part](say)
        except Exception:
            failed += 1
            traceback.print_exc()
    return failed


if __name__ == "__main__":
    sys.exit(main())
