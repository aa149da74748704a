"""Products with the chosen experts on the matrix units: tiles of one expert each over pairs of a token and an expert.

`group_pairs` has listed each expert's pairs in token order; a tile takes BT of them and BN of the expert's rows, and walks
all of K. All pair tiles of one row tile run side by side, so weights come from memory once. Few pairs decode the weights in
registers; with many, a stack is first decoded to 16-bit scratch, some experts at a time, as `dequant.py` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import triton
import triton.language as tl

from quarrel.triton_backend.attention.decode import find
from quarrel.triton_backend.elementwise.activation import activate, oai
from quarrel.triton_backend.experts import decoded
from quarrel.triton_backend.experts.maps import ExpertMaps, Grouping, Serves
from quarrel.triton_backend.formats.float16 import is_fast
from quarrel.triton_backend.linear.dequant_matmul import decoder
from quarrel.triton_backend.linear.maps import UNLIMITED
from quarrel.triton_backend.linear.matmul import TL_TYPES, walk
from quarrel.triton_backend.runtime.arrays import DTYPES, Planes, Slot
from quarrel.triton_backend.runtime.launch import cdiv
from quarrel.triton_backend.runtime.site import Site

PIECE = 128 << 20
"""Values of a stack that are decoded at once, gate and up together: 256 MiB of scratch."""
DECODE_FROM = 96
"""Pairs an expert, on average, from which decoding first pays."""


@dataclass(frozen=True)
class Tile:
    """`rows` of an expert by `pairs`, `blocks` of 32 columns to a step."""

    rows: int
    pairs: int
    blocks: int
    warps: int
    stages: int


def tile_for(k: int, each: int, decoded: bool, hopper: bool) -> Tile:
    """By the row's length and how many pairs an expert has on average; `hopper` for devices of capability 9."""
    blocks = k // 32
    if decoded:
        step = 2 if blocks % 2 == 0 else 1
        return Tile(128, 128, step, 8, 3) if hopper else Tile(64, 64, step, 4, 3)
    step = next(s for s in (4, 2, 1) if blocks % s == 0)
    return Tile(64, 16 if each <= 16 else 32 if each <= 32 or not hopper else 64, step, 4, 3 if hopper else 2)


