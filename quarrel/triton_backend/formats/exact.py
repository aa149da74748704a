"""The exact values of packed weights, float32, in a kernel; what a mask leaves out decodes to zero."""

from __future__ import annotations

import triton
import triton.language as tl

from quarrel.triton_backend.formats.table import format_of


@triton.jit
def decode_blocks(FORMAT: tl.constexpr, w, row, block, row_ok, K):
    """The first and the last 16 columns of blocks `block` [B] of 32, in rows `row` [R] (int64) of the weight w (`Planes`).

    Each `[R, B, 16]` float32; K columns a row, rows where `row_ok` [R].
    """
    n_blocks = (K + 31) // 32
    at = row[:, None] * n_blocks + block[None, :]  # [R, B]
    ok = row_ok[:, None] & (block < n_blocks)[None, :]  # [R, B]
    return format_of(FORMAT).decode(FORMAT, w, row, block, row_ok, at, ok, K)
