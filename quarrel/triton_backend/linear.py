"""Linear maps over packed weights: y[t, n] = sum_k x[t, k] W[n, k] (+ b[n]), and residual + scale * that.

Which kernel a count of tokens takes: `rows.py` from 2 to 16 or so, `many_rows.py` from 33 to 128 where it can, `matmul.py`
what these leave up to its MOST, `dequant.py` beyond, and the exact tiles here for one token, float32 arithmetic and odd
widths. Where a row's bits may not depend on how many rows there are, `matmul.py` has all.

In the exact tiles the rows of W are the tall side of every product, tokens the other: a program owns BN outputs of BT
tokens and walks all of K in blocks of 32 columns, decoding to float32, rounding once to the compute type and accumulating
in float32. Tokens pick only how wide a tile is, never the order of a row's sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quarrel.ops.contract import Compute, Value, WeightRef
from quarrel.ops.linear import LINEAR, LINEAR_ADD, LinearAddSpec, LinearSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.triton_backend import dequant, elementwise, many_rows, matmul, rows
from quarrel.triton_backend.formats import halves
from quarrel.triton_backend.matmul import TL_TYPES
from quarrel.triton_backend.pack import Packed
from quarrel.triton_backend.runtime import DTYPES, Launch, Live, Site, Slot, cdiv, dims


@dataclass(frozen=True)
class Tile:
    """`rows` of W by `tokens`, `blocks` of 32 columns at a time. Only `tokens` may differ between a shape's tiles."""

    rows: int
    tokens: int
    blocks: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Made:
    """Who makes x: `plain` as it is, `fill` as the kernels of a few rows read it, instead."""

    plain: Launch
    fill: rows.Fill | None


# FEW serves up to 16 tokens, the narrowest that the matrix units take. MANY with 8 warps and 2 stages was slower on an H200
# (14336 x 4096 in Q4_K: 135 against 94 us at 64 tokens, 897 against 519 us at 512).
FEW = {"float32": Tile(64, 16, 4, 8, 2), "float16": Tile(64, 16, 4, 4, 3), "bfloat16": Tile(64, 16, 4, 4, 3)}
MANY = {"float32": Tile(64, 32, 4, 8, 2), "float16": Tile(64, 64, 4, 4, 3), "bfloat16": Tile(64, 64, 4, 4, 3)}