@triton.jit
def grouped_tiles(
    y, x, w, up, a_bias, b_bias, order, starts, first_expert,
    experts, N, K: tl.constexpr,
    FORMAT: tl.constexpr, FAST: tl.constexpr, EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr, GATED: tl.constexpr,
    KIND: tl.constexpr, BIAS: tl.constexpr, COMPUTE: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, NB: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # A is the gate (or the only matrix), B the up matrix beside it; their first row is that of first_expert.
    row_tiles = tl.cdiv(N, BN)
    base = tl.load(starts + first_expert) // BT + first_expert
    place = base * row_tiles + tl.program_id(0)
    expert = find(starts, place * 0 + EXPERTS, place // row_tiles, BT)
    if expert >= first_expert + experts:
        return
    begin = tl.load(starts + expert)
    end = tl.load(starts + expert + 1)
    tile0 = begin // BT + expert
    tiles = end // BT + expert + 1 - tile0
    place -= tile0 * row_tiles
    lane = place % tiles * BT + tl.arange(0, BT)
    if place % tiles * BT >= end - begin:
        return
    row = (place // tiles * BN + tl.arange(0, BN)).to(tl.int64)
    lane_ok = lane < end - begin
    pair = tl.load(order + tl.minimum(begin + lane, end - 1)).to(tl.int64)
    near = tl.minimum(row, N - 1)
    acc, acc_b = walk(
        FORMAT, FAST, COMPUTE, GATED, w, up,
        (expert - first_expert).to(tl.int64) * N + near, x + (pair // PER_TOKEN) * K, lane_ok, 0, K, K, BN, BT, NB, STAGES,
        False,
    )  # fmt: skip
    if BIAS:
        stacked = expert.to(tl.int64) * N + near
        acc += tl.load(a_bias + stacked)[:, None]
        if GATED:
            acc_b += tl.load(b_bias + stacked)[:, None]
    if KIND == "oai":
        acc = oai(acc, acc_b)
    elif GATED:
        acc = activate(acc, KIND) * acc_b
    elif KIND != "none":
        acc = activate(acc, KIND)
    at = pair[None, :] * N + row[:, None]
    tl.store(y + at, acc.to(y.dtype.element_ty), mask=(row < N)[:, None] & lane_ok[None, :])


class Grouped:
    """How to multiply with stacks of matrices."""

    def __init__(self, site: Site, maps: ExpertMaps, decodes: bool) -> None:
        """Many pairs decode stacks to scratch if `decodes`; else others serve them."""
        self._site, self._stacks, self._biases, self._maps = site, maps.stacks, maps.biases, maps
        self._experts, self._n, self._k, self._decodes = maps.n_experts, maps.n, maps.k, decodes
        each = self._n * self._k * len(maps.stacks)
        self._at_once = max(1, min(maps.n_experts, PIECE // each))
        self._floats = maps.stacks[0].format == {"float16": "F16", "bfloat16": "BF16"}[site.compute]
        width = 1 if self._floats or not decodes else self._at_once * self._n * self._k
        self._scratch = [site.scratch("one", width, DTYPES[site.compute]) for _ in maps.stacks]
        self._decoders = [decoder(site, stack) for stack in maps.stacks]

    def __call__(self, y: Slot, x: Slot, group: Grouping, pairs: int, per_token: int) -> None:
        """y `[pairs, n]` from rows of x, of which `per_token` pairs share one."""
        each = pairs // self._experts
        # Decoded stacks have other tiles, whose sums run in another order.
        if not self._floats and (each < DECODE_FROM or self._site.deterministic or not self._decodes):
            tile = tile_for(self._k, each, False, self._site.generation == 9)
            stacks = [s.planes for s in self._stacks]
            self._launch(y, x, group, pairs, per_token, 0, self._experts, self._stacks[0].format, stacks, tile)
            return
        tile = tile_for(self._k, each, True, self._site.generation == 9)
        format = {"float16": "F16", "bfloat16": "BF16"}[self._site.compute]
        if self._floats:
            stacks = [s.planes for s in self._stacks]
            self._launch(y, x, group, pairs, per_token, 0, self._experts, format, stacks, tile)
            return
        for first in range(0, self._experts, self._at_once):
            count = min(self._at_once, self._experts - first)
            for decode, scratch in zip(self._decoders, self._scratch, strict=True):
                decode(first * self._n, (first + count) * self._n, scratch.tensor)
            stacks = [Planes(s.tensor, s.tensor, s.tensor, s.tensor) for s in self._scratch]
            self._launch(y, x, group, pairs, per_token, first, count, format, stacks, tile)

    def _launch(
        self, y: Slot, x: Slot, group: Grouping, pairs: int, per_token: int, first: int, count: int,
        format: str, stacks: Sequence[Planes], tile: Tile,
    ) -> None:  # fmt: skip
        site, none = self._site, y.tensor
        site.launch(
            grouped_tiles, ((pairs // tile.pairs + count + 1) * cdiv(self._n, tile.rows) if pairs else 0,),
            y.tensor, x.tensor, stacks[0], stacks[-1], self._biases[0] if self._biases else none,
            self._biases[-1] if self._biases else none, group.order.tensor, group.starts.tensor, first, count, self._n,
            K=self._k, FORMAT=format, FAST=is_fast(format, site.compute, tile.blocks), EXPERTS=self._experts,
            PER_TOKEN=per_token, GATED=self._maps.gated, KIND=self._maps.activation, BIAS=bool(self._biases),
            COMPUTE=TL_TYPES[site.compute], BN=tile.rows,
            BT=tile.pairs, NB=tile.blocks, STAGES=tile.stages, warps=tile.warps, stages=tile.stages,
        )  # fmt: skip


def declines(site: Site, maps: ExpertMaps) -> str | None:
    """Why these kernels do not multiply with the stacks, or None."""
    if site.compute == "float32":
        return "needs 16-bit arithmetic, got float32"
    if any(s.format == "F32" for s in maps.stacks):
        return "needs weights in a format of at most 16 bits, got F32"
    if maps.k % 32:
        return f"needs rows of whole blocks of 32 columns, got {maps.k} columns"
    return None


def build(site: Site, maps: ExpertMaps) -> Serves:
    if maps.most is not None:
        return Serves(Grouped(site, maps, False), maps.most)
    decodes = decoded.declines(site, maps) is not None
    return Serves(Grouped(site, maps, decodes), UNLIMITED if decodes else DECODE_FROM * maps.n_experts - 1)
