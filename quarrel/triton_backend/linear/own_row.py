"""Matvecs of one row whose programs each make all of that row by themselves, in registers: a launch less in front of them.

    y = W (act(gate) * up)     few columns
    y = W norm(x)              a row that one warp holds

A tile is R whole rows of W, on their way before the wait. The row is made a column or a few to a thread, then goes as
int8x2 to the threads that have the codes (`dots.made_x`).

    y        [N], the compute type or float32
    w, bias  as in `matvec_kernels.py`
    K        columns of the row;  C  their next power of two, at least 32
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from quarrel.ops.activation import GatedSpec
from quarrel.ops.contract import Compute
from quarrel.ops.linear import LINEAR
from quarrel.ops.norm import NormSpec
from quarrel.ops.program import Node
from quarrel.triton_backend.elementwise.activation import activate
from quarrel.triton_backend.formats.dots import load_tile, made_x, products
from quarrel.triton_backend.formats.int8x2 import reads_int8x2
from quarrel.triton_backend.formats.table import INTEGERS, matvec_planes, word_columns
from quarrel.triton_backend.linear.matvec_kernels import store_row
from quarrel.triton_backend.runtime.arrays import Packed, Slot
from quarrel.triton_backend.runtime.launch import INTERPRETED, cdiv, power_of_two
from quarrel.triton_backend.runtime.site import Launch, Site, starts_early

MOST_GATED = 1024
"""Columns of a gate that every program computes."""
_GATED_ROWS = 16
"""By count, 2560 rows of 256 columns in Q4_K: 160 programs of 272 instructions by four warps, for 1280 of 397 by one with
two rows each, as a matvec alone has."""
MOST_NORMED, MOST_PROGRAMS = 1024, 1024
"""Columns of a norm that every program computes, and how many programs may do so: 0.3 us of an H200's schedulers for a
launch of 1.25. One warp has the row; where two have it, 2048 columns, maps and norm take 3.3 us for 2.9 in two launches
(GLM-4.7-Flash), and TinyLlama 474 us a step for 461."""
_NORMED_ROWS = 8


@triton.jit
def gated_matvec(
    y, gate, up, start, rounded, w, bias, N,
    K: tl.constexpr, KIND: tl.constexpr, FORMAT: tl.constexpr, BIAS: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """gate [K] and columns start.. of up, each float32 or the compute type; their product is rounded to the type of
    `rounded`. Grid (N / R)."""
    W: tl.constexpr = C // word_columns(FORMAT)
    first = tl.program_id(0) * R
    n = tl.minimum(first + tl.arange(0, R), N - 1).to(tl.int64)
    q, u, s, t = load_tile(FORMAT, w, n, first, N, 0, K, R, W, ASM)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    column = tl.arange(0, C)
    g = tl.load(gate + column, mask=column < K, other=0.0).to(tl.float32)
    v = tl.load(up + start + column, mask=column < K, other=0.0).to(tl.float32)
    v = (activate(g, KIND) * v).to(rounded.dtype.element_ty).to(tl.float32)
    row = made_x(FORMAT, tl.reshape(v, (C // 32, 2, 16)))
    sums = tl.sum(products(FORMAT, q, u, s, t, row, R, W, ASM), 1)
    store_row(y, sums, bias, sums, first, N, 1.0, BIAS, False, R)


@triton.jit
def norm_matvec(
    y, x, gain, eps, w, bias, N,
    K: tl.constexpr, FORMAT: tl.constexpr, BIAS: tl.constexpr, R: tl.constexpr, C: tl.constexpr, PDL: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """x [K] float32 or the compute type, gain [K] float32. Grid (N / R).

    The RMS norm is x * gain times one factor, which multiplies the sums: blocks are rounded before it is known.
    """
    W: tl.constexpr = C // word_columns(FORMAT)
    first = tl.program_id(0) * R
    n = tl.minimum(first + tl.arange(0, R), N - 1).to(tl.int64)
    column = tl.arange(0, C)
    weight = tl.load(gain + column, mask=column < K, other=0.0)
    q, u, s, t = load_tile(FORMAT, w, n, first, N, 0, K, R, W, ASM)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    v = tl.load(x + column, mask=column < K, other=0.0).to(tl.float32)
    row = made_x(FORMAT, tl.reshape(v * weight, (C // 32, 2, 16)))
    sums = tl.sum(products(FORMAT, q, u, s, t, row, R, W, ASM), 1)
    sums *= 1.0 / tl.sqrt(tl.sum(v * v, 0) / K + eps)
    store_row(y, sums, bias, sums, first, N, 1.0, BIAS, False, R)


def takes_gated(gate: Node, linear: Node, compute: Compute) -> bool:
    """Whether programs of a LINEAR compute the GATED that it reads."""
    spec: GatedSpec = gate.spec
    reads = linear.op is LINEAR and reads_int8x2(linear, compute) and linear.outputs[0].dims[0] == "T"
    return reads and not spec.per_row and spec.n <= MOST_GATED


def takes_norm(format: str, n: int, k: int) -> bool:
    """Whether programs of a map of n outputs compute the RMS norm of the row that it reads."""
    return format in INTEGERS and k <= MOST_NORMED and cdiv(n, _NORMED_ROWS) <= MOST_PROGRAMS


def build_gated(site: Site, gate: Node, linear: Node) -> Launch:
    """LINEAR of a GATED, of one row."""
    spec: GatedSpec = gate.spec
    source, up, rounded = (site.slot(v) for v in (*gate.inputs, gate.outputs[0]))  # type: ignore[arg-type]
    _, matrix, *biases = linear.inputs
    bias = site.vector(biases[0]) if biases else None  # type: ignore[arg-type]
    w, y, given = site.weight(matrix), site.slot(linear.outputs[0]), (source, up, spec.start, rounded)  # type: ignore[arg-type]
    return _launch(site, y, w, bias, gated_matvec, given, _GATED_ROWS, 4 if spec.n <= 512 else 8, KIND=spec.activation)


def build_norm(
    site: Site, spec: NormSpec, x: Slot, gain: torch.Tensor, y: Slot, w: Packed, bias: torch.Tensor | None
) -> Launch:
    """A map of a norm of x, of one row."""
    return _launch(site, y, w, bias, norm_matvec, (x, gain, spec.eps), 16 if INTERPRETED else _NORMED_ROWS, 1)


def _launch(
    site: Site, y: Slot, w: Packed, bias: torch.Tensor | None, kernel: Any, given: Sequence[Slot | torch.Tensor | float],
    rows: int, warps: int, **constants: Any,
) -> Launch:  # fmt: skip
    """`given` stands between y and the weight."""
    planes = matvec_planes(w)

    def run(batch: object) -> None:
        row = (a.tensor if isinstance(a, Slot) else a for a in given)
        site.launch(
            kernel, (cdiv(w.n, rows),), y.tensor, *row, planes, y.tensor if bias is None else bias, w.n, K=w.k,
            FORMAT=w.format, BIAS=bias is not None, R=rows, C=max(power_of_two(w.k), 32), ASM=not INTERPRETED, warps=warps,
            early=starts_early(site), **constants,
        )  # fmt: skip

    return run
