"""Matvecs of one row whose programs each make all of that row by themselves, in registers: a launch less in front of them.

    y = W (act(gate) * up)                                      few columns
    y = W h,  h = factor * (stream + scale * norm(x))           few outputs, so few programs; the first one leaves h

A tile is R whole rows of W, on their way before the wait. The row is made as the launches that this replaces make it: a
column or a few to a thread, then as int8x2 to the threads that have the codes.

    y        [N], the compute type or float32
    w, bias  as in `matvec_kernels.py`;  rounded  a pointer of the type that the value between is rounded to
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
from quarrel.ops.program import Node
from quarrel.triton_backend.elementwise.activation import activate
from quarrel.triton_backend.elementwise.norm import added
from quarrel.triton_backend.elementwise.norm_add import NormAdd
from quarrel.triton_backend.formats.dots import load_tile, made_x, products
from quarrel.triton_backend.formats.int8x2 import reads_int8x2
from quarrel.triton_backend.formats.table import matvec_planes, word_columns
from quarrel.triton_backend.linear.matvec_kernels import store_row
from quarrel.triton_backend.runtime.arrays import Slot
from quarrel.triton_backend.runtime.launch import INTERPRETED, cdiv, power_of_two
from quarrel.triton_backend.runtime.site import Batch, Launch, Site, starts_early

MOST_GATED = 1024
"""Columns of a gate that every program computes."""
MOST_NORMED = 4096
"""Columns of a norm that every program computes, at most 16 a thread."""
MOST_OUTPUTS = 512
_PROGRAMS = 132
"""At most of a norm: all run at once."""
_GATED_ROWS = 16
"""By count, 2560 rows of 256 columns in Q4_K: 160 programs of 272 instructions by four warps, for 1280 of 397 by one with
two rows each, as a matvec alone has."""


@triton.jit
def gated_matvec(
    y, gate, up, start, rounded, w, bias, N,
    K: tl.constexpr, KIND: tl.constexpr, FORMAT: tl.constexpr, BIAS: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """gate [K] and columns start.. of up, each float32 or the compute type. Grid (N / R)."""
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
def norm_add_matvec(
    y, h, x, stream, gain, rounded, eps, scale, factor, w, bias, N,
    K: tl.constexpr, FORMAT: tl.constexpr, BIAS: tl.constexpr, R: tl.constexpr, C: tl.constexpr, PDL: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """x [K] float32 or the compute type; h, stream and gain [K] float32, h nowhere in stream or x. Grid (N / R)."""
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
    left = tl.load(stream + column, mask=column < K, other=0.0)
    v = v * (1.0 / tl.sqrt(tl.sum(v * v, 0) / K + eps)) * weight
    v = added(left, v, rounded, scale, factor)
    if first == 0:
        tl.store(h + column, v, mask=column < K)
    row = made_x(FORMAT, tl.reshape(v, (C // 32, 2, 16)))
    sums = tl.sum(products(FORMAT, q, u, s, t, row, R, W, ASM), 1)
    store_row(y, sums, bias, sums, first, N, 1.0, BIAS, False, R)


def takes_gated(gate: Node, linear: Node, compute: Compute) -> bool:
    """Whether programs of a LINEAR compute the GATED that it reads."""
    spec: GatedSpec = gate.spec
    return _takes(linear, compute) and not spec.per_row and spec.n <= MOST_GATED


def takes_norm_add(made: NormAdd, linear: Node, compute: Compute) -> bool:
    """Whether programs of a LINEAR compute the sum that it reads."""
    few = _takes(linear, compute) and linear.spec.n <= MOST_OUTPUTS and linear.spec.k <= MOST_NORMED
    return few and made.fits_a_row()


def _takes(linear: Node, compute: Compute) -> bool:
    return linear.op is LINEAR and reads_int8x2(linear, compute) and linear.outputs[0].dims[0] == "T"


def build_gated(site: Site, gate: Node, linear: Node) -> Launch:
    """LINEAR of a GATED, of one row."""
    spec: GatedSpec = gate.spec
    source, up, rounded = (site.slot(v) for v in (*gate.inputs, gate.outputs[0]))  # type: ignore[arg-type]
    given, warps = (source, up, spec.start, rounded), 4 if spec.n <= 512 else 8
    return _launch(site, linear, gated_matvec, given, _GATED_ROWS, warps, KIND=spec.activation)


def build_norm_add(site: Site, made: NormAdd, linear: Node) -> Launch:
    """LINEAR of a sum, of one row, with the sum itself."""
    spec, onto = made.norm.spec, made.onto()
    x, gain = made.norm.inputs[:2]
    values = [site.slot(v) for v in (onto.out, x, onto.stream)]  # type: ignore[arg-type]
    given = (*values, site.vector(gain), site.slot(made.norm.outputs[0]), spec.eps, onto.scale, onto.factor)  # type: ignore[arg-type]
    rows = _GATED_ROWS if INTERPRETED else power_of_two(cdiv(linear.spec.n, _PROGRAMS))
    # Warps as `NormAdd.row` has them, whose sum of squares this is.
    return _launch(site, linear, norm_add_matvec, given, rows, 8 if spec.k > 2048 else 4)


def _launch(
    site: Site, linear: Node, kernel: Any, given: Sequence[Slot | torch.Tensor | float], rows: int, warps: int, **told: Any
) -> Launch:
    """`given` stands between y and the weight."""
    _, matrix, *biases = linear.inputs
    w, y = site.weight(matrix), site.slot(linear.outputs[0])  # type: ignore[arg-type]
    bias, planes = site.vector(biases[0]) if biases else None, matvec_planes(w)  # type: ignore[arg-type]

    def run(batch: Batch) -> None:
        row = (a.tensor if isinstance(a, Slot) else a for a in given)
        site.launch(
            kernel, (cdiv(w.n, rows),), y.tensor, *row, planes, y.tensor if bias is None else bias, w.n, K=w.k,
            FORMAT=w.format, BIAS=bias is not None, R=rows, C=max(power_of_two(w.k), 32), ASM=not INTERPRETED, warps=warps,
            early=starts_early(site), **told,
        )  # fmt: skip

    return run
