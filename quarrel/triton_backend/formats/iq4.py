"""IQ4_NL, IQ4_XS: codes of 4 bits that stand for 16 fixed values; a float16 scale for 32, or a 6-bit one less 32 times a
float16 for 256. Packing widens the 6-bit scales to bytes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quarrel.gguf import GGMLType
from quarrel.triton_backend.formats import int8_dots
from quarrel.triton_backend.formats.fields import load_float, load_nibbles, unshift, view
from quarrel.triton_backend.formats.layout import NIBBLES, ONE_SCALE, BlockFormat, Dots, Plane, Split
from quarrel.triton_backend.formats.q4_0 import load_4 as load_nl
from quarrel.triton_backend.formats.q4_0 import split_q4 as split_nl
from quarrel.triton_backend.formats.q4_k import load_4 as load_xs

# The values as bytes, four to a word: two's complement, so that the words are plain int32.
_A: tl.constexpr = tl.constexpr(0xBFAD9881 - (1 << 32))
_B: tl.constexpr = tl.constexpr(0xF6EADDCF - (1 << 32))
_C: tl.constexpr = tl.constexpr(0x26190D01)
_D: tl.constexpr = tl.constexpr(0x71594535)
# The same plus 128.
_A_128: tl.constexpr = tl.constexpr(0x3F2D1801)
_B_128: tl.constexpr = tl.constexpr(0x766A5D4F)
_C_128: tl.constexpr = tl.constexpr(0xA6998D81 - (1 << 32))
_D_128: tl.constexpr = tl.constexpr(0xF1D9C5B5 - (1 << 32))


def split_xs(raw: torch.Tensor) -> Split:
    lower = unshift(raw[..., 4:8], (0, 4), 15).transpose(-1, -2).flatten(-2)  # [rows, blocks, 8]
    upper = unshift(raw[..., 2:4], (0, 2, 4, 6), 3).transpose(-1, -2).flatten(-2)
    scale = (lower | (upper << 4)).to(torch.int8) - 32
    return raw[..., 8:], None, scale, view(raw, 0, 2, torch.float16)


@triton.jit
def _values(q):
    word = tl.where(q < 8, tl.where(q < 4, _A_128, _B_128), tl.where(q < 12, _C_128, _D_128))
    return (((word >> ((q & 3) * 8)) & 255) - 128).to(tl.float32)


@triton.jit
def decode(FORMAT: tl.constexpr, w, row, block, row_ok, at, ok, K):
    if FORMAT == "IQ4_NL":
        s = load_float(w.scale, at, ok)
    else:
        up = row[:, None] * (K // 256) + (block // 8)[None, :]  # [R, B]
        d = tl.load(w.top + up, mask=ok, other=0.0).to(tl.float32)
        s = (tl.load(w.scale + at, mask=ok, other=0).to(tl.float32) * d)[:, :, None]
    low, high = load_nibbles(w.codes, at, ok)
    return _values(low) * s, _values(high) * s


@triton.jit
def products(FORMAT: tl.constexpr, q, upper, scales, tops, x, R: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    codes = int8_dots.split_table(q, _A, _B, _C, _D, R, W, ASM)
    total = int8_dots.whole_block(codes, x, R, W, True, ASM)
    if FORMAT == "IQ4_NL":
        y = total.to(tl.float32) * (scales.to(tl.float32) * x[16])
    else:
        y = (total.to(tl.float32) * scales.to(tl.float32)) * (tops.to(tl.float32) * x[16])
    return y


IQ4_NL = BlockFormat(GGMLType.IQ4_NL, split_nl, decode, NIBBLES, scale=ONE_SCALE, dots=Dots(load_nl, products))
IQ4_XS = BlockFormat(
    GGMLType.IQ4_XS, split_xs, decode, NIBBLES, scale=Plane(torch.int8, 1), top=Plane(torch.float16, 1, 256),
    dots=Dots(load_xs, products),
)  # fmt: skip
