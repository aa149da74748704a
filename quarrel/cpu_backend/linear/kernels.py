"""The linear kernels in order: for how many rows of activations each is, what it takes, or why it declines.

A weight's way from the file to a kernel: `Weights.matrix` (`weights.py`) finds its rows in the file's mapping,
`formats/<type>.py` emits how they are decoded, this table chooses the kernels, and `matvec.py`, `tile.py` or `floats.py`
emits the loops around the decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from quarrel.cpu_backend.formats.table import BLOCKS
from quarrel.cpu_backend.linear import floats
from quarrel.cpu_backend.linear.activations import row_bytes
from quarrel.cpu_backend.linear.floats import CHUNK_BYTES, float_linear
from quarrel.cpu_backend.linear.matvec import matrix_fields, matvec
from quarrel.cpu_backend.linear.tile import block_rows, tile, tile_count
from quarrel.cpu_backend.lowering import Field, Lowering
from quarrel.cpu_backend.plan import Header, Job
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.weights import Packed
from quarrel.ops.contract import Value, WeightRef
from quarrel.ops.linear import LinearSpec

Rows = Literal["few rows", "more rows", "any rows"]
Form = Literal["q", "f32"]
"""How a kernel's producer should leave activations: rounded to 8 bits, or as they are."""
C = TypeVar("C")


@dataclass(frozen=True)
class Problem:
    """What a kernel is chosen by: the weight's type in memory, the shape of one matrix, the arithmetic, the CPU."""

    type: str
    n: int
    k: int
    exact: bool
    """float32 arithmetic was requested."""
    level: Level


@dataclass(frozen=True)
class LinearKernel(Generic[C]):
    """`declines(problem)` is None where the kernel takes it; `job(e, call)` is the kernel with its arguments."""

    name: str
    rows: Rows
    form: Form
    declines: Callable[[Problem], str | None]
    job: Callable[[Lowering, C], Job]


@dataclass(frozen=True)
class Choice(Generic[C]):
    """The kernels that cover every number of rows, in the table's order, and why others declined."""

    kernels: tuple[LinearKernel[C], ...]
    declined: tuple[str, ...]

    @property
    def forms(self) -> set[str]:
        return {kernel.form for kernel in self.kernels}

    def __str__(self) -> str:
        return ", ".join(f"{k.name} for {k.rows}" for k in self.kernels)


def choose(e: Lowering, table: Sequence[LinearKernel[C]], spec: Any) -> Choice[C]:
    """The first kernel that takes the map of `spec`, for each number of rows."""
    problem = Problem(e.weights.stored_as(spec.type), spec.n, spec.k, e.plan.exact, e.plan.level)
    kernels: list[LinearKernel[C]] = []
    declined: list[str] = []
    missing: set[Rows] = {"few rows", "more rows"}
    for kernel in table:
        covers: set[Rows] = {"few rows", "more rows"} if kernel.rows == "any rows" else {kernel.rows}
        if not covers <= missing:
            continue
        if reason := kernel.declines(problem):
            declined.append(f"{kernel.name}: {reason}")
        else:
            kernels.append(kernel)
            missing -= covers
    assert not missing, (problem, declined)
    return Choice(tuple(kernels), tuple(declined))


def needs_blocks(p: Problem) -> str | None:
    """Of kernels that multiply a block format's codes with activations of 8 bits."""
    if p.type not in BLOCKS:
        return f"needs a block format, got {p.type}"
    return "rounds activations to 8 bits, and float32 arithmetic was requested" if p.exact else None


def needs_pairs(p: Problem) -> str | None:
    """Of kernels that multiply bfloat16 with activations rounded to it."""
    if p.type != "BF16":
        return f"needs BF16, got {p.type}"
    if p.exact:
        return "rounds activations to bfloat16, and float32 arithmetic was requested"
    if not p.level.bfloat16:
        return f"needs an instruction for pairs of bfloat16, which {p.level.name} lacks"
    return f"needs rows of pairs, got {p.k} values" if p.k % 2 else None


def takes_all(p: Problem) -> str | None:
    """Of kernels that dequantize what they read."""
    return None


