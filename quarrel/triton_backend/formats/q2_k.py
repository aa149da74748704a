"""Q2_K: 256 codes of 2 bits; a 4-bit scale and a 4-bit minimum for 16 of them, times a float16 for all each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quarrel.gguf import GGMLType
from quarrel.triton_backend.formats.fields import load_float, load_two_bits, unshift, view, words
from quarrel.triton_backend.formats.layout import BYTE_SCALES, TWO_BITS, BlockFormat, Plane, Split


def split(raw: torch.Tensor) -> Split:
    rows, blocks, _ = raw.shape
    codes = unshift(raw[..., 16:80].view(rows, blocks, 2, 32), (0, 2, 4, 6), 3)  # [rows, blocks, 2, 4, 32]
    return words(codes, 2), None, raw[..., :16], view(raw, 80, 84, torch.float16)


@triton.jit
def decode(FORMAT: tl.constexpr, w, row, block, row_ok, at, ok, K):
    up = row[:, None] * (K // 256) + (block // 8)[None, :]  # [R, B]
    d, dmin = load_float(w.top, up * 2, ok), load_float(w.top, up * 2 + 1, ok)
    s_low = tl.load(w.scale + at * 2, mask=ok, other=0).to(tl.int32)[:, :, None]
    s_high = tl.load(w.scale + at * 2 + 1, mask=ok, other=0).to(tl.int32)[:, :, None]
    low, high = load_two_bits(w.codes, at, ok)
    low = low.to(tl.float32) * ((s_low & 15).to(tl.float32) * d) - (s_low >> 4).to(tl.float32) * dmin
    high = high.to(tl.float32) * ((s_high & 15).to(tl.float32) * d) - (s_high >> 4).to(tl.float32) * dmin
    return low, high


Q2_K = BlockFormat(GGMLType.Q2_K, split, decode, TWO_BITS, scale=BYTE_SCALES, top=Plane(torch.float16, 2, 256))
