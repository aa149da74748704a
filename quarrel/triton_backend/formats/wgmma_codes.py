"""Codes of packed weights for `wgmma`: copied to shared memory, and decoded in the registers that it reads.

A lane of a warp has blocks of 32 columns of rows r and r + 8: the 16 bytes of a block (32 of Q8_0) that it copies are its
own. Values are those of `fragments.py`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from quarrel.triton_backend.formats.table import format_of, word_columns

# Names of Triton 3.9, or of 3.6.
copy_in = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
SLOTS = gl.constexpr(2)
"""Steps of codes in shared memory."""


@gluon.constexpr_function
def _layout(bm, words):
    """`[bm, 4, words]`: lanes of four blocks by eight rows, a warp sixteen rows."""
    regs = [[0, 0, 1 << i] for i in range(words.bit_length() - 1)] + [[8, 0, 0]]
    lanes = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    warps = [[16 << i, 0, 0] for i in range((bm // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [bm, 4, words])


@gluon.constexpr_function
def planes_of(*formats):
    """Planes of a slot of shared memory, each `[BM, 4 blocks, 4 words]`."""
    return 8 // min(word_columns(f) for f in formats)


@gluon.jit
def send(FORMAT: gl.constexpr, to, codes, first, N, step, slot, K: gl.constexpr, BM: gl.constexpr):
    """Codes of a step, on their way to shared memory."""
    L4: gl.constexpr = _layout(BM, 4)
    WIDE: gl.constexpr = gl.SliceLayout(2, L4)
    PER: gl.constexpr = 32 // word_columns(FORMAT)
    row = gl.minimum(first + gl.arange(0, BM, gl.SliceLayout(1, WIDE)), N - 1).to(gl.int64)
    block = step * 4 + gl.arange(0, 4, gl.SliceLayout(0, WIDE))
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, L4)))
    at = (row * (K // 32))[:, None] + block[None, :]
    p = codes.to(gl.pointer_type(gl.int32)) + at[:, :, None] * PER + word[None, None, :]
    if PER == 8:
        copy_in(to.index(slot * 2), p)
        copy_in(to.index(slot * 2 + 1), p + 4)
    else:
        copy_in(to.index(slot), p)


@gluon.jit
def _split(codes, BM: gl.constexpr):
    """Words of a block: two of the first half of a step, two of the second."""
    q = codes.load(_layout(BM, 4))
    L2: gl.constexpr = _layout(BM, 2)
    first, second = gl.split(gl.permute(gl.reshape(q, [BM, 4, 2, 2]), (0, 1, 3, 2)))
    return gl.convert_layout(first, L2, assert_trivial=True), gl.convert_layout(second, L2, assert_trivial=True)


@gluon.jit
def receive(FORMAT: gl.constexpr, codes, slot, BM: gl.constexpr):
    """What `send` put there: codes of both halves of a step, and of bytes the words 16 columns on."""
    if word_columns(FORMAT) == 4:
        q0, q1 = _split(codes.index(slot * 2), BM)
        a, b = _split(codes.index(slot * 2 + 1), BM)
    else:
        q0, q1 = _split(codes.index(slot), BM)
        a, b = q0, q1
    return q0, q1, a, b


@gluon.jit
def scales(FORMAT: gl.constexpr, w, first, N, step, K: gl.constexpr, BM: gl.constexpr):
    """Upper bits, scales and the super-block's of a step, `[BM, 4]`."""
    FLAT: gl.constexpr = gl.SliceLayout(2, _layout(BM, 2))
    row = gl.minimum(first + gl.arange(0, BM, gl.SliceLayout(1, FLAT)), N - 1).to(gl.int64)
    block = step * 4 + gl.arange(0, 4, gl.SliceLayout(0, FLAT))
    at = (row * (K // 32))[:, None] + block[None, :]
    up = (row * (K // 256))[:, None] + (block // 8)[None, :]
    return format_of(FORMAT).fragments.scales(FORMAT, w, at, up)


@gluon.jit
def values(
    FORMAT: gl.constexpr, HALF: gl.constexpr, q, after, a, b, s, t, BM: gl.constexpr, MMA: gl.constexpr
):  # fmt: skip
    """Half a step of a weight, `[BM, 64]` float16, as `wgmma` reads it from registers."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    L2: gl.constexpr = _layout(BM, 2)
    word = (HALF * 2 + gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, L2))))[None, None, :]
    if word_columns(FORMAT) == 4:
        a = after
    o0, o1, o2, o3, o4, o5, o6, o7 = format_of(FORMAT).fragments.eight(FORMAT, q, a, b, s, t, word)
    low = gl.join(gl.join(o0, o1), gl.join(o2, o3))  # [BM, block, word, one, next]
    high = gl.join(gl.join(o4, o5), gl.join(o6, o7))
    both_ways = gl.permute(gl.join(low, high), (0, 2, 5, 4, 1, 3))  # [BM, word, upper, next, block, one]
    return gl.convert_layout(gl.reshape(both_ways, [BM, 64]), OPERAND, assert_trivial=True)
