"""TQ2_0: 256 ternary codes of 2 bits less 1, and a float16 scale.

Two words have the codes of 32 columns, sixteen each; bits 2j and 2j + 1 of byte b are column 4 j + b, so that a shift and a
mask leave four neighbours as bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quarrel.gguf import GGMLType
from quarrel.triton_backend.formats import int8_dots
from quarrel.triton_backend.formats.fields import unshift, view
from quarrel.triton_backend.formats.layout import TWO_BITS, BlockFormat, Dots, Plane, Split


def split(raw: torch.Tensor) -> Split:
    rows, blocks, _ = raw.shape
    codes = unshift(raw[..., :64].view(rows, blocks, 2, 32), (0, 2, 4, 6), 3)  # [rows, blocks, 2, 4, 32]
    shift = torch.arange(0, 8, 2, dtype=torch.uint8, device=raw.device)[:, None]
    # [rows, blocks, 2, 4, half of 16 columns, j, byte]
    bytes4 = (codes.view(rows, blocks, 2, 4, 2, 4, 4) << shift).sum(-2, dtype=torch.int32).to(torch.uint8)
    return bytes4.view(torch.int32), None, None, view(raw, 64, 66, torch.float16)


@triton.jit
def decode(FORMAT: tl.constexpr, w, row, block, row_ok, at, ok, K):
    up = row[:, None] * (K // 256) + (block // 8)[None, :]  # [R, B]
    d = tl.load(w.top + up, mask=ok, other=0.0).to(tl.float32)[:, :, None]
    i = tl.arange(0, 16)[None, None, :]
    shift = i % 4 * 8 + i // 4 * 2
    low = (tl.load(w.codes + at * 2, mask=ok, other=0)[:, :, None] >> shift) & 3
    high = (tl.load(w.codes + at * 2 + 1, mask=ok, other=0)[:, :, None] >> shift) & 3
    return (low - 1).to(tl.float32) * d, (high - 1).to(tl.float32) * d


@triton.jit
def load(w, n, first, N, start, K: tl.constexpr, R: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    """A block's 8 bytes are one int64, [R, W / 4]; a tile of W words is one of nibbles elsewhere."""
    S: tl.constexpr = W // 4
    q = int8_dots.load_spread(w.codes, first, N, start, K // 32, 1, R, S, K // 8 % W != 0)
    return q, 0, 0, int8_dots.load_tops(w.top, first, N, start, K, R, W)


@triton.jit
def products(FORMAT: tl.constexpr, q, upper, scales, tops, x, R: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    M: tl.constexpr = 0x03030303
    a, e = q.to(tl.int32), (q >> 32).to(tl.int32)
    codes = (a & M, (a >> 2) & M, (a >> 4) & M, (a >> 6) & M, e & M, (e >> 2) & M, (e >> 4) & M, (e >> 6) & M)
    total = int8_dots.whole_block(codes, x, R, W, False, ASM) - (x[17] + x[18])
    return total.to(tl.float32) * (tops.to(tl.float32) * x[16])


TQ2_0 = BlockFormat(
    GGMLType.TQ2_0, split, decode, TWO_BITS, top=Plane(torch.float16, 1, 256),
    dots=Dots(load, products, views=(torch.int64, None, None, None), entry=32),
)  # fmt: skip
