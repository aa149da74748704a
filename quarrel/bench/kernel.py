"""One linear map alone: seconds, bytes of weights a second, and its share of the read bandwidth.

A step runs several copies of the map, so that no weight is found in a cache, each adding to a sum. The time of a step with
all copies less that of a step with one, divided by the others, is what a copy adds to a step, its launch included.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from quarrel import __version__
from quarrel.bench.bandwidth import read_bandwidth
from quarrel.bench.inputs import Layout
from quarrel.bench.report import Figure, statistics
from quarrel.bench.session import How
from quarrel.errors import QuarrelError, RequestError
from quarrel.gguf import FORMATS, GGMLType
from quarrel.ops import draw, reference
from quarrel.ops.contract import RawWeight, WeightRef, rel_error
from quarrel.ops.embedding import embedding, gather_rows
from quarrel.ops.linear import LINEAR, LinearSpec, linear, linear_add
from quarrel.ops.null import Builder
from quarrel.ops.program import Program
from quarrel.ops.step import Backend, Limits, Step, StepInputs

TABLE = 64
"""Rows of the table that inputs come from."""
BYTES = 512 << 20
"""Weights of all copies together: more than any cache."""
MOST = 257
CHECKED_ROWS = 8
AS_BATCH = 256
"""Up to so many rows are a batch of sequences with one token each, more are a prompt."""


@dataclass(frozen=True)
class _Source:
    """The same blocks under every name; a backend packs each name on its own."""

    table: RawWeight
    weight: RawWeight

    def raw(self, ref: WeightRef) -> RawWeight:
        return self.table if ref.name == "table" else self.weight


def time_linear(backend: Backend, format: str, k: int, n: int, rows: int, how: How) -> Figure:
    """Checks the kernel against the reference on a few rows, then times it."""
    kind = _format(format, k)
    rng = np.random.default_rng(0)
    source = _Source(draw.weight(rng, GGMLType.F32, TABLE, k), draw.weight(rng, kind, n, k))
    size = source.weight.raw.nbytes
    checked = _check(backend, kind, source.weight, k, n, min(rows, CHECKED_ROWS), how)
    copies = max(3, min(MOST, -(-BYTES // size)))
    one, all = (_step(backend, kind, k, n, count, source, rows, how) for count in (1, copies))
    inputs = step_inputs(all.limits, rows)
    seconds = [step_seconds(all, inputs) - step_seconds(one, inputs) for _ in range(how.rounds)]
    bandwidth, _ = read_bandwidth(backend, 3)
    device, choices = backend.device(), {t.implementation for t in all.explain() if "linear" in t.op}
    for step in (one, all):
        step.close()
    per = [max(s, 1e-9) / (copies - 1) for s in seconds]
    return Figure(
        model=f"linear {kind.name} {k}x{n}", architecture="", model_bytes=size, backend=backend.name, device=device,
        compute=backend.compute_of(how.compute), test=f"{rows} rows", kind="op", tokens=rows, depth=0, batch=rows,
        **statistics(rows, per), warm_up_s=0.0, load_s=0.0, step_tokens=all.limits.max_tokens, bytes_per_step=size,
        read_gb_s=bandwidth / 1e9, share=size / median(per) / bandwidth,
        checked=f"{checked:.1e}; {1e6 * median(per):.2f} us, {', '.join(sorted(choices))}", quarrel=__version__,
    )  # fmt: skip


def _format(name: str, k: int) -> GGMLType:
    try:
        kind = GGMLType[name.upper()]
    except KeyError:
        raise RequestError(f"{name!r} is no block format: name one such as q4_k, q6_k, q8_0, mxfp4, f16") from None
    if k % FORMATS[kind].elements:
        raise RequestError(f"rows of {k} are no multiple of {FORMATS[kind].elements}, the block of {kind.name}")
    return kind


def _check(backend: Backend, kind: GGMLType, weight: RawWeight, k: int, n: int, rows: int, how: How) -> float:
    spec = LinearSpec(kind, n, k)
    x = draw.activations(np.random.default_rng(1), rows, k)
    (want,) = reference.run_op(LINEAR, spec, (x, weight))
    (got,) = backend.run_op(LINEAR, spec, (x, weight), how.compute)
    assert isinstance(got, np.ndarray)
    assert isinstance(want, np.ndarray)
    error, allowed = rel_error(got, want), LINEAR.tolerance[backend.compute_of(how.compute)]
    if not error <= allowed:
        raise QuarrelError(
            f"{backend.name}: linear {spec} is off by {error:.3g}, allowed {allowed:.3g}; no speed is reported"
        )
    return error


def _program(kind: GGMLType, k: int, n: int, copies: int) -> Program:
    b = Builder()
    x = embedding(b, b.input("ids"), WeightRef("table", GGMLType.F32, TABLE, k))  # [T, k]
    y = linear(b, x, WeightRef("w0", kind, n, k), None, out="f32")  # [T, n]
    for i in range(1, copies):
        y = linear_add(b, y, x, WeightRef(f"w{i}", kind, n, k), None)
    return b.program(hidden=gather_rows(b, y, b.input("out_rows")))


def _step(backend: Backend, kind: GGMLType, k: int, n: int, copies: int, source: _Source, rows: int, how: How) -> Step:
    seqs = rows if rows <= AS_BATCH else 1
    limits = Limits(max(rows, 1), seqs, -(-rows // 32) + 1, seqs * 2 + -(-rows // 32), 32)
    return backend.compile(_program(kind, k, n, copies), source, limits, how.compute)


def step_inputs(limits: Limits, rows: int) -> StepInputs:
    """A step of so many rows: a token of each of them as a sequence, or, beyond AS_BATCH, one prompt."""
    layout = Layout(limits, TABLE)
    return layout.decode(0, rows, False) if rows <= AS_BATCH else layout.step([(0, 0, rows)], 1)


def step_seconds(step: Step, inputs: StepInputs) -> float:
    """Seconds of a step, the mean of at least three and of at least 50 ms of them, after three that do not count."""
    for _ in range(3):
        step(inputs, "hidden")
    began, count = time.perf_counter(), 0
    while count < 3 or time.perf_counter() - began < 0.05:
        step(inputs, "hidden")
        count += 1
    return (time.perf_counter() - began) / count


def each(
    backend: Backend, formats: Sequence[str], shapes: Sequence[tuple[int, int]], rows: Sequence[int], how: How
) -> Iterator[Figure]:
    """All combinations."""
    for format in formats:
        for k, n in shapes:
            for count in rows:
                if how.late:
                    return
                yield time_linear(backend, format, k, n, count, how)
