"""Linear maps of many tokens: the weight is decoded once into 16-bit scratch, and a library's matrix product reads that.

Decoding is bound by the bus: 0.58 bytes read and 2 written for a weight of Q4_K. A weight larger than PIECE is done in row
pieces, so scratch stays small. Weights that are held in the compute type are used where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import triton
import triton.language as tl

from quarrel.triton_backend.formats import e4m3
from quarrel.triton_backend.formats.float16 import decode_tile, high_offset, is_fast, low_columns
from quarrel.triton_backend.linear.maps import UNLIMITED, Maps, Serves
from quarrel.triton_backend.linear.matmul import MOST, TL_TYPES, declines_weights
from quarrel.triton_backend.linear.tiles import activation, chain, targets
from quarrel.triton_backend.runtime.arrays import DTYPES, Packed, Slot
from quarrel.triton_backend.runtime.launch import cdiv
from quarrel.triton_backend.runtime.site import Batch, Launch, Site

PIECE = 64 << 20
"""Values that are decoded at once: 128 MiB of scratch."""
_TILE = 256  # blocks a program
Decode = Callable[[int, int, torch.Tensor], None]


@triton.jit
def decode_rows(
    out, w, begin, end, K: tl.constexpr, FORMAT: tl.constexpr, FAST: tl.constexpr,
    COMPUTE: tl.constexpr, STEP: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Rows begin to end of the weight w (Planes, [.., K]) to each STEP-th row of out. Grid (rows / R, K / 32 / B)."""
    row = begin + tl.program_id(0) * R + tl.arange(0, R)
    # The last tile overlaps the one before it where B does not divide the blocks.
    first = tl.minimum(tl.program_id(1) * B, K // 32 - B)
    near = tl.minimum(row, end - 1).to(tl.int64)
    low, high = decode_tile(FORMAT, FAST, COMPUTE, w, near, first, K, R, B)
    at = (
        (row - begin).to(tl.int64)[:, None] * (STEP * K) + first * 32 + low_columns(FORMAT, FAST, B)[None, :]
    )  # [R, B * 16]
    ok = (row < end)[:, None]
    tl.store(out + at, low.to(out.dtype.element_ty), mask=ok)
    tl.store(out + at + high_offset(FORMAT, FAST, B), high.to(out.dtype.element_ty), mask=ok)


def plain(weight: Packed, compute: str) -> torch.Tensor | None:
    """The weight as a matrix `[n, k]` of the compute type, if it is held so."""
    if weight.format == {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}[compute]:
        return weight.planes[0].view(DTYPES[compute]).view(weight.n, weight.k)  # type: ignore[index]
    return None


def decoder(site: Site, weight: Packed, step: int = 1) -> Decode:
    """Decodes rows begin to end of the weight to a flat array, each to the `step`-th row after the one before it."""
    blocks = weight.k // 32
    # Long pieces of rows, of which little is decoded twice.
    wide = next(w for w in (128, 64, 32, 16, 8, 4, 2, 1) if w <= blocks and 6 * (-blocks % w) <= blocks)
    rows = _TILE // wide
    fast = is_fast(weight.format, site.compute, wide)

    def run(begin: int, end: int, out: torch.Tensor) -> None:
        site.launch(
            decode_rows, (cdiv(end - begin, rows), cdiv(blocks, wide)), out, weight.planes, begin, end, K=weight.k,
            FORMAT=weight.format, FAST=fast, COMPUTE=TL_TYPES[site.compute], STEP=step, R=rows,
            B=wide, warps=4, stages=1,
        )  # fmt: skip

    return run


def _rows_at_once(weight: Packed) -> int:
    return max(1, min(weight.n, PIECE // weight.k))


def room(site: Site, weights: Sequence[Packed]) -> Slot:
    """Scratch that these weights are decoded into, one after the other."""
    sizes = [1 if plain(w, site.compute) is not None else _rows_at_once(w) * w.k for w in weights]
    return site.scratch("one", max(sizes), DTYPES[site.compute])


def declines(site: Site, maps: Maps) -> str | None:
    """Takes weights that `matmul.py` takes, however many maps there are, and those that need no decoding, where a row's
    bits may depend on how many rows there are."""
    if site.deterministic:
        return "a step is deterministic"
    return None if _as_they_lie(site, maps) else declines_weights(site, maps.weights)


def build(site: Site, maps: Maps) -> Serves:
    """One map after the other, for more rows than `matmul.py` reads each weight once for, if it takes them."""
    ys = targets(site, maps)
    products = _products(site, maps, ys, room(site, maps.weights))
    least = 2 if declines_weights(site, maps.weights) else MOST + 1
    return Serves(chain([products, *activation(site, maps, ys)]), least, UNLIMITED)


def _as_they_lie(site: Site, maps: Maps) -> bool:
    return site.compute != "float32" and all(plain(w, site.compute) is not None for w in maps.weights)


def _products(site: Site, maps: Maps, ys: Sequence[Slot], scratch: Slot) -> Launch:
    x, residual, alpha, axis = maps.x, maps.residual, maps.alpha, maps.axis
    compute, k = site.compute, maps.weights[0].k
    # The output layer has few rows even in a prompt; what is kept in E4M3 serves prompts.
    keeps = axis == "T" and e4m3.declines(site, maps.weights) is not None
    parts = [
        _Map(site, y, w, bias, residual, alpha, scratch, keeps)
        for y, w, bias in zip(ys, maps.weights, maps.biases, strict=True)
    ]
    dtype = DTYPES[compute]

    def run(batch: Batch) -> None:
        count = batch.count(axis)
        if count == 0:
            return
        if x.tensor.device.type == "meta":  # kernels are being listed; the library's are not ours
            for part in parts:
                if part.whole is None:
                    part.decode(0, part.rows, scratch.tensor)
            return
        x_rows = x.tensor[: count * k].view(count, k)
        if x_rows.dtype != dtype:
            # Hidden states that are wanted as they are come in float32; `matmul.py` rounds them too.
            x_rows = x_rows.to(dtype)
        for part in parts:
            part(x_rows, count)

    return run


def _no_decoding(begin: int, end: int, out: torch.Tensor) -> None:
    raise AssertionError("a weight in the compute type is used where it lies")


class _Map:
    """One weight, its place and what is added."""

    def __init__(
        self, site: Site, y: Slot, weight: Packed, bias: torch.Tensor | None, residual: Slot | None, alpha: float,
        scratch: Slot, keeps: bool,
    ) -> None:  # fmt: skip
        self.y, self.weight, self.bias = y, weight, bias
        self.residual, self.alpha, self.scratch = residual, alpha, scratch
        self.whole = plain(weight, site.compute)
        self.decode = _no_decoding if self.whole is not None else decoder(site, weight)
        self.kept = site.decoded([weight]) if keeps and self.whole is None else None
        self.rows = weight.n if self.whole is not None else _rows_at_once(weight)
        self.rounded = None if bias is None else bias.to(DTYPES[site.compute])

    def _pieces(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """First row, end, and the rows between, which the next ones overwrite."""
        n, k = self.weight.n, self.weight.k
        if self.kept is not None:
            yield 0, n, self.kept.filled(lambda out: self.decode(0, n, out)).view(n, k)
            return
        for begin in range(0, n, self.rows):
            end = min(begin + self.rows, n)
            if self.whole is None:
                self.decode(begin, end, self.scratch.tensor)
                yield begin, end, self.scratch.tensor[: (end - begin) * k].view(end - begin, k)
            else:
                yield begin, end, self.whole

    def __call__(self, x: torch.Tensor, count: int) -> None:
        given = (*self._places(count), self.bias, self.rounded)
        for begin, end, part in self._pieces():
            # Slices of all there is would cost the host as much as a third of a launch.
            whole = end - begin == self.weight.n
            here = given if whole else tuple(None if t is None else t[..., begin:end] for t in given)
            _product(x, part.T, *here, self.alpha)

    def _places(self, count: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        size, n = count * self.weight.n, self.weight.n
        y = self.y.tensor[:size].view(count, n)
        if self.residual is None:
            return y, None
        # The library copies what it adds to, unless that is the very tensor of the result.
        before = self.residual.tensor[:size].view(count, n)
        return y, y if before.data_ptr() == y.data_ptr() else before


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
