"""Parts of K that the ring leaves (`ring.py`), added in order: of one result, or of three maps of one x."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quarrel.triton_backend.formats.pack import ROWS_BESIDE
from quarrel.triton_backend.runtime.launch import cdiv
from quarrel.triton_backend.runtime.site import Site, starts_early


@triton.jit
def _total(parts, at, ok, stride, PARTS: tl.constexpr):
    """Sums of parts, `stride` values apart, in order."""
    total = tl.load(parts + at, mask=ok, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + part * stride + at, mask=ok, other=0.0)
    return total


@triton.jit
def add_parts(
    y, parts, more, stride, alpha, N, PARTS: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, C: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """y `[tokens, N]` = sums of parts of K, float32 `[PARTS, tokens, N]` with `stride` values each, in order, with a bias,
    or residual + alpha times that (`more`, an Epilogue). Grid (tokens, N / C)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    column = tl.program_id(1) * C + tl.arange(0, C)
    ok = column < N
    at = tl.program_id(0).to(tl.int64) * N + column
    total = _total(parts, at, ok, stride, PARTS)
    if BIAS:
        total += tl.load(more.bias + column, mask=ok, other=0.0)
    if ADD:
        total = tl.load(more.residual + at, mask=ok, other=0.0).to(tl.float32) + alpha * total
    tl.store(y + at, total.to(y.dtype.element_ty), mask=ok)


@triton.jit
def _one_of_three(
    y, parts, bias, stride, first, n, width, PARTS: tl.constexpr, BIAS: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    column = first + tl.arange(0, C)
    ok = column < n
    at = tl.program_id(0).to(tl.int64) * width + column
    total = _total(parts, at, ok, stride, PARTS)
    if BIAS:
        total += tl.load(bias + column, mask=ok, other=0.0)
    tl.store(y + tl.program_id(0).to(tl.int64) * n + column, total.to(y.dtype.element_ty), mask=ok)


@triton.jit
def add_parts_of_three(
    ys, sums, biases, strides, ns, widths, PARTS: tl.constexpr, BIAS: tl.constexpr, C: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Three results `[tokens, n]` from sums of parts of K, in order, with biases; PARTS and what stands before it are
    tuples of three. Sums are float32 `[PARTS, tokens, n]`, rows `width` values apart and parts `stride`. C divides each n
    but the last. Grid (tokens, sum of n / C)."""
    # Parts of a constant are constants by annotation only (Triton 3.6).
    A: tl.constexpr = PARTS[0]
    B: tl.constexpr = PARTS[1]
    LAST: tl.constexpr = PARTS[2]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first = tl.program_id(1) * C
    if first < ns[0]:
        _one_of_three(ys[0], sums[0], biases[0], strides[0], first, ns[0], widths[0], A, BIAS, C)
    elif first < ns[0] + ns[1]:
        _one_of_three(ys[1], sums[1], biases[1], strides[1], first - ns[0], ns[1], widths[1], B, BIAS, C)
    else:
        _one_of_three(ys[2], sums[2], biases[2], strides[2], first - ns[0] - ns[1], ns[2], widths[2], LAST, BIAS, C)


class Sums(NamedTuple):
    """Of parts of K of a matrix: float32 `[parts, rows, width]`, and the first of its columns that a result has."""

    tensor: torch.Tensor
    width: int
    parts: int
    first: int = 0


def add_three(
    site: Site, ys: Sequence[torch.Tensor], ns: Sequence[int], sums: Sequence[Sums], biases: Sequence[torch.Tensor],
    count: int,
) -> None:  # fmt: skip
    """Three results of `count` rows and so many columns each, from their sums and biases, if there are any."""
    site.launch(
        add_parts_of_three, (count, cdiv(sum(ns), ROWS_BESIDE)), tuple(ys), tuple(s.tensor[s.first :] for s in sums),
        tuple(biases or ys), tuple(count * s.width for s in sums), tuple(ns), tuple(s.width for s in sums),
        PARTS=tuple(s.parts for s in sums), BIAS=bool(biases), C=ROWS_BESIDE, warps=2, early=starts_early(site),
    )  # fmt: skip
