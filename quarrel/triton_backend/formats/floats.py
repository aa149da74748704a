"""F32, F16, BF16: one stored value a column. BF16 is stored as int16: a shift is exact everywhere, the interpreter's own
arithmetic in bfloat16 is not."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quarrel.gguf import GGMLType
from quarrel.triton_backend.formats.int8_dots import load_codes
from quarrel.triton_backend.formats.layout import BlockFormat, Dots, Plane, Split


@triton.jit
def decode(FORMAT: tl.constexpr, w, row, block, row_ok, at, ok, K):
    """K need not be whole blocks."""
    column = (block * 32)[None, :, None] + tl.arange(0, 16)[None, None, :]  # [1, B, 16]
    at = row[:, None, None] * K + column
    ok = row_ok[:, None, None]
    low = tl.load(w.codes + at, mask=ok & (column < K), other=0)
    high = tl.load(w.codes + at + 16, mask=ok & (column + 16 < K), other=0)
    if FORMAT == "BF16":
        low = (low.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        high = (high.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def load(w, n, first, N, start, K: tl.constexpr, R: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    return load_codes(w.codes, n, start, K, W), 0, 0, 0


@triton.jit
def products(FORMAT: tl.constexpr, q, upper, scales, tops, x, R: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    """[R, W], a product a column."""
    if FORMAT == "BF16":
        y = (q.to(tl.int32) << 16).to(tl.float32, bitcast=True) * x[0]
    else:
        y = q.to(tl.float32) * x[0]
    return y


def _format(type: GGMLType, dtype: torch.dtype, dots: bool) -> BlockFormat:
    def split(raw: torch.Tensor) -> Split:
        return raw.reshape(len(raw), -1).view(dtype), None, None, None

    how = Dots(load, products, 1, (None, None, None, None)) if dots else None
    return BlockFormat(type, split, decode, Plane(dtype, 1, 1), dots=how)


F32 = _format(GGMLType.F32, torch.float32, dots=False)
F16 = _format(GGMLType.F16, torch.float16, dots=True)
BF16 = _format(GGMLType.BF16, torch.int16, dots=True)
