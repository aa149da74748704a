"""Tiles of packed weights in shared memory, decoded into the registers that `wgmma` reads as its left operand.

A tile has 16 T rows of 256 columns; a lane of T warps has rows g and g + 8 of blocks t and t + 4, of 32 columns each. A
word of codes makes four pairs of float16 (`ring_codes.py`). Columns of x come in the order of the pairs
(`elementwise/ring_x.py`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quarrel.triton_backend.formats.table import format_of, word_columns


@gluon.constexpr_function
def planes_of(format):
    """Copies of 128 bytes a row that 256 columns of codes are."""
    return 8 // word_columns(format)


@gluon.constexpr_function
def _codes_layout(T, GATED):
    """Words `[16 T, 32]`, 128 bytes a row. Lanes 2 to 4 take rows 4, 1 and 2, so that eight lanes meet no bank twice."""
    other = [8 * T, 0] if GATED else [8, 0]
    first = 8 if GATED else 16
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], other, [0, 16]],
        [[0, 4], [0, 8], [4, 0], [1, 0], [2, 0]],
        [[first << i, 0] for i in range(T.bit_length() - 1)],
        [],
        [16 * T, 32],
    )


@gluon.constexpr_function
def _bytes_layout(T, GATED):
    """Words `[16 T, 32]` of codes of 8 bits: a lane has both 16 bytes of block t."""
    other = [8 * T, 0] if GATED else [8, 0]
    first = 8 if GATED else 16
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], other],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[first << i, 0] for i in range(T.bit_length() - 1)],
        [],
        [16 * T, 32],
    )


@gluon.constexpr_function
def _entries_layout(T, GATED, PLANES, EACH):
    """`[16 T, 8 EACH]`: of each row of a lane, EACH entries of blocks t and t + 4."""
    other = [8 * T, 0] if GATED else [8, 0]
    first = 8 if GATED else 16
    rows = [[1, 0], [2, 0], [4, 0]] if PLANES == 2 else [[4, 0], [1, 0], [2, 0]]
    return gl.DistributedLinearLayout(
        ([[0, 1]] if EACH == 2 else []) + [other, [0, 4 * EACH]],
        [[0, EACH], [0, 2 * EACH], *rows],
        [[first << i, 0] for i in range(T.bit_length() - 1)],
        [],
        [16 * T, 8 * EACH],
    )


@gluon.constexpr_function
def _transposed_layout(T, GATED, PLANES, B):
    """`[B, 16 T]`, or `[2 B, 8 T]` of gate and up: of each row of a lane, entries of blocks t and t + 4, or its one."""
    other = [B, 0] if GATED else [0, 8]
    first = 8 if GATED else 16
    rows = [[0, 1], [0, 2], [0, 4]] if PLANES == 2 else [[0, 4], [0, 1], [0, 2]]
    blocks = [[1, 0], [2, 0]] if B == 8 else [[0, 0], [0, 0]]
    return gl.DistributedLinearLayout(
        [other] + ([[4, 0]] if B == 8 else []),
        [*blocks, *rows],
        [[0, first << i] for i in range(T.bit_length() - 1)],
        [],
        [2 * B, 8 * T] if GATED else [B, 16 * T],
    )


@gluon.constexpr_function
def words_layout(T):
    """`[16 T, 4, 2]`: two words of block t of rows g and g + 8."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [8, 0, 0]],
        [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16 << i, 0, 0] for i in range(T.bit_length() - 1)],
        [],
        [16 * T, 4, 2],
    )


@gluon.jit
def row_of(m, GATED: gl.constexpr, T: gl.constexpr, PLANES: gl.constexpr):
    """Which row of the tile is row m of the product. GATED: half a tile of gate, then half a tile of up."""
    g = m & 7
    if PLANES == 1:
        g = ((g & 1) << 2) | (g >> 1)
    if GATED:
        return (m >> 4) * 8 + g + ((m >> 3) & 1) * (8 * T)
    else:
        return (m & ~7) + g


@gluon.jit
def in_product_order(v, T: gl.constexpr, GATED: gl.constexpr, PLANES: gl.constexpr, A: gl.constexpr, B: gl.constexpr):
    """Rows of a tile `[16 T, A, B]` in the order of the product's."""
    if PLANES == 2:
        if GATED:
            v = gl.permute(gl.reshape(v, [2, T, 8, A, B]), (1, 0, 2, 3, 4))
    else:
        if GATED:
            v = gl.permute(gl.reshape(v, [2, T, 2, 4, A, B]), (1, 0, 3, 2, 4, 5))
        else:
            v = gl.permute(gl.reshape(v, [2 * T, 2, 4, A, B]), (0, 2, 1, 3, 4))
    return gl.reshape(v, [16 * T, A, B])


@gluon.jit
def _quarters(v, T: gl.constexpr):
    """`[16 T, 4, 2, 2, 2]` to four `[16 T, 4, 2]`: of the last two axes, the last one slowest."""
    L: gl.constexpr = words_layout(T)
    a, b = gl.split(v)
    a0, a1 = gl.split(a)
    b0, b1 = gl.split(b)
    return (
        gl.convert_layout(a0, L, assert_trivial=True),
        gl.convert_layout(a1, L, assert_trivial=True),
        gl.convert_layout(b0, L, assert_trivial=True),
        gl.convert_layout(b1, L, assert_trivial=True),
    )


@gluon.jit
def nibbles(tile, T: gl.constexpr, GATED: gl.constexpr):
    """Codes of 4 bits of 256 columns: words 0 1 and 2 3 of block t, then of block t + 4."""
    v = in_product_order(gl.reshape(tile.load(_codes_layout(T, GATED)), [16 * T, 32, 1]), T, GATED, 1, 32, 1)
    v = gl.permute(gl.reshape(v, [16 * T, 2, 4, 2, 2]), (0, 2, 4, 3, 1))  # row, half, t, pair, word
    return _quarters(v, T)


