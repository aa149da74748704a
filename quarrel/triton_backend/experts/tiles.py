"""Exact tiles: products with the chosen experts whose bits do not depend on how many pairs there are.

A tile of `expert_tiles` is what `linear_tiles` is for one matrix: BN rows of the expert, BT of its pairs, all of K.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quarrel.triton_backend.attention.decode import find
from quarrel.triton_backend.elementwise.activation import activate, oai
from quarrel.triton_backend.experts.maps import ExpertMaps, Grouping, Serves
from quarrel.triton_backend.formats.exact import decode_blocks
from quarrel.triton_backend.linear.tiles import TL_TYPES, Tile
from quarrel.triton_backend.runtime.arrays import Slot
from quarrel.triton_backend.runtime.launch import cdiv
from quarrel.triton_backend.runtime.site import Site

# One tile for any number of tokens, so a row's sum cannot depend on how many there are: rows 32 and 64 tall go to different
# matrix units of an H200 and differ in the last bit. Tiles of 32 or 64 tokens at 8 warps were slower there for 1, 8 and 512
# tokens (64 experts of 1024 x 2048 in Q4_K, 4 used, 512 tokens: 0.50 ms up, against 0.65 and 0.70).
TILES = {"float32": Tile(32, 16, 2, 8, 1), "float16": Tile(64, 16, 4, 4, 2), "bfloat16": Tile(64, 16, 4, 4, 2)}


@triton.jit
def expert_tiles(
    y, x, w, up, a_bias, b_bias, order, starts, N, K,
    FORMAT: tl.constexpr, EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr,
    BIAS: tl.constexpr, COMPUTE: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, NB: tl.constexpr,
):  # fmt: skip
    # A is the gate (or the only matrix), B the up matrix beside it. PER_TOKEN pairs share a row of x.
    item = tl.program_id(1)
    expert = find(starts, item * 0 + EXPERTS, item, BT)
    begin = tl.load(starts + expert)
    count = tl.load(starts + expert + 1) - begin
    tile = item - (begin // BT + expert)
    if tile * BT >= count:
        return
    lane = tile * BT + tl.arange(0, BT)
    lane_ok = lane < count
    pair = tl.load(order + begin + lane, mask=lane_ok, other=0).to(tl.int64)
    row = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    row_ok = row < N
    stacked = expert.to(tl.int64) * N + row
    part = tl.arange(0, NB * 16)
    within = part // 16 * 32 + part % 16
    p_x = x + (pair // PER_TOKEN)[None, :] * K + within[:, None]
    acc = tl.zeros([BN, BT], tl.float32)
    acc_b = tl.zeros([BN, BT], tl.float32)
    for start in range(0, K, NB * 32):
        block = start // 32 + tl.arange(0, NB)
        column = start + within
        x_low = tl.load(p_x + start, mask=lane_ok[None, :] & (column < K)[:, None], other=0.0).to(COMPUTE)
        x_high = tl.load(p_x + start + 16, mask=lane_ok[None, :] & (column + 16 < K)[:, None], other=0.0).to(COMPUTE)
        low, high = decode_blocks(FORMAT, w, stacked, block, row_ok, K)
        w_low, w_high = tl.reshape(low, [BN, NB * 16]).to(COMPUTE), tl.reshape(high, [BN, NB * 16]).to(COMPUTE)
        acc = tl.dot(w_low, x_low, acc, input_precision="ieee")
        acc = tl.dot(w_high, x_high, acc, input_precision="ieee")
        if GATED:
            low, high = decode_blocks(FORMAT, up, stacked, block, row_ok, K)
            w_low, w_high = tl.reshape(low, [BN, NB * 16]).to(COMPUTE), tl.reshape(high, [BN, NB * 16]).to(COMPUTE)
            acc_b = tl.dot(w_low, x_low, acc_b, input_precision="ieee")
            acc_b = tl.dot(w_high, x_high, acc_b, input_precision="ieee")
    if BIAS:
        acc += tl.load(a_bias + stacked, mask=row_ok, other=0.0)[:, None]
        if GATED:
            acc_b += tl.load(b_bias + stacked, mask=row_ok, other=0.0)[:, None]
    if KIND == "oai":
        acc = oai(acc, acc_b)
    elif GATED:
        acc = activate(acc, KIND) * acc_b
    elif KIND != "none":
        acc = activate(acc, KIND)
    at = pair[None, :] * N + row[:, None]
    tl.store(y + at, acc.to(y.dtype.element_ty), mask=row_ok[:, None] & lane_ok[None, :])


def declines(site: Site, maps: ExpertMaps) -> str | None:
    """Takes everything."""
    return None


def build(site: Site, maps: ExpertMaps) -> Serves:
    compute, tile, stacks, biases = site.compute, TILES[site.compute], maps.stacks, maps.biases

    def run(y: Slot, x: Slot, group: Grouping, pairs: int, per_token: int) -> None:
        none = y.tensor
        site.launch(
            expert_tiles, (cdiv(maps.n, tile.rows), pairs // tile.tokens + maps.n_experts if pairs else 0),
            y.tensor, x.tensor, stacks[0].planes, stacks[-1].planes,
            biases[0] if biases else none, biases[-1] if biases else none, group.order.tensor, group.starts.tensor, maps.n,
            maps.k, FORMAT=stacks[0].format, EXPERTS=maps.n_experts, PER_TOKEN=per_token, GATED=maps.gated,
            KIND=maps.activation, BIAS=bool(biases), COMPUTE=TL_TYPES[compute],
            BN=tile.rows, BT=tile.tokens, NB=tile.blocks, warps=tile.warps, stages=tile.stages,
        )  # fmt: skip

    return Serves(run)
