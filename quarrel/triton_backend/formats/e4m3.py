"""Rows in E4M3: each is divided by a scale of its own, 448 to its largest value, and rounded.

A step of FP8 is an eighth of the value, so results are some 3 % off per product and less in their sum: asked for only.
A weight is rounded at its first long step, and kept so beside its own format, which steps of few rows read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from quarrel.triton_backend.runtime.arrays import Packed
from quarrel.triton_backend.runtime.launch import INTERPRETED, power_of_two
from quarrel.triton_backend.runtime.site import Site, starts_early

_TILE = 2048


@triton.jit
def to_e4m3(v, s):
    """float32 v / s, at most 448 in size."""
    return tl.clamp(v / s, -448.0, 448.0).to(tl.float8e4nv)


@triton.jit
def scale_of(largest):
    """The scale of a row whose largest size is this."""
    return tl.maximum(largest, 1e-12) * (1.0 / 448.0)


@triton.jit(do_not_specialize=["step"])
def round_rows(out, scale, x, K, step, WHOLE: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr):
    """A program a row: x `[T, K]` to each `step`-th row of E4M3 and of float32 scales. WHOLE: B columns are all of them."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, B)
    to = out + row * step * K
    if WHOLE:
        v = tl.load(x + row * K + column, mask=column < K, other=0.0).to(tl.float32)
        s = scale_of(tl.max(tl.abs(v), 0))
        tl.store(to + column, to_e4m3(v, s), mask=column < K)
    else:
        largest = tl.zeros([B], tl.float32)
        for start in range(0, K, B):
            v = tl.load(x + row * K + start + column, mask=start + column < K, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(v))
        s = scale_of(tl.max(largest, 0))
        for start in range(0, K, B):
            v = tl.load(x + row * K + start + column, mask=start + column < K, other=0.0).to(tl.float32)
            tl.store(to + start + column, to_e4m3(v, s), mask=start + column < K)
    tl.store(scale + row * step, s)


def put(site: Site, codes: torch.Tensor, scale: torch.Tensor, x: torch.Tensor, rows: int, k: int, step: int = 1) -> None:
    """Rounds rows of x to each `step`-th row of codes and scales, flat."""
    block = min(power_of_two(k), 8 * _TILE)
    site.launch(
        round_rows, (rows,), codes, scale, x, k, step, WHOLE=block >= k, B=block, warps=8 if block > _TILE else 4,
        early=starts_early(site),
    )  # fmt: skip


def declines(site: Site, weights: Sequence[Packed]) -> str | None:
    """Why products with these weights are not in E4M3, or None; then there is memory for them."""
    if not site.float8:
        return "compute is not fp8"
    if site.generation != 9 and not INTERPRETED:
        return "needs compute capability 9"
    if site.deterministic:
        return "a step is deterministic"
    for w in weights:
        if w.k % 32 or w.n % 16:
            return f"needs columns in 32s and rows in 16s, got {w.n} rows of {w.k} columns"
    if site.e4m3(weights) is None:
        return "no memory was left for these weights in E4M3"
    return None
