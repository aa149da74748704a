"""Packed weights straight into the registers that `mma` reads: decoded in place, never through shared memory.

A thread of a warp holds rows r and r + 8 of blocks b and b + 4, sixteen columns at a time, and so do the operands of
`mma`, once their columns are counted in the same order for weights and activations. One word of codes (eight weights, or
four of Q8_0) becomes pairs of float16 in PTX (`fragment_codes.py`). Gluon, as the layouts are its point.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quarrel.triton_backend.formats.table import format_of, word_columns

STEP = 256
"""Columns that a warp takes at a time."""
GROUP = 8
"""Rows of x to a product."""


@triton.jit(do_not_specialize=["tokens"])
def arrange(to, x, tokens, K: tl.constexpr, PDL: tl.constexpr):
    """Rows of x as float16 in the order in which the threads of a warp read them, 16 bytes each, side by side.

    `[groups, K / 256, 2 halves of a block, 2, 2, 8 rows, 4 blocks, 8 columns]`; rows beyond the last are zero, and so are
    columns from K to a multiple of 256. A warp that read x as it lies would touch 16 lines for what is now 4. Grid
    (K / 256, groups).
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i = tl.arange(0, 2048)
    row = tl.program_id(1) * 8 + i // 32 % 8
    column = tl.program_id(0) * 256 + column_at(i)
    v = tl.load(x + row.to(tl.int64) * K + column, mask=(row < tokens) & (column < K), other=0.0)
    tl.store(to + (tl.program_id(1).to(tl.int64) * ((K + 255) // 256) + tl.program_id(0)) * 2048 + i, v.to(tl.float16))


@triton.jit
def place_of(row, column, K: tl.constexpr):
    """Where `arrange` puts a value."""
    block = column // 32 % 8
    group = row // 8 * ((K + 255) // 256) + column // 256
    lane = row % 8 * 32 + block % 4 * 8 + column % 8
    return group * 2048 + column // 16 % 2 * 1024 + block // 4 * 512 + column // 8 % 2 * 256 + lane


@triton.jit
def column_at(i):
    """The column, of 256, of place i among 8 rows."""
    block = i // 8 % 4 + i // 512 % 2 * 4
    return block * 32 + i // 1024 * 16 + i // 256 % 2 * 8 + i % 8


@gluon.constexpr_function
def words_layout(turns, tall, rows):
    """`[turns, rows, 8, 4]` words: lanes of four blocks by eight rows, `tall` warps of rows, `turns` warps of columns."""
    regs = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 8, 0, 0], [0, 0, 4, 0]]
    regs += [[0, 16 * tall << i, 0, 0] for i in range((rows // 16 // tall).bit_length() - 1)]
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    warps = [[0, 16 << i, 0, 0] for i in range(tall.bit_length() - 1)]
    warps += [[1 << i, 0, 0, 0] for i in range(turns.bit_length() - 1)]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [turns, rows, 8, 4])


@gluon.jit
def fetch_words(FORMAT: gl.constexpr, w, row, block, up, K: gl.constexpr, L4: gl.constexpr):
    """What `pairs` needs of blocks `block` [W, 1, 8] and super-blocks `up` [W, 1] of rows `row` [1, R] (int64)."""
    at = (row * (K // 32))[:, :, None] + block
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L4))))[None, None, None, :]
    PER: gl.constexpr = 32 // word_columns(FORMAT)
    p = w.codes.to(gl.pointer_type(gl.int32)) + at[:, :, :, None] * PER + word
    q = gl.load(p)
    if PER == 8:
        after = gl.load(p + 4)
    a, b, s, t = format_of(FORMAT).fragments.scales(FORMAT, w, at, row * (K // 256) + up)
    if PER == 8:
        a = after
    return q, a, b, s, t


@gluon.jit
def pairs(FORMAT: gl.constexpr, q, a, b, s, t, W: gl.constexpr, R: gl.constexpr, L4: gl.constexpr, A: gl.constexpr):
    """Low and high columns of 8 blocks, `[W, R, 128]` float16 each, as `mma` reads them."""
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L4))))[None, None, None, :]
    if len(t.shape) == 2:
        t = t[:, :, None]
    o0, o1, o2, o3, o4, o5, o6, o7 = format_of(FORMAT).fragments.eight(FORMAT, q, a, b, s, t, word)
    low = gl.join(gl.join(o0, o2), gl.join(o1, o3))  # [W, R, 8, 4, 2, 2]
    high = gl.join(gl.join(o4, o6), gl.join(o5, o7))
    low = gl.convert_layout(gl.reshape(low, [W, R, 128]), A, assert_trivial=True)
    high = gl.convert_layout(gl.reshape(high, [W, R, 128]), A, assert_trivial=True)
    return low, high