@gluon.jit
def signed_bytes(tile, T: gl.constexpr, GATED: gl.constexpr):
    """Codes of 8 bits of 128 columns: words 0 1, 2 3, 4 5 and 6 7 of block t."""
    v = in_product_order(gl.reshape(tile.load(_bytes_layout(T, GATED)), [16 * T, 32, 1]), T, GATED, 2, 32, 1)
    v = gl.permute(gl.reshape(v, [16 * T, 4, 2, 2, 2]), (0, 1, 4, 3, 2))  # row, t, half, pair, word
    return _quarters(v, T)


@gluon.jit
def _of_blocks(v, T: gl.constexpr, GATED: gl.constexpr, PLANES: gl.constexpr):
    """Entries `[16 T, 8]` of a tile's rows: of blocks t, and of blocks t + 4."""
    F: gl.constexpr = gl.SliceLayout(2, words_layout(T))
    v = gl.reshape(in_product_order(gl.reshape(v, [16 * T, 8, 1]), T, GATED, PLANES, 8, 1), [16 * T, 2, 4])
    a, b = gl.split(gl.permute(v, (0, 2, 1)))
    return gl.convert_layout(a, F, assert_trivial=True), gl.convert_layout(b, F, assert_trivial=True)


@gluon.jit
def entries(tile, T: gl.constexpr, GATED: gl.constexpr, PLANES: gl.constexpr):
    """One entry a block `[16 T, 8]`: of blocks t, and of blocks t + 4."""
    return _of_blocks(tile.load(_entries_layout(T, GATED, PLANES, 1)), T, GATED, PLANES)


@gluon.jit
def _load_transposed(tile, T: gl.constexpr, GATED: gl.constexpr, PLANES: gl.constexpr, B: gl.constexpr):
    """`[16 T, B]` of a tile `[B, 16 T]`, or `[2 B, 8 T]` of gate and up."""
    v = tile.load(_transposed_layout(T, GATED, PLANES, B))
    if GATED:
        v = gl.reshape(gl.permute(gl.reshape(v, [2, B, 8 * T]), (0, 2, 1)), [16 * T, B])
    else:
        v = gl.permute(v, (1, 0))
    return v


@gluon.jit
def transposed_entries(tile, T: gl.constexpr, GATED: gl.constexpr, PLANES: gl.constexpr):
    """`entries` of a transposed tile."""
    return _of_blocks(_load_transposed(tile, T, GATED, PLANES, 8), T, GATED, PLANES)


@gluon.jit
def transposed_tops(tile, T: gl.constexpr, GATED: gl.constexpr, PLANES: gl.constexpr):
    """The scales of super-blocks beside those of their blocks, `[16 T, 4]`."""
    v = gl.reshape(_load_transposed(tile, T, GATED, PLANES, 1), [16 * T, 1, 1])
    v = gl.reshape(in_product_order(v, T, GATED, PLANES, 1, 1), [16 * T])
    v = gl.convert_layout(v, gl.SliceLayout(1, gl.SliceLayout(2, words_layout(T))), assert_trivial=True)
    return v[:, None].broadcast_to([16 * T, 4])


@gluon.jit
def double_entries(tile, T: gl.constexpr, GATED: gl.constexpr, PLANES: gl.constexpr):
    """Two entries a block `[16 T, 16]`: both of blocks t, then both of blocks t + 4."""
    F: gl.constexpr = gl.SliceLayout(2, words_layout(T))
    v = gl.reshape(tile.load(_entries_layout(T, GATED, PLANES, 2)), [16 * T, 8, 2])
    v = gl.reshape(in_product_order(v, T, GATED, PLANES, 8, 2), [16 * T, 2, 4, 2])
    a, b = gl.split(gl.permute(v, (0, 2, 3, 1)))
    a0, a1 = gl.split(a)
    b0, b1 = gl.split(b)
    return (
        gl.convert_layout(a0, F, assert_trivial=True),
        gl.convert_layout(a1, F, assert_trivial=True),
        gl.convert_layout(b0, F, assert_trivial=True),
        gl.convert_layout(b1, F, assert_trivial=True),
    )


@gluon.jit
def factors(FORMAT: gl.constexpr, s, t, down):
    """What `decode` multiplies by and adds, of scales `s` and `t` [16 T, 4]; `down` is 2^-shift. Four words."""
    return format_of(FORMAT).ring.factors(FORMAT, s, t, down)


@gluon.jit
def decode(FORMAT: gl.constexpr, PAIR: gl.constexpr, q, r, a, b, c, d, u, v, T: gl.constexpr, MMA: gl.constexpr):
    """64 columns of a tile, `[16 T, 64]` float16 as `wgmma` reads them from registers.

    q: words 2 PAIR and 2 PAIR + 1 of the blocks; r: those of their high columns, where codes have 8 bits. a to d:
    `factors`. u, v: the blocks' upper bits, one word (u) or one for low and one for high columns.
    """
    L: gl.constexpr = words_layout(T)
    word = (PAIR * 2 + gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, L))))[None, None, :]
    o0, o1, o2, o3, o4, o5, o6, o7 = format_of(FORMAT).ring.eight(FORMAT, q, r, a, b, c, d, u, v, word)
    low = gl.join(gl.join(o0, o1), gl.join(o2, o3))  # [row, t, word, one, upper]
    high = gl.join(gl.join(o4, o5), gl.join(o6, o7))
    both = gl.permute(gl.join(low, high), (0, 2, 5, 4, 1, 3))  # [row, word, next, upper, t, one]
    return gl.convert_layout(gl.reshape(both, [16 * T, 64]), gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)
