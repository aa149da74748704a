"""Q8_1: 32 codes of 8 bits, a float16 scale and a float16 minimum.

The bytes of a block's first 16 columns are one plane, those of the others another: a tile is then as one of nibbles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quarrel.gguf import GGMLType
from quarrel.triton_backend.formats import int8_dots
from quarrel.triton_backend.formats.fields import float16_at, load_float, view
from quarrel.triton_backend.formats.layout import TWO_SCALES, BlockFormat, Dots, Plane, Split

_HALF = Plane(torch.uint8, 16)


def split(raw: torch.Tensor) -> Split:
    return raw[..., 4:20], raw[..., 20:36], view(raw, 0, 4, torch.float16), None


@triton.jit
def decode(FORMAT: tl.constexpr, w, row, block, row_ok, at, ok, K):
    d, m = load_float(w.scale, at * 2, ok), load_float(w.scale, at * 2 + 1, ok)
    i = at[:, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    low = tl.load(w.codes + i, mask=ok[:, :, None], other=0)
    high = tl.load(w.bits + i, mask=ok[:, :, None], other=0)
    return low.to(tl.float32) * d + m, high.to(tl.float32) * d + m


@triton.jit
def load(w, n, first, N, start, K: tl.constexpr, R: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    low = int8_dots.load_codes(w.codes, n, start, K // 8, W)
    high = int8_dots.load_codes(w.bits, n, start, K // 8, W)
    return low, high, int8_dots.load_blocks(w.scale, n, start, K, W, ASM), 0


@triton.jit
def products(FORMAT: tl.constexpr, q, upper, scales, tops, x, R: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    a, b, c, d = int8_dots.split4(q, R, W // 4)
    e, f, g, h = int8_dots.split4(upper, R, W // 4)
    total = int8_dots.whole_block((a, b, c, d, e, f, g, h), x, R, W, False, ASM).to(tl.float32)
    return (float16_at(scales) * total + float16_at(scales >> 16) * (x[17] + x[18]).to(tl.float32)) * x[16]


Q8_1 = BlockFormat(
    GGMLType.Q8_1, split, decode, _HALF, _HALF, TWO_SCALES,
    dots=Dots(load, products, views=(torch.int32, torch.int32, torch.int32, None)),
)  # fmt: skip
