"""Products in E4M3: rows of both matrices are divided by a scale of their own, 448 to the largest value, and rounded.

    y[t, n] = (sum_k x8[t, k] w8[n, k]) * sx[t] * sw[n]      summed in float32 by the matrix units

A step of FP8 is an eighth of the value, so results are some 3 % off per product and less in their sum: asked for only.
A weight is rounded at its first long step, and kept so beside its own format, which steps of few rows read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quarrel.triton_backend.runtime.arrays import E4M3, Packed
from quarrel.triton_backend.runtime.launch import Launcher, cdiv, power_of_two

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


@triton.jit
def finish_rows(y, sums, residual, bias, alpha, N, BIAS: tl.constexpr, ADD: tl.constexpr, B: tl.constexpr):
    """A program a piece of a row: y = sums + bias, or residual + alpha * that."""
    column = tl.program_id(1) * B + tl.arange(0, B)
    ok = column < N
    at = tl.program_id(0).to(tl.int64) * N + column
    v = tl.load(sums + at, mask=ok, other=0.0).to(tl.float32)
    if BIAS:
        v += tl.load(bias + column, mask=ok, other=0.0)
    if ADD:
        v = tl.load(residual + at, mask=ok, other=0.0).to(tl.float32) + alpha * v
    tl.store(y + at, v.to(y.dtype.element_ty), mask=ok)


def put(to: E4M3, x: torch.Tensor, launch: Launcher, begin: int = 0) -> None:
    """Rounds rows of x to rows `begin` and on."""
    rows, k = x.shape
    block = min(power_of_two(k), 8 * _TILE)
    codes, scale = to.codes[begin : begin + rows], to.scale[begin : begin + rows]
    launch(round_rows, (rows,), codes, scale, x, k, WHOLE=block >= k, B=block, warps=8 if block > _TILE else 4)


def rounded(x: torch.Tensor, launch: Launcher) -> E4M3:
    """The rows of x."""
    made = E4M3(*x.shape, x.device)
    put(made, x, launch)
    return made


def takes(weight: Packed) -> bool:
    """Formats with as much precision as E4M3, or more, and shapes that the library multiplies."""
    return weight.format in FORMATS and weight.n % 16 == 0 and weight.k % 16 == 0


def product(x: E4M3, w: E4M3) -> torch.Tensor:
    """`x w^T`, bfloat16 `[T, N]`; N and K in sixteens."""
    if x.codes.device.type == "cpu":  # the interpreter's
        return ((x.codes.float() @ w.codes.float().t()) * x.scale * w.scale.t()).to(torch.bfloat16)
    how = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    y: torch.Tensor = torch._scaled_mm(x.codes, w.codes.t(), scale_a=x.scale, scale_b=w.scale.t(), **how)
    return y


def finish(
    y: torch.Tensor, sums: torch.Tensor, residual: torch.Tensor | None, bias: torch.Tensor | None, alpha: float,
    launch: Launcher,
) -> None:  # fmt: skip
    """y `[T, N]` = sums + bias, or residual + alpha * that."""
    rows, n = sums.shape
    block = min(power_of_two(n), _TILE)
    launch(
        finish_rows, (rows, cdiv(n, block)), y, sums, y if residual is None else residual, y if bias is None else bias,
        alpha, n, BIAS=bias is not None, ADD=residual is not None, B=block,
    )  # fmt: skip
