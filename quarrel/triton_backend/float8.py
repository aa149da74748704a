"""Products in E4M3: rows of both matrices are divided by a scale of their own, 448 to the largest value, and rounded.

    y[t, n] = (sum_k x8[t, k] w8[n, k]) * sx[t] * sw[n]      summed in float32 by the matrix units

A step of FP8 is an eighth of the value, so results are some 3 % off per product and less in their sum: asked for only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quarrel.triton_backend.pack import Packed
from quarrel.triton_backend.runtime import Launcher, power_of_two

FORMATS = ("F16", "BF16", "Q8_0")
_TILE = 2048


@triton.jit
def round_rows(out, scale, x, K, WHOLE: tl.constexpr, B: tl.constexpr):
    """A program a row: x `[T, K]` to E4M3 and float32 scales `[T]`. WHOLE: B columns are all of them."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, B)
    if WHOLE:
        v = tl.load(x + row * K + column, mask=column < K, other=0.0).to(tl.float32)
        s = tl.maximum(tl.max(tl.abs(v), 0), 1e-12) * (1.0 / 448.0)
        tl.store(out + row * K + column, (v / s).to(tl.float8e4nv), mask=column < K)
    else:
        largest = tl.zeros([B], tl.float32)
        for start in range(0, K, B):
            v = tl.load(x + row * K + start + column, mask=start + column < K, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(v))
        s = tl.maximum(tl.max(largest, 0), 1e-12) * (1.0 / 448.0)
        for start in range(0, K, B):
            v = tl.load(x + row * K + start + column, mask=start + column < K, other=0.0).to(tl.float32)
            tl.store(out + row * K + start + column, (v / s).to(tl.float8e4nv), mask=start + column < K)
    tl.store(scale + row, s)


def rounded(x: torch.Tensor, launch: Launcher) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 `[T, K]` and scales `[T, 1]` of the rows of x."""
    rows, k = x.shape
    out = torch.empty((rows, k), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    block = min(power_of_two(k), 8 * _TILE)
    launch(round_rows, (rows,), out, scale, x, k, WHOLE=block >= k, B=block, warps=8 if block > _TILE else 4)
    return out, scale


def takes(weight: Packed) -> bool:
    """Formats with as much precision as E4M3, or more, and shapes that the library multiplies."""
    return weight.format in FORMATS and weight.n % 16 == 0 and weight.k % 16 == 0


def product(x: torch.Tensor, sx: torch.Tensor, w: torch.Tensor, sw: torch.Tensor) -> torch.Tensor:
    """`x w^T`, bfloat16 `[T, N]`; x `[T, K]` and w `[N, K]` with scales `[T, 1]` and `[N, 1]`; N and K in sixteens."""
    if x.device.type == "cpu":  # the interpreter's
        return ((x.float() @ w.float().t()) * sx * sw.t()).to(torch.bfloat16)
    y: torch.Tensor = torch._scaled_mm(x, w.t(), scale_a=sx, scale_b=sw.t(), out_dtype=torch.bfloat16, use_fast_accum=True)
    return y
