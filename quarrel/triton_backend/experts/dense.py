"""Products with the chosen experts only: pairs of a token and an expert, grouped by expert, tiles of one expert each.

`group_pairs` lists the pairs of every expert in token order, so nothing is added in an order that depends on the batch. A
tile of `expert_tiles` then is what `linear_tiles` is for one matrix: BN rows of the expert, BT of its pairs, all of K. In
16-bit arithmetic `grouped.py` takes its place, unless a row's bits may not depend on how many rows there are. The down
product writes each pair's row and `mix_pairs` adds them in the order of choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

from quarrel.errors import UnsupportedOp
from quarrel.ops.moe import EXPERT_DOWN, EXPERT_UP, ExpertDownSpec, ExpertUpSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.triton_backend.attention.paged import find
from quarrel.triton_backend.elementwise.activation import BLOCK, activate, gated_flat, oai
from quarrel.triton_backend.experts import grouped, ring
from quarrel.triton_backend.formats.exact import decode_blocks
from quarrel.triton_backend.linear.tiles import TL_TYPES, Tile
from quarrel.triton_backend.runtime.arrays import DTYPES, Packed, Slot
from quarrel.triton_backend.runtime.launch import cdiv
from quarrel.triton_backend.runtime.site import Batch, Launch, Site

# One tile for any number of tokens, so a row's sum cannot depend on how many there are: rows 32 and 64 tall go to different
# matrix units of an H200 and differ in the last bit. Tiles of 32 or 64 tokens at 8 warps were slower there for 1, 8 and 512
# tokens (64 experts of 1024 x 2048 in Q4_K, 4 used, 512 tokens: 0.50 ms up, against 0.65 and 0.70).
TILES = {"float32": Tile(32, 16, 2, 8, 1), "float16": Tile(64, 16, 4, 4, 2), "bfloat16": Tile(64, 16, 4, 4, 2)}
_SCAN = 1024
_COLUMNS = 512
ACTIVATIONS = ("silu", "relu2", "oai")


@triton.jit(do_not_specialize=["pairs"])
def group_pairs(order, starts, ids, pairs, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """starts [EXPERTS + 1]: where each expert's pairs begin in order [pairs]. A program an expert, in token order."""
    expert = tl.program_id(0)
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, pairs, BLOCK):
        i = start + tl.arange(0, BLOCK)
        chosen = tl.load(ids + i, mask=i < pairs, other=EXPERTS)
        before += (chosen < expert).to(tl.int32)
    at = tl.sum(before, 0)
    tl.store(starts + expert, at)
    for start in range(0, pairs, BLOCK):
        i = start + tl.arange(0, BLOCK)
        mine = (tl.load(ids + i, mask=i < pairs, other=EXPERTS) == expert).to(tl.int32)
        tl.store(order + at + tl.cumsum(mine, 0) - 1, i, mask=mine == 1)
        at += tl.sum(mine, 0)
    if expert == EXPERTS - 1:
        tl.store(starts + EXPERTS, pairs)


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


