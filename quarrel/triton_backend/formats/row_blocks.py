"""Blocks of a row of activations that a matvec rounds by itself, to what `dots.load_x` would have loaded.

Each thread rounds the block whose codes it holds: columns stand first in every shape, so that all of a block are in one
thread. Of bytes that is half a block, which has a scale of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quarrel.triton_backend.formats.int8_dots import choose_bytes
from quarrel.triton_backend.formats.table import word_columns

_MAGIC: tl.constexpr = tl.constexpr(12582912.0)
"""3 * 2^22: of a float near it the lowest bit is a one, so a sum with it is rounded to an integer."""
_BITS: tl.constexpr = tl.constexpr(0x4B400000)
"""Of that float."""


@triton.jit
def rounded_row(FORMAT: tl.constexpr, v, W: tl.constexpr, ASM: tl.constexpr):
    """v, float32, the columns of a tile of W words in their order, in any shape: as `load_x` gives them, int8x2."""
    C: tl.constexpr = W // 4
    H: tl.constexpr = word_columns(FORMAT)
    # In pairs: 64 bits go to the threads that have the codes in one turn through shared memory, 32 in four (Triton 3.6).
    even, odd = tl.split(tl.reshape(v.to(tl.int32, bitcast=True), (C, 2, H, 2)))
    pairs = (odd.to(tl.int64) << 32) | (even.to(tl.int64) & 0xFFFFFFFF)
    first, second = tl.split(tl.permute(pairs, (2, 0, 1)))  # [H, C]
    a, b = _columns(first)
    c, d = _columns(second)
    largest = _larger(_larger(_largest(a, ASM), _largest(b, ASM)), _larger(_largest(c, ASM), _largest(d, ASM)))  # [C]
    up = tl.where(largest > 1e-30, 16256.0 / largest, 0.0)
    s = _as_row(largest * (1.0 / 16256), H)
    high, low, sums = _digits(a, b, up, ASM)
    high_2, low_2, sums_2 = _digits(c, d, up, ASM)
    if word_columns(FORMAT) == 4:
        row = _by_two(high) + _by_two(high_2) + _by_two(low) + _by_two(low_2) + (s,)
    else:
        row = _by_four(high) + _by_four(low) + _by_four(high_2) + _by_four(low_2) + (s, sums, sums_2)
    return row


@triton.jit
def _columns(pairs):
    """Both floats of each pair."""
    return pairs.to(tl.int32).to(tl.float32, bitcast=True), (pairs >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest(v, ASM: tl.constexpr):
    """The largest absolute value of each column of v [H, C]; NaN if there is one."""
    if ASM:
        y = tl.reduce(tl.abs(v), 0, _larger)
    else:
        y = tl.max(tl.abs(v), 0) + tl.sum(v * 0.0, 0)  # the interpreter takes ages for other reductions
    return y


@triton.jit
def _digits(even, odd, up, ASM: tl.constexpr):
    """Even and odd columns, [H, C] each, times up [C] as words of high and of low codes, [H / 2, C], and the sums of both,
    [1, C]."""
    # 64 more: the lower 7 bits are then the low code and 64.
    even = (even * up[None, :] + (_MAGIC + 64.0)).to(tl.int32, bitcast=True)
    odd = (odd * up[None, :] + (_MAGIC + 64.0)).to(tl.int32, bitcast=True)
    a, c = _by_two(even)
    b, d = _by_two(odd)
    ab = choose_bytes(a, b, a * 0 + 0x5410, ASM)
    cd = choose_bytes(c, d, a * 0 + 0x5410, ASM)
    high = choose_bytes(ab >> 7, cd >> 7, a * 0 + 0x6420, ASM)
    low = ((choose_bytes(ab, cd, a * 0 + 0x6420, ASM) & 0x7F7F7F7F) + 0x40404040) ^ -0x7F7F7F80
    return high, low, _as_row(tl.sum((even - (_BITS + 64)) + (odd - (_BITS + 64)), 0), even.shape[0])


@triton.jit
def _by_two(v):
    """Rows 0, 2, .. and rows 1, 3, .. of v [H, C]. A split of rows by four at once would leave their columns' threads."""
    H: tl.constexpr = v.shape[0]
    C: tl.constexpr = v.shape[1]
    return tl.split(tl.permute(tl.reshape(v, (H // 2, 2, C)), (0, 2, 1)))


@triton.jit
def _by_four(v):
    even, odd = _by_two(v)
    a, c = _by_two(even)
    b, d = _by_two(odd)
    return a, b, c, d


@triton.jit
def _as_row(v, H: tl.constexpr):
    """v [C] as [1, C], by the splits that words take from [H, C]: otherwise Triton computes all that v depends on twice."""
    C: tl.constexpr = v.shape[0]
    y, _, _, _ = _by_four(tl.broadcast_to(v[None, :], (H, C)))
    if H == 8:
        y, _ = _by_two(y)
    return y
