"""Rows of x where `linear/ring_kernels.py` reads them: float16 `[rows, KP]`, columns in the order of registers."""

from __future__ import annotations

import triton
import triton.language as tl

from quarrel.triton_backend.elementwise.activation import normed_row


@triton.jit
def column_at(i):
    """The column that stands at place i: of 128, bits (word 2)(next)(upper)(block 2)(one) of the place."""
    r = i % 128
    return i // 128 * 128 + r // 2 % 4 * 32 + r // 8 % 2 * 16 + r // 32 * 4 + r % 2 * 2 + r // 16 % 2


@triton.jit
def place_of(column):
    """The place of a column: the inverse of `column_at`."""
    r = column % 128
    return column // 128 * 128 + r // 4 % 4 * 32 + r % 2 * 16 + r // 16 % 2 * 8 + r // 32 * 2 + r // 2 % 2


@triton.jit
def arrange(to, x, K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, PDL: tl.constexpr):
    """Rows of x `[rows, K]` put there, with zeros from K to KP. Grid (rows, KP / C)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * C + tl.arange(0, C)
    column = column_at(place)
    v = tl.load(x + row * K + column, mask=column < K, other=0.0)
    tl.store(to + row * KP + place, v.to(tl.float16), mask=place < KP)


@triton.jit(do_not_specialize=["tokens"])
def norm_arranged(
    to, x, gain, left, tokens, eps, K: tl.constexpr, C: tl.constexpr, LEFT: tl.constexpr, PARTS: tl.constexpr,
    KP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """RMS norm of rows put there; a program a row, C columns of which K count."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, C)
    value = normed_row(x, gain, left, row, tokens, eps, K, C, LEFT, PARTS, PDL)
    tl.store(to + row * KP + place_of(column), value.to(tl.float16), mask=column < KP)
