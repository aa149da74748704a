"""Q3_K: 256 codes of 3 bits less 4; a 6-bit scale less 32 for 16 of them, times a float16 for all."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quarrel.gguf import GGMLType
from quarrel.triton_backend.formats.fields import load_one_bit, load_two_bits, unshift, view, words
from quarrel.triton_backend.formats.layout import ONE_BIT, TWO_BITS, BlockFormat, Plane, Split


def split(raw: torch.Tensor) -> Split:
    """`top` is the float16, then 32 bits: the upper two bits of the sixteen scales, a nibble for each block."""
    rows, blocks, _ = raw.shape
    codes = unshift(raw[..., 32:96].view(rows, blocks, 2, 32), (0, 2, 4, 6), 3)
    third = unshift(raw[..., :32], (0, 1, 2, 3, 4, 5, 6, 7), 1)  # [rows, blocks, 8, 32]
    lower = unshift(raw[..., 96:104], (0, 4), 15).reshape(rows, blocks, 8, 2)
    upper = unshift(raw[..., 104:108], (0, 2, 4, 6), 3).reshape(rows, blocks, 8, 2)
    nibble = upper[..., 0] | (upper[..., 1] << 2)  # [rows, blocks, 8]
    pairs = (nibble[..., 0::2] | (nibble[..., 1::2] << 4)).contiguous().view(torch.int16)  # [rows, blocks, 2]
    top = torch.cat([view(raw, 108, 110, torch.int16), pairs], -1).view(torch.float16)
    return words(codes, 2), words(third, 1), lower[..., 0] | (lower[..., 1] << 4), top


@triton.jit
def decode(FORMAT: tl.constexpr, w, row, block, row_ok, at, ok, K):
    up = row[:, None] * (K // 256) + (block // 8)[None, :]  # [R, B]
    d = tl.load(w.top + up * 3, mask=ok, other=0.0).to(tl.float32)
    upper = tl.load(w.top + up * 3 + 1 + (block // 4 % 2)[None, :], mask=ok, other=0.0).to(tl.int16, bitcast=True)
    upper = upper.to(tl.int32) >> (block % 4 * 4)[None, :]
    lower = tl.load(w.scale + at, mask=ok, other=0).to(tl.int32)
    s_low = ((((lower & 15) | ((upper & 3) << 4)) - 32).to(tl.float32) * d)[:, :, None]
    s_high = ((((lower >> 4) | ((upper & 12) << 2)) - 32).to(tl.float32) * d)[:, :, None]
    low, high = load_two_bits(w.codes, at, ok)
    u_low, u_high = load_one_bit(w.bits, at, ok)
    return (low + u_low * 4 - 4).to(tl.float32) * s_low, (high + u_high * 4 - 4).to(tl.float32) * s_high


Q3_K = BlockFormat(GGMLType.Q3_K, split, decode, TWO_BITS, ONE_BIT, Plane(torch.uint8, 1), Plane(torch.float16, 3, 256))