@triton.jit
def mix_pairs(out, rows, weights, N, USED: tl.constexpr, C: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * C + tl.arange(0, C)
    ok = column < N
    total = tl.zeros([C], tl.float32)
    for j in range(USED):
        weight = tl.load(weights + token * USED + j)
        total += weight * tl.load(rows + (token * USED + j) * N + column, mask=ok, other=0.0)
    tl.store(out + token * N + column, total, mask=ok)


def _grouping(site: Site, ids: Slot, n_experts: int, used: int) -> tuple[Slot, Slot, Launch]:
    """Scratch for the pairs by expert, and the launch that fills it."""
    order = site.scratch("T", used, torch.int32)
    starts = site.scratch("one", n_experts + 1, torch.int32)

    def group(batch: Batch) -> None:
        pairs = batch.T * used
        grid = (n_experts,) if pairs else (0,)
        site.launch(group_pairs, grid, order.tensor, starts.tensor, ids.tensor, pairs, EXPERTS=n_experts, BLOCK=_SCAN)

    return order, starts, group


Product = Callable[[Slot, Slot, Slot, Slot, int, int], None]
"""y `[pairs, n]` from rows of x, of which so many pairs share one: y, x, order, starts, pairs, that number."""


def _product(
    site: Site, stacks: Sequence[Packed], biases: Sequence[torch.Tensor], n_experts: int, used: int, kind: str
) -> Product:
    """One matrix of each expert, or a gate and an up matrix of one format."""
    compute, tile = site.compute, TILES[site.compute]
    if grouped.takes(stacks, compute):
        many = grouped.Grouped(site, stacks, biases, n_experts, used, kind)
        if not ring.takes(site, stacks):
            return many
        few = ring.Ring(site, stacks, biases, n_experts, used, kind)

        def by_pairs(y: Slot, x: Slot, order: Slot, starts: Slot, pairs: int, per_token: int) -> None:
            (few if few.serves(pairs) else many)(y, x, order, starts, pairs, per_token)

        return by_pairs
    n, k = stacks[0].n // n_experts, stacks[0].k

    def run(y: Slot, x: Slot, order: Slot, starts: Slot, pairs: int, per_token: int) -> None:
        none = y.tensor
        site.launch(
            expert_tiles, (cdiv(n, tile.rows), pairs // tile.tokens + n_experts if pairs else 0),
            y.tensor, x.tensor, stacks[0].planes, stacks[-1].planes,
            biases[0] if biases else none, biases[-1] if biases else none, order.tensor, starts.tensor, n, k,
            FORMAT=stacks[0].format, EXPERTS=n_experts, PER_TOKEN=per_token, GATED=len(stacks) == 2,
            KIND=kind, BIAS=bool(biases), COMPUTE=TL_TYPES[compute],
            BN=tile.rows, BT=tile.tokens, NB=tile.blocks, warps=tile.warps, stages=tile.stages,
        )  # fmt: skip

    return run


def build_expert_up(site: Site, node: Node) -> Launch:
    """EXPERT_UP: x `[T, k]`, ids `[T, used]`, stacks of matrices, to y `[T, used, n]`."""
    spec: ExpertUpSpec = node.spec
    x, ids, *refs = node.inputs
    source, target = site.slot(x), site.slot(node.outputs[0])  # type: ignore[arg-type]
    count = 1 + spec.gated
    stacks = [site.weight(r) for r in refs[:count]]  # type: ignore[arg-type]
    biases = [site.vector(r) for r in refs[count:]]  # type: ignore[arg-type]
    order, starts, group = _grouping(site, site.slot(ids), spec.n_experts, spec.used)  # type: ignore[arg-type]
    if one_format(stacks):
        together = _product(site, stacks, biases, spec.n_experts, spec.used, spec.activation)

        def run(batch: Batch) -> None:
            group(batch)
            together(target, source, order, starts, batch.T * spec.used, spec.used)

        return run
    if spec.activation == "oai":
        formats = " and up ".join(s.format for s in stacks)
        raise UnsupportedOp("triton", node.op.name, str(spec), [f"this activation needs one format, got gate {formats}"])
    other = site.scratch("T", spec.used * spec.n, DTYPES[site.compute])
    apart = [
        (y, _product(site, [stack], biases[i : i + 1], spec.n_experts, spec.used, "none"))
        for i, (y, stack) in enumerate(zip((other, target), stacks, strict=True))
    ]

    def one_by_one(batch: Batch) -> None:
        group(batch)
        pairs = batch.T * spec.used
        for y, product in apart:
            product(y, source, order, starts, pairs, spec.used)
        size, tensors = pairs * spec.n, (target.tensor, other.tensor, target.tensor)
        site.launch(gated_flat, (cdiv(size, BLOCK),), *tensors, size, KIND=spec.activation, BLOCK=BLOCK)

    return one_by_one


def one_format(stacks: Sequence[Packed]) -> bool:
    """As files have them, but for those that were told a type for each tensor."""
    return len({s.format for s in stacks}) == 1


def build_expert_down(site: Site, node: Node) -> Launch:
    """EXPERT_DOWN: y `[T, used, k]`, ids and weights `[T, used]`, a stack of matrices, to out `[T, n]` float32."""
    spec: ExpertDownSpec = node.spec
    y, ids, weights, down, *rest = node.inputs
    source, shares, target = site.slot(y), site.slot(weights), site.slot(node.outputs[0])  # type: ignore[arg-type]
    stack = site.weight(down)  # type: ignore[arg-type]
    biases = [site.vector(r) for r in rest]  # type: ignore[arg-type]
    order, starts, group = _grouping(site, site.slot(ids), spec.n_experts, spec.used)  # type: ignore[arg-type]
    rows = site.scratch("T", spec.used * spec.n)
    product = _product(site, [stack], biases, spec.n_experts, spec.used, "none")

    def run(batch: Batch) -> None:
        group(batch)
        product(rows, source, order, starts, batch.T * spec.used, 1)
        site.launch(
            mix_pairs, (batch.T, cdiv(spec.n, _COLUMNS)), target.tensor, rows.tensor, shares.tensor, spec.n,
            USED=spec.used, C=_COLUMNS,
        )  # fmt: skip

    return run


def _accepts(spec: ExpertUpSpec) -> str | None:
    if spec.activation not in ACTIVATIONS or spec.gated != (spec.activation != "relu2"):
        return f"needs gated silu or oai, or plain relu2, got {'gated' if spec.gated else 'plain'} {spec.activation}"
    return None


IMPLEMENTATIONS = (
    Implementation(EXPERT_UP, "grouped tiles", build_expert_up, _accepts),
    Implementation(EXPERT_DOWN, "grouped tiles, then added in order", build_expert_down),
)