@triton.jit(do_not_specialize=["tokens"])
def linear_tiles(
    y, x, codes, bits, scale, top, bias, residual, tokens, alpha, N, K,
    FORMAT: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, COMPUTE: tl.constexpr,
    BN: tl.constexpr, BT: tl.constexpr, NB: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    token = (tl.program_id(1) * BT + tl.arange(0, BT)).to(tl.int64)
    row_ok, token_ok = row < N, token < tokens
    part = tl.arange(0, NB * 16)
    within = part // 16 * 32 + part % 16  # columns of the low halves
    p_x = x + token[None, :] * K + within[:, None]
    acc = tl.zeros([BN, BT], tl.float32)
    for start in range(0, K, NB * 32):
        block = start // 32 + tl.arange(0, NB)
        low, high = halves(FORMAT, codes, bits, scale, top, row, block, row_ok, K)  # [BN, NB, 16]
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
    return (FEW if tokens <= FEW[compute].tokens else MANY)[compute]


def _build(
    site: Site, spec: LinearSpec, alpha: float, source: Value, target: Value, added: Value | None, rest: list[WeightRef]
) -> Launch:
    x, y = site.slot(source), site.slot(target)
    residual = None if added is None else site.slot(added)
    weight = site.weight(rest[0])
    bias = site.vector(rest[1]) if spec.bias else None
    axis, _ = dims(target)
    exact = _tiles(site, x, y, weight, bias, residual, alpha, axis)
    if not matmul.takes(weight, site.compute):
        return exact
    few = matmul.linear(site, x, y, weight, bias, residual, alpha, axis)
    if site.deterministic:
        return few
    many = dequant.linear(site, x, y, weight, bias, residual, alpha, axis, dequant.room(site, [weight]))
    by_rows = [m.linear(site, x, y, weight, bias, residual, alpha, axis) for m in (many_rows, rows)]
    return _by_count(axis, exact, by_rows, few, many)


def _by_count(
    axis: str, one: Launch, by_rows: Sequence[rows.Few | None], few: Launch, many: Launch, made: Made | None = None
) -> Launch:
    known = [f for f in by_rows if f is not None]

    def run(live: Live) -> None:
        count = live.count(axis)
        found = next((f for f in known if f.least <= count <= f.most), None)
        if made is not None and not (found is not None and found.alone):
            made.plain(live)
        (found.run if found is not None else one if count <= 1 else few if count <= matmul.MOST else many)(live)

    return run


def several(
    site: Site, x: Slot, ys: Sequence[Slot], weights: Sequence[Packed], biases: Sequence[torch.Tensor | None], axis: str,
    made: Made,
) -> Launch:  # fmt: skip
    """Maps of one x `[T, k]` to ys `[T, n]`: three in one launch for a few tokens, else one after the other.

    For a composite, whose norm makes x; any number of tokens, of which one is served as well by a matvec.
    """
    exact = [_tiles(site, x, y, w, b, None, 1.0, axis) for y, w, b in zip(ys, weights, biases, strict=True)]
    if not all(matmul.takes(w, site.compute) for w in weights):
        return _chain([made.plain, *exact])
    given = [b for b in biases if b is not None]
    by_rows: list[rows.Few | None] = []
    if len(weights) == 3 and len(given) in (0, 3):
        by_rows = [m.linears(site, x, ys, weights, given, axis, made.fill) for m in (many_rows, rows)]
        few = matmul.linears(site, x, ys, weights, given, axis)
    else:
        few = _chain(
            [matmul.linear(site, x, y, w, b, None, 1.0, axis) for y, w, b in zip(ys, weights, biases, strict=True)]
        )
    if site.deterministic:
        return _chain([made.plain, few])
    room = dequant.room(site, weights)
    many = dequant.linears(site, x, list(zip(ys, weights, biases, strict=True)), None, 1.0, axis, room)
    return _by_count(axis, _chain(exact), by_rows, few, many, made)


def gate_up(
    site: Site,
    x: Slot,
    y: Slot,
    gate: Packed,
    up: Packed,
    biases: Sequence[torch.Tensor | None],
    activation: str,
    axis: str,
    made: Made,
) -> Launch:
    """y = activation(gate x) * up x, x `[T, k]`, y `[T, n]` of the compute type: in one launch for a few tokens."""
    other = site.scratch(axis, gate.n, DTYPES[site.compute])
    both = [(other, gate, biases[0]), (y, up, biases[1])]
    exact = [_tiles(site, x, to, w, b, None, 1.0, axis) for to, w, b in both]

    def gated(live: Live) -> None:
        size = live.count(axis) * gate.n
        grid = (cdiv(size, elementwise.BLOCK),)
        kernel, block = elementwise.gated_flat, elementwise.BLOCK
        site.launch(kernel, grid, y.tensor, other.tensor, y.tensor, size, KIND=activation, BLOCK=block)

    if not all(matmul.takes(w, site.compute) for w in (gate, up)):
        return _chain([made.plain, *exact, gated])
    given = [b for b in biases if b is not None]
    by_rows: list[rows.Few | None] = []
    if gate.format == up.format and len(given) in (0, 2):
        by_rows = [m.gate_up(site, x, y, gate, up, given, activation, axis, made.fill) for m in (many_rows, rows)]
        few = matmul.gate_up(site, x, y, gate, up, given, activation, axis)
    else:
        few = _chain([*(matmul.linear(site, x, to, w, b, None, 1.0, axis) for to, w, b in both), gated])
    if site.deterministic:
        return _chain([made.plain, few])
    room = dequant.room(site, (gate, up))
    many = dequant.linears(site, x, both, None, 1.0, axis, room)
    return _by_count(axis, _chain([*exact, gated]), by_rows, few, _chain([many, gated]), made)


def _chain(launches: Sequence[Launch]) -> Launch:
    def run(live: Live) -> None:
        for go in launches:
            go(live)

    return run


def _tiles(
    site: Site, x: Slot, y: Slot, weight: Packed, bias: torch.Tensor | None, residual: Slot | None, alpha: float, axis: str
) -> Launch:
    """The exact kernel, for any weight and any number of tokens."""
    compute = site.compute

    def run(live: Live) -> None:
        count = live.count(axis)
        tile = tile_for(compute, count)
        site.launch(
            linear_tiles, (cdiv(weight.n, tile.rows), cdiv(count, tile.tokens)),
            y.tensor, x.tensor, *weight.planes, y.tensor if bias is None else bias,
            y.tensor if residual is None else residual.tensor, count, alpha, weight.n, weight.k,
            FORMAT=weight.format, BIAS=bias is not None, ADD=residual is not None, COMPUTE=TL_TYPES[compute],
            BN=tile.rows, BT=tile.tokens, NB=tile.blocks, warps=tile.warps, stages=tile.stages,
        )  # fmt: skip

    return run


def build_linear(site: Site, node: Node) -> Launch:
    """LINEAR: x `[T, k]` to y `[T, n]`."""
    x, *rest = node.inputs
    return _build(site, node.spec, 1.0, x, node.outputs[0], None, rest)  # type: ignore[arg-type]


def build_linear_add(site: Site, node: Node) -> Launch:
    """LINEAR_ADD: the sum is rounded once, onto the float32 residual stream."""
    spec: LinearAddSpec = node.spec
    residual, x, *rest = node.inputs
    return _build(site, spec.linear, spec.scale, x, node.outputs[0], residual, rest)  # type: ignore[arg-type]


IMPLEMENTATIONS = (
    Implementation(LINEAR, "tiles; matrix units", build_linear),
    Implementation(LINEAR_ADD, "tiles; matrix units, residual added", build_linear_add),
)