def chunk_bounds(e: Lowering, rows: int, row_bytes: int) -> np.ndarray:
    """Where chunks of weight rows begin and end: long ones first, so that memory is read in long runs, short ones last.

    A chunk is half of a thread's share of the remaining rows. Rows are computed alike in any chunk, so the cut has no
    influence on results.
    """
    least = max(2, CHUNK_BYTES // row_bytes)
    bounds = [0]
    while bounds[-1] < rows:
        size = max(least, (rows - bounds[-1]) // (2 * e.plan.threads))
        bounds.append(min(rows, bounds[-1] + size + size % 2))
    return np.array(bounds, np.int64)


@dataclass(frozen=True)
class Call:
    """One map of a program: the rows x, the weight, and the fields of its `Output`."""

    x: Value
    w: Packed
    output: Mapping[str, Field]


def _matvec_job(e: Lowering, c: Call) -> Job:
    axis, bounds = e.plan.rows(c.x), chunk_bounds(e, c.w.rows, c.w.row_bytes)
    fields = {**c.output, **matrix_fields(c.w, c.w.rows), "x": e.quantized(c.x), "x_stride": row_bytes(c.w.k)}
    kernel = matvec(BLOCKS[c.w.type], e.plan.level, fields["tail"] > 0)
    fields |= {"live_rows": e.plan.live(axis), "bounds": bounds}
    return e.job(kernel, Header.matvec(axis), fields, times=len(bounds) - 1)


def _tile_job(e: Lowering, c: Call) -> Job:
    axis, n_tiles = e.plan.rows(c.x), tile_count(e.plan.level, c.w.rows)
    fields = {**c.output, **matrix_fields(c.w, c.w.rows), "x": e.quantized(c.x), "x_stride": row_bytes(c.w.k)}
    kernel = tile(BLOCKS[c.w.type], e.plan.level, fields["tail"] > 0, fields["p"])
    fields |= {"live_rows": e.plan.live(axis), "n_tiles": n_tiles}
    return e.job(kernel, Header.tile(axis), fields, block_rows(fields["p"]), n_tiles)


def _floats(e: Lowering, c: Call, kind: str, x: Field, k: int) -> Job:
    """The map of weights as rows of `k` values of a kind."""
    axis, w = e.plan.rows(c.x), c.w
    rows = floats.ROWS if kind in BLOCKS else floats.chunk_rows(e.plan.level, w.rows, w.row_bytes, e.plan.threads)
    n_tiles = -(-w.rows // rows)
    matrix = {"w": w.address, "n": w.rows, "k": k, "row_bytes": w.row_bytes}
    fields = {**c.output, **matrix, "x": x, "live_rows": e.plan.live(axis), "n_tiles": n_tiles, "chunk_rows": rows}
    return e.job(float_linear(kind, e.plan.level, k), Header.axis(axis), fields, floats.T_BLOCK, n_tiles)


def _pairs_job(e: Lowering, c: Call) -> Job:
    return _floats(e, c, floats.PAIRS, e.in_bfloat16(c.x), c.w.k // 2)


def _float_job(e: Lowering, c: Call) -> Job:
    return _floats(e, c, c.w.type, c.x, c.w.k)


KERNELS = (
    LinearKernel("int8 matvec", "few rows", "q", needs_blocks, _matvec_job),
    LinearKernel("int8 tile", "more rows", "q", needs_blocks, _tile_job),
    LinearKernel("bfloat16 tile", "any rows", "f32", needs_pairs, _pairs_job),
    LinearKernel("float32 tile", "any rows", "f32", takes_all, _float_job),
)


def linear_jobs(
    e: Lowering,
    x: Value,
    s: LinearSpec,
    weight: WeightRef,
    bias: WeightRef | None,
    y: Field,
    residual: Field = None,
    scale: float = 1.0,
) -> list[Job]:
    """y = residual + scale * (W x + bias), a job for each kernel that the table chooses."""
    choice = choose(e, KERNELS, s)
    e.note(str(choice), choice.declined)
    output = {"y": y, "y_stride": 4 * s.n, "bias": bias, "residual": residual, "scale": float(scale)}
    return [kernel.job(e, Call(x, e.weights.matrix(weight), output)) for kernel in choice.kernels]
