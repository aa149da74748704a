"""Rows of x where `warpgroup.py` reads them: float16, `[K / 64, BT, 64]`, columns in the order of a weight's registers."""

from __future__ import annotations

import triton
import triton.language as tl

from quarrel.triton_backend.elementwise.activation import normed_row

STEP = 128
"""Columns of a step."""
WIDTHS = (64, 128)
"""Rows of x that `wgmma` is given."""


@triton.jit
def column_at(i):
    """The column, of 128, of place i in the order in which a lane's words become operands."""
    half, low, upper, next, lane, one = i // 64, i // 32 % 2, i // 16 % 2, i // 8 % 2, i // 2 % 4, i % 2
    return lane * 32 + upper * 16 + half * 8 + low * 4 + next * 2 + one


@triton.jit
def place_of(column):
    """The place of a column of 128: the inverse of `column_at`."""
    lane, upper, half = column // 32 % 4, column // 16 % 2, column // 8 % 2
    low, next, one = column // 4 % 2, column // 2 % 2, column % 2
    return half * 64 + low * 32 + upper * 16 + next * 8 + lane * 2 + one


@triton.jit(do_not_specialize=["tokens"])
def arrange(to, x, tokens, K: tl.constexpr, BT: tl.constexpr, PDL: tl.constexpr):
    """Rows of x put there; those beyond the last are zero. Grid (K / 128, BT / 16)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(1) * 16 + tl.arange(0, 16)
    i = tl.arange(0, 128)
    at = row.to(tl.int64)[:, None] * K + (tl.program_id(0) * 128 + column_at(i))[None, :]
    v = tl.load(x + at, mask=(row < tokens)[:, None], other=0.0)
    place = (tl.program_id(0) * 2 + i // 64) * (BT * 64) + i % 64
    tl.store(to + row[:, None] * 64 + place[None, :], v.to(tl.float16))


@triton.jit(do_not_specialize=["tokens"])
def norm_arranged(
    to, x, gain, left, tokens, eps, K: tl.constexpr, C: tl.constexpr, LEFT: tl.constexpr, PARTS: tl.constexpr,
    BT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """RMS norm of rows put there; a program a row, of which those beyond the last are zero."""
    row = tl.program_id(0)
    column = tl.arange(0, C)
    value = normed_row(x, gain, left, row, tokens, eps, K, C, LEFT, PARTS, PDL)
    place = place_of(column % 128)
    at = (column // 128 * 2 + place // 64) * (BT * 64) + row * 64 + place % 64
    tl.store(to + at, value.to(tl.float16), mask=column < K)
