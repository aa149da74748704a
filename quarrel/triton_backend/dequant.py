"""Linear maps of many tokens: the weight is decoded once into 16-bit scratch, and a library's matrix product reads that.

Decoding is bound by the bus: 0.58 bytes read and 2 written for a weight of Q4_K. A weight larger than PIECE is done in row
pieces, so scratch stays small. Weights that are held in the compute type are used where they lie.
Where the step says `float8`, both sides of the product are rounded to E4M3 first (`float8.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from quarrel.triton_backend import float8
from quarrel.triton_backend.half import high_offset, is_fast, low_columns, tile_halves
from quarrel.triton_backend.matmul import TL_TYPES
from quarrel.triton_backend.pack import Packed
from quarrel.triton_backend.runtime import DTYPES, Launch, Live, Site, Slot, cdiv

PIECE = 64 << 20
"""Values that are decoded at once: 128 MiB of scratch."""
_TILE = 256  # blocks a program


@triton.jit
def decode_rows(
    out, codes, bits, scale, top, begin, end, K: tl.constexpr, FORMAT: tl.constexpr, FAST: tl.constexpr,
    COMPUTE: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    # Rows begin to end of the weight, to out from its first row on.
    row = begin + tl.program_id(0) * R + tl.arange(0, R)
    first = tl.program_id(1) * B
    near = tl.minimum(row, end - 1).to(tl.int64)
    low, high = tile_halves(FORMAT, FAST, COMPUTE, codes, bits, scale, top, near, first, K, R, B)
    at = (row - begin).to(tl.int64)[:, None] * K + first * 32 + low_columns(FORMAT, FAST, B)[None, :]  # [R, B * 16]
    ok = (row < end)[:, None]
    tl.store(out + at, low.to(out.dtype.element_ty), mask=ok)
    tl.store(out + at + high_offset(FORMAT, FAST, B), high.to(out.dtype.element_ty), mask=ok)


def plain(weight: Packed, compute: str) -> torch.Tensor | None:
    """The weight as a matrix `[n, k]` of the compute type, if it is held so."""
    if weight.format == {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}[compute]:
        return weight.planes[0].view(DTYPES[compute]).view(weight.n, weight.k)  # type: ignore[index]
    return None


def decode(site: Site, weight: Packed, begin: int, end: int, out: torch.Tensor) -> None:
    """Rows begin to end to `out`, flat."""
    blocks = weight.k // 32
    wide = next(w for w in (128, 64, 32, 16, 8, 4, 2, 1) if blocks % w == 0)
    rows = _TILE // wide
    site.launch(
        decode_rows, (cdiv(end - begin, rows), blocks // wide), out, *weight.planes, begin, end, K=weight.k,
        FORMAT=weight.format, FAST=is_fast(weight.format, site.compute, wide), COMPUTE=TL_TYPES[site.compute],
        R=rows, B=wide, warps=4, stages=1,
    )  # fmt: skip


def _rows_at_once(weight: Packed) -> int:
    return max(1, min(weight.n, PIECE // weight.k))


def room(site: Site, weights: Sequence[Packed]) -> Slot:
    """Scratch that these weights are decoded into, one after the other."""
    sizes = [1 if plain(w, site.compute) is not None else _rows_at_once(w) * w.k for w in weights]
    return site.scratch("one", max(sizes), DTYPES[site.compute])


def linear(
    site: Site, x: Slot, y: Slot, weight: Packed, bias: torch.Tensor | None, residual: Slot | None, alpha: float, axis: str,
    scratch: Slot,
) -> Launch:  # fmt: skip
    """y = W x + bias, or residual + alpha * that, for any number of tokens of `axis`; `scratch` is from `room`."""
    compute, n, k = site.compute, weight.n, weight.k
    whole = plain(weight, compute)
    rows = n if whole is not None else _rows_at_once(weight)
    rounded = None if bias is None else bias.to(DTYPES[compute])
    eight = site.float8 and float8.takes(weight)

    def run(live: Live) -> None:
        count = live.count(axis)
        if count == 0:
            return
        if x.tensor.device.type == "meta":  # kernels are being listed; the library's are not ours
            if whole is None:
                decode(site, weight, 0, rows, scratch.tensor)
            return
        # Hidden states that are wanted as they are come in float32; `matmul.py` rounds them too.
        x_rows = x.tensor[: count * k].view(count, k).to(DTYPES[compute])
        out = y.tensor[: count * n].view(count, n)
        before = None if residual is None else residual.tensor[: count * n].view(count, n)
        x8 = float8.rounded(x_rows, site.launch) if eight else None
        for begin in range(0, n, rows):
            end = min(begin + rows, n)
            if whole is None:
                decode(site, weight, begin, end, scratch.tensor)
                part = scratch.tensor[: (end - begin) * k].view(end - begin, k)
            else:
                part = whole
            here = slice(begin, end)
            if x8 is not None:
                sums = float8.product(*x8, *float8.rounded(part, site.launch))
                sums = sums if bias is None else sums + bias[here]
                out[:, here] = sums if before is None else before[:, here] + alpha * sums
                continue
            _product(
                x_rows, part.T, out[:, here], None if before is None else before[:, here],
                None if bias is None else bias[here], None if rounded is None else rounded[here], alpha,
            )  # fmt: skip

    return run


def _product(
    x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, before: torch.Tensor | None, bias: torch.Tensor | None,
    rounded: torch.Tensor | None, alpha: float,
) -> None:  # fmt: skip
    """Sums in float32, rounded once to `out`."""
    if x.device.type == "cpu":  # the interpreter's device, whose products of 16-bit types round too often
        sums = x.float() @ w.float()
        sums = sums if bias is None else sums + bias
        out.copy_(sums if before is None else before + alpha * sums)
    elif before is not None:
        torch.addmm(before, x, w, out_dtype=torch.float32, alpha=alpha, out=out)
        if bias is not None:
            out.add_(bias, alpha=alpha)
    elif out.dtype == torch.float32:
        torch.mm(x, w, out_dtype=torch.float32, out=out)
        if bias is not None:
            out.add_(bias)
    elif rounded is not None:
        torch.addmm(rounded, x, w, out=out)
    else:
        torch.mm(x, w, out=out)
