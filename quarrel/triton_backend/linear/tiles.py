"""The exact tiles of linear maps, for any weight, arithmetic and number of rows: y[t, n] = sum_k x[t, k] W[n, k].

The rows of W are the tall side of every product, rows of x the other: a program owns BN outputs of BT rows and walks all of
K in blocks of 32 columns, decoding to float32, rounding once to the compute type and accumulating in float32. The number of
rows picks only how wide a tile is, never the order of a row's sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quarrel.ops.contract import Compute
from quarrel.triton_backend.elementwise import activation as elementwise
from quarrel.triton_backend.formats.exact import decode_blocks
from quarrel.triton_backend.linear.maps import UNLIMITED, Maps, Serves
from quarrel.triton_backend.linear.matmul import TL_TYPES
from quarrel.triton_backend.runtime.arrays import DTYPES, Packed, Slot
from quarrel.triton_backend.runtime.launch import cdiv
from quarrel.triton_backend.runtime.site import Batch, Launch, Site, starts_early


@dataclass(frozen=True)
class Tile:
    """`rows` of W by `tokens`, `blocks` of 32 columns at a time. Only `tokens` may differ between a shape's tiles."""

    rows: int
    tokens: int
    blocks: int
    warps: int
    stages: int


# SMALL serves up to 16 tokens, the narrowest that the matrix units take. LARGE with 8 warps and 2 stages was slower on an
# H200 (14336 x 4096 in Q4_K: 135 against 94 us at 64 tokens, 897 against 519 us at 512).
SMALL = {"float32": Tile(64, 16, 4, 8, 2), "float16": Tile(64, 16, 4, 4, 3), "bfloat16": Tile(64, 16, 4, 4, 3)}
LARGE = {"float32": Tile(64, 32, 4, 8, 2), "float16": Tile(64, 64, 4, 4, 3), "bfloat16": Tile(64, 64, 4, 4, 3)}


@triton.jit(do_not_specialize=["tokens"])
def linear_tiles(
    y, x, w, bias, residual, tokens, alpha, N, K,
    FORMAT: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, COMPUTE: tl.constexpr,
    BN: tl.constexpr, BT: tl.constexpr, NB: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    token = (tl.program_id(1) * BT + tl.arange(0, BT)).to(tl.int64)
    row_ok, token_ok = row < N, token < tokens
    part = tl.arange(0, NB * 16)
    within = part // 16 * 32 + part % 16  # columns of the low tile
    p_x = x + token[None, :] * K + within[:, None]
    acc = tl.zeros([BN, BT], tl.float32)
    for start in range(0, K, NB * 32):
        block = start // 32 + tl.arange(0, NB)
        low, high = decode_blocks(FORMAT, w, row, block, row_ok, K)  # [BN, NB, 16]
        column = start + within
        x_low = tl.load(p_x + start, mask=token_ok[None, :] & (column < K)[:, None], other=0.0)
        x_high = tl.load(p_x + start + 16, mask=token_ok[None, :] & (column + 16 < K)[:, None], other=0.0)
        w_low, w_high = tl.reshape(low, [BN, NB * 16]).to(COMPUTE), tl.reshape(high, [BN, NB * 16]).to(COMPUTE)
        acc = tl.dot(w_low, x_low.to(COMPUTE), acc, input_precision="ieee")
        acc = tl.dot(w_high, x_high.to(COMPUTE), acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + row, mask=row_ok, other=0.0)[:, None]
    at = token[None, :] * N + row[:, None]
    ok = row_ok[:, None] & token_ok[None, :]
    if ADD:
        acc = tl.load(residual + at, mask=ok, other=0.0).to(tl.float32) + alpha * acc
    tl.store(y + at, acc.to(y.dtype.element_ty), mask=ok)


def tile_for(compute: Compute, tokens: int) -> Tile:
    """The tile that a step of so many tokens uses."""
    return (SMALL if tokens <= SMALL[compute].tokens else LARGE)[compute]


def declines(site: Site, maps: Maps) -> str | None:
    """Never: any weight, any number of rows."""
    return None


def build(site: Site, maps: Maps) -> Serves:
    """One map after the other, then the activation of gate and up."""
    ys = targets(site, maps)
    parts = [_one(site, maps, y, w, b) for y, w, b in zip(ys, maps.weights, maps.biases, strict=True)]
    return Serves(chain([*parts, *activation(site, maps, ys)]), 0, UNLIMITED)


def targets(site: Site, maps: Maps) -> Sequence[Slot]:
    """Where each map goes: of gate and up, the gate into scratch."""
    if not maps.gated:
        return maps.ys
    return site.scratch(maps.axis, maps.weights[0].n, DTYPES[site.compute]), maps.ys[0]


def activation(site: Site, maps: Maps, ys: Sequence[Slot]) -> list[Launch]:
    """The launch that gate and up leave to be done, when each is computed by itself."""
    if not maps.gated:
        return []
    gate, y = ys

    def run(batch: Batch) -> None:
        size = batch.count(maps.axis) * maps.weights[0].n
        grid, block = (cdiv(size, elementwise.BLOCK),), elementwise.BLOCK
        site.launch(
            elementwise.gated_flat, grid, y.tensor, gate.tensor, y.tensor, size, KIND=maps.activation, SHARE=1, BLOCK=block,
            early=starts_early(site),
        )  # fmt: skip

    return [run]


def chain(launches: Sequence[Launch]) -> Launch:
    def run(batch: Batch) -> None:
        for go in launches:
            go(batch)

    return run


def _one(site: Site, maps: Maps, y: Slot, weight: Packed, bias: torch.Tensor | None) -> Launch:
    compute, x, residual = site.compute, maps.x, maps.residual

    def run(batch: Batch) -> None:
        count = batch.count(maps.axis)
        tile = tile_for(compute, count)
        site.launch(
            linear_tiles, (cdiv(weight.n, tile.rows), cdiv(count, tile.tokens)),
            y.tensor, x.tensor, weight.planes, y.tensor if bias is None else bias,
            y.tensor if residual is None else residual.tensor, count, maps.alpha, weight.n, weight.k,
            FORMAT=weight.format, BIAS=bias is not None, ADD=residual is not None, COMPUTE=TL_TYPES[compute],
            BN=tile.rows, BT=tile.tokens, NB=tile.blocks, warps=tile.warps, stages=tile.stages,
        )  # fmt: skip

    return run
