"""Q8_0: 32 signed bytes and a float16 scale."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quarrel.gguf import GGMLType
from quarrel.triton_backend.formats import fragment_codes, int8_dots, ring_codes
from quarrel.triton_backend.formats.fields import load_float, view
from quarrel.triton_backend.formats.float16_codes import signed_bytes, times
from quarrel.triton_backend.formats.layout import ONE_SCALE, BlockFormat, Dots, Float16, Fragments, Plane, Ring, Split


def split(raw: torch.Tensor) -> Split:
    return view(raw, 2, 34, torch.int8), None, view(raw, 0, 2, torch.float16), None


@triton.jit
def decode(FORMAT: tl.constexpr, w, row, block, row_ok, at, ok, K):
    d = load_float(w.scale, at, ok)
    p = w.codes + at[:, :, None] * 32 + tl.arange(0, 16)[None, None, :]
    low = tl.load(p, mask=ok[:, :, None], other=0)
    high = tl.load(p + 16, mask=ok[:, :, None], other=0)
    return low.to(tl.float32) * d, high.to(tl.float32) * d


@triton.jit
def load(w, n, first, N, start, K: tl.constexpr, R: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    """Four words are half a block."""
    q = int8_dots.load_codes(w.codes, n, start, K // 4, W)
    return q, 0, int8_dots.load_spread(w.scale, first, N, start, K // 32, 2, R, W // 4, K // 4 % W != 0), 0


@triton.jit
def products(FORMAT: tl.constexpr, q, upper, scales, tops, x, R: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    C: tl.constexpr = W // 4
    a, b, c, d = int8_dots.split4(q, R, C)
    zero = tl.zeros([R, C], tl.int32)
    total = int8_dots.chain(a, b, c, d, x[0], x[1], x[2], x[3], zero, True, ASM) * 128
    total = int8_dots.chain(a, b, c, d, x[4], x[5], x[6], x[7], total, True, ASM)
    return total.to(tl.float32) * (scales.to(tl.float32) * x[8])


@triton.jit
def decode16(FORMAT: tl.constexpr, w, row, first, K, R: tl.constexpr, B: tl.constexpr):
    """Low columns are those of the first B / 2 blocks."""
    H: tl.constexpr = B // 2
    i = tl.arange(0, B * 16)[None, :]
    p = w.codes + row[:, None] * K + (first * 32 + i)
    low, high = tl.load(p), tl.load(p + B * 16)
    half = row[:, None] * (K // 32) + (first + tl.arange(0, H))[None, :]
    s, t = tl.load(w.scale + half), tl.load(w.scale + half + H)
    low, high = signed_bytes(low), signed_bytes(high)
    low, high = times(tl.reshape(low, [R, H, 32]), s, R, H, 32), times(tl.reshape(high, [R, H, 32]), t, R, H, 32)
    return tl.reshape(low, [R, B * 16]), tl.reshape(high, [R, B * 16])


@gluon.jit
def scales(FORMAT: gl.constexpr, w, at, up):
    s = gl.load(w.scale + at)
    return s, s, s, s


@gluon.jit
def eight(FORMAT: gl.constexpr, q, a, b, s, t, word):
    """`a` is the word 16 columns on."""
    return fragment_codes.eight(q, a, fragment_codes.beside(fragment_codes.twice(s.to(gl.float32)), q))


@gluon.jit
def ring_factors(FORMAT: gl.constexpr, s, t, down):
    return ring_codes.centred(s, down, 128.0)


@gluon.jit
def ring_eight(FORMAT: gl.constexpr, q, r, a, b, c, d, u, v, word):
    return ring_codes.signed_bytes(q, r, a, c)


Q8_0 = BlockFormat(
    GGMLType.Q8_0, split, decode, Plane(torch.int8, 32), scale=ONE_SCALE, dots=Dots(load, products, 4),
    float16=Float16(decode16, contiguous=True), fragments=Fragments(scales, eight),
    ring=Ring(ring_factors, ring_eight, ring_codes.shift_of_scales),
)  # fmt: skip
