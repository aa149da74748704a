"""Tiles of packed weights in the compute type, for tensor cores: in few instructions where a format has them
(`float16_codes.py`), else the exact values, rounded."""

from __future__ import annotations

import triton
import triton.language as tl

from quarrel.triton_backend.formats.exact import decode_blocks
from quarrel.triton_backend.formats.table import by_name, format_of, is_contiguous
from quarrel.triton_backend.runtime.launch import INTERPRETED


def is_fast(format: str, compute: str, blocks: int) -> bool:
    """Whether there are instructions for this format, in steps of so many blocks; the interpreter has none."""
    way = by_name(format).float16
    return way is not None and compute == "float16" and not INTERPRETED and (not way.contiguous or blocks > 1)


@triton.jit
def decode_tile(
    FORMAT: tl.constexpr, FAST: tl.constexpr, COMPUTE: tl.constexpr, w, row, first, K, R: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    """Two tiles `[R, B * 16]` of the compute type: columns `low_columns` of the B blocks from `first` on, and the others.

    `row` [R] is int64; FAST is from `is_fast`.
    """
    if FAST:
        low, high = format_of(FORMAT).float16.decode(FORMAT, w, row, first, K, R, B)
    else:
        low, high = decode_blocks(FORMAT, w, row, first + tl.arange(0, B), row >= 0, K)
        low, high = tl.reshape(low, [R, B * 16]).to(COMPUTE), tl.reshape(high, [R, B * 16]).to(COMPUTE)
    return low, high


@triton.jit
def low_columns(FORMAT: tl.constexpr, FAST: tl.constexpr, B: tl.constexpr):
    """The columns of the low tile, [B * 16]; those of the high one are `high_offset` further on."""
    part = tl.arange(0, B * 16)
    return part if FAST and is_contiguous(FORMAT) else part // 16 * 32 + part % 16


@triton.jit
def high_offset(FORMAT: tl.constexpr, FAST: tl.constexpr, B: tl.constexpr):
    return B * 16 if FAST and is_contiguous(FORMAT) else 16
