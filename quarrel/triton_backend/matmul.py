"""Linear maps of 2 to MOST tokens on the matrix units: y[t, n] = sum_k x[t, k] W[n, k], each byte of W read once.

Rows of W are the tall side of a tile, tokens the other, and a program has all tokens of up to 128. Weights are decoded in
registers (`half.py`). Where a matrix has too few rows to fill the device, K is cut into parts whose sums meet in float32
scratch; the last program to arrive adds them, always in order of K. Parts and tiles follow from the weight's shape, only
the width of a tile from the number of tokens, so a row's sum does not depend on the rows beside it.

`linears` runs maps of one x in one launch (query, key and value), `gate_up` runs act(gate x) * up x in one: the composites
of `ops/linear.py` call them once they have normalised x.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
import triton
import triton.language as tl

from quarrel.ops.contract import Compute
from quarrel.triton_backend.elementwise import activate
from quarrel.triton_backend.half import high_offset, is_fast, low_columns, tile_halves
from quarrel.triton_backend.pack import Packed
from quarrel.triton_backend.runtime import Launch, Live, Site, Slot, cdiv, starts_early
from quarrel.triton_backend.tuned import Kind, Measured, Widths, key, table

MOST = 128
"""Tokens up to which a launch of `batch_tiles` reads each weight once."""
TL_TYPES = {"float32": tl.float32, "float16": tl.float16, "bfloat16": tl.bfloat16}
_MOST_PARTS = 8


@dataclass(frozen=True)
class Shape:
    """`rows` of W by `tokens`, `blocks` of 32 columns to a step, `parts` of K."""

    rows: int
    tokens: int
    blocks: int
    parts: int
    warps: int
    stages: int


def shapes_for(n: int, k: int, widths: Widths, measured: Measured = MappingProxyType({})) -> tuple[Shape, ...]:
    """Tiles for more and more tokens, by the weight's shape alone: as they were `measured`, or as `widths` have it.

    K is cut while there are fewer programs than fill an H200's 132 multiprocessors: 64 rows in 4 warps are two to each, 128
    rows in 8 warps one. 14336 rows are best whole (30 us against 39 in two parts), 4096 x 14336 in four (32 against 44 in
    eight).
    """
    blocks = k // 32
    found = []
    for tokens, rows, most, warps, stages in widths:
        if tokens in measured:
            continue
        step = next(s for s in (8, 4, 2, 1) if s <= most and blocks % s == 0)
        programs = cdiv(n, rows)
        parts = 1
        while programs * parts < (200 if rows == 64 else 100) and parts < _MOST_PARTS and blocks // step >= 4 * parts:
            parts *= 2
        found.append(Shape(rows, tokens, step, parts, warps, stages))
    found += [Shape(row[0], tokens, *row[1:]) for tokens, row in measured.items()]
    return tuple(sorted(found, key=lambda s: s.tokens))


def shapes_of(site: Site, kind: Kind, weights: Sequence[Packed]) -> tuple[Shape, ...]:
    """What the device's table says of these weights."""
    found = table(site.generation)
    ns, k = [w.n for w in weights], weights[0].k
    wide = kind != "gated" and any(w.format in ("F16", "BF16") for w in weights)
    widths = found.widths["wide" if wide else kind]
    n = sum(ns) if kind == "three" else ns[0]
    if site.deterministic:
        return shapes_for(n, k, same_sums(widths))
    return shapes_for(n, k, widths, found.tiles.get(key(kind, [w.format for w in weights], ns, k), {}))


def same_sums(widths: Widths) -> Widths:
    """The widest one's rows and steps for any number of tokens: sums run in one order, and a row has one result."""
    rest = widths[-1][1:]
    return tuple((tokens, *rest) for tokens, *_ in widths)


def slices(site: Site, count: int) -> Sequence[tuple[int, int]]:
    """First token and count of each launch; more than one only where there are more tokens than `_room` has sums for."""
    if count <= MOST or not site.deterministic:
        return [(0, count)]
    return [(first, min(MOST, count - first)) for first in range(0, count, MOST)]


def shape_of(shapes: Sequence[Shape], count: int) -> Shape:
    """The narrowest that holds them, or the widest."""
    return next((s for s in shapes if count <= s.tokens), shapes[-1])


def takes(weight: Packed, compute: Compute) -> bool:
    """Whether these kernels read the weight: 16-bit arithmetic on whole blocks of 32 columns."""
    return compute != "float32" and weight.k % 32 == 0 and weight.format != "F32"


@triton.jit
def walk(
    FORMAT: tl.constexpr, FAST: tl.constexpr, COMPUTE: tl.constexpr, GATED: tl.constexpr,
    a_codes, a_bits, a_scale, a_top, b_codes, b_bits, b_scale, b_top, row, p_x, x_ok, first, last, K,
    BN: tl.constexpr, BT: tl.constexpr, NB: tl.constexpr, STAGES: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Sums `[BN, BT]` of matrix A, and of B if GATED, over columns first to last.

    p_x `[BT]` points at rows of x, of which those exist that x_ok says.
    """
    acc = tl.zeros([BN, BT], tl.float32)
    acc_b = tl.zeros([BN, BT], tl.float32)
    if (FORMAT == "F16" and tl.float16 == COMPUTE) or (FORMAT == "BF16" and tl.bfloat16 == COMPUTE):
        k = tl.arange(0, NB * 32)
        p_a = a_codes.to(tl.pointer_type(COMPUTE)) + row[:, None] * K + k[None, :]
        p_b = b_codes.to(tl.pointer_type(COMPUTE)) + row[:, None] * K + k[None, :]
        if WAIT:
            tl.extra.cuda.gdc_wait()
        for start in range(first, last, NB * 32):
            x = tl.load(p_x[None, :] + start + k[:, None], mask=x_ok[None, :], other=0.0).to(COMPUTE)
            acc = tl.dot(tl.load(p_a + start), x, acc)
            if GATED:
                acc_b = tl.dot(tl.load(p_b + start), x, acc_b)
    else:
        p_low = low_columns(FORMAT, FAST, NB)
        far = high_offset(FORMAT, FAST, NB)
        stop = last // 32 - NB
        begin = tl.minimum(first // 32, K // 32 - NB)  # a part may have nothing to do
        # Decoded a step ahead of the products, which so take their tiles from shared memory.
        low, high = tile_halves(FORMAT, FAST, COMPUTE, a_codes, a_bits, a_scale, a_top, row, begin, K, BN, NB)
        low_b, high_b = low, high
        if GATED:
            low_b, high_b = tile_halves(FORMAT, FAST, COMPUTE, b_codes, b_bits, b_scale, b_top, row, begin, K, BN, NB)
        if WAIT:  # weights are there since the model was loaded, x comes from the kernel before
            tl.extra.cuda.gdc_wait()
        for start in tl.range(first, last, NB * 32, num_stages=STAGES):
            p = p_x[None, :] + start + p_low[:, None]
            x_low = tl.load(p, mask=x_ok[None, :], other=0.0).to(COMPUTE)
            x_high = tl.load(p + far, mask=x_ok[None, :], other=0.0).to(COMPUTE)
            acc = tl.dot(low, x_low, acc)
            acc = tl.dot(high, x_high, acc)
            if GATED:
                acc_b = tl.dot(low_b, x_low, acc_b)
                acc_b = tl.dot(high_b, x_high, acc_b)
            after = tl.minimum(start // 32 + NB, stop)
            low, high = tile_halves(FORMAT, FAST, COMPUTE, a_codes, a_bits, a_scale, a_top, row, after, K, BN, NB)
            if GATED:
                low_b, high_b = tile_halves(FORMAT, FAST, COMPUTE, b_codes, b_bits, b_scale, b_top, row, after, K, BN, NB)
    return acc, acc_b


@triton.jit
def finish(
    y, acc, acc_b, bias, bias_b, residual, row, token, tokens, alpha, N,
    BIAS: tl.constexpr, ADD: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Bias, activation or residual, and the store."""
    row_ok = row < N
    if BIAS:
        acc += tl.load(bias + row, mask=row_ok, other=0.0)[:, None]
        if GATED:
            acc_b += tl.load(bias_b + row, mask=row_ok, other=0.0)[:, None]
    if GATED:
        acc = activate(acc, KIND) * acc_b
    at = token[None, :] * N + row[:, None]
    ok = row_ok[:, None] & (token < tokens)[None, :]
    if ADD:
        acc = tl.load(residual + at, mask=ok, other=0.0).to(tl.float32) + alpha * acc
    tl.store(y + at, acc.to(y.dtype.element_ty), mask=ok)


@triton.jit
def meet(
    part, arrived, acc, acc_b, tile, tiles, GATED: tl.constexpr, PARTS: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr
):
    """Leaves this part's sums in scratch; whether it was the last of its tile, and then the sums of all parts."""
    inside = tl.arange(0, BN)[:, None] * BT + tl.arange(0, BT)[None, :]
    p_part = part + tile.to(tl.int64) * (BN * BT) + inside
    stride = tiles.to(tl.int64) * (BN * BT)
    mine = tl.program_id(2)
    tl.store(p_part + mine * stride, acc)
    if GATED:
        tl.store(p_part + (PARTS + mine) * stride, acc_b)
    tl.debug_barrier()
    last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == PARTS - 1
    if last:
        acc = tl.zeros([BN, BT], tl.float32)
        acc_b = tl.zeros([BN, BT], tl.float32)
        for i in tl.static_range(PARTS):
            acc += tl.load(p_part + i * stride, cache_modifier=".cg")
            if GATED:
                acc_b += tl.load(p_part + (PARTS + i) * stride, cache_modifier=".cg")
        tl.store(arrived + tile, 0)
    return last, acc, acc_b


@triton.jit(do_not_specialize=["tokens"])
def batch_tiles(
    y, x, a_codes, a_bits, a_scale, a_top, b_codes, b_bits, b_scale, b_top, bias, bias_b, residual, part, arrived,
    tokens, alpha, N, K: tl.constexpr,
    FORMAT: tl.constexpr, FAST: tl.constexpr, COMPUTE: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    GATED: tl.constexpr, KIND: tl.constexpr, PARTS: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, NB: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    token = (tl.program_id(1) * BT + tl.arange(0, BT)).to(tl.int64)
    # Rows beyond the last are the last again, and not stored; tokens beyond the last are not read.
    p_x = x + token * K
    near = tl.minimum(row, N - 1)
    steps = K // (NB * 32)
    each = (steps + PARTS - 1) // PARTS * (NB * 32)
    first = tl.program_id(2) * each
    acc, acc_b = walk(
        FORMAT, FAST, COMPUTE, GATED, a_codes, a_bits, a_scale, a_top, b_codes, b_bits, b_scale, b_top,
        near, p_x, token < tokens, first, tl.minimum(first + each, K), K, BN, BT, NB, STAGES, PDL,
    )  # fmt: skip
    if PARTS == 1:
        finish(y, acc, acc_b, bias, bias_b, residual, row, token, tokens, alpha, N, BIAS, ADD, GATED, KIND)
    else:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        tiles = tl.num_programs(0) * tl.num_programs(1)
        last, acc, acc_b = meet(part, arrived, acc, acc_b, tile, tiles, GATED, PARTS, BN, BT)
        if last:
            finish(y, acc, acc_b, bias, bias_b, residual, row, token, tokens, alpha, N, BIAS, ADD, GATED, KIND)


@triton.jit(do_not_specialize=["tokens"])
def batch_three(
    y0, y1, y2, x, a_codes, a_bits, a_scale, a_top, b_codes, b_bits, b_scale, b_top, c_codes, c_bits, c_scale, c_top,
    bias0, bias1, bias2, part, arrived, tokens, N0, N1, N2, K: tl.constexpr,
    FORMAT0: tl.constexpr, FORMAT1: tl.constexpr, FORMAT2: tl.constexpr, FAST0: tl.constexpr, FAST1: tl.constexpr,
    FAST2: tl.constexpr, COMPUTE: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr, BN: tl.constexpr,
    BT: tl.constexpr, NB: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # Row tiles of the first matrix, then of the second, then of the third.
    tile = tl.program_id(0)
    tiles0, tiles1 = tl.cdiv(N0, BN), tl.cdiv(N1, BN)
    token = (tl.program_id(1) * BT + tl.arange(0, BT)).to(tl.int64)
    p_x = x + token * K
    steps = K // (NB * 32)
    each = (steps + PARTS - 1) // PARTS * (NB * 32)
    first = tl.program_id(2) * each
    end = tl.minimum(first + each, K)
    if tile < tiles0:
        row = (tile * BN + tl.arange(0, BN)).to(tl.int64)
        acc, _ = walk(
            FORMAT0, FAST0, COMPUTE, False, a_codes, a_bits, a_scale, a_top, a_codes, a_bits, a_scale, a_top,
            tl.minimum(row, N0 - 1), p_x, token < tokens, first, end, K, BN, BT, NB, STAGES, PDL,
        )  # fmt: skip
        _end(y0, acc, bias0, part, arrived, row, token, tokens, N0, BIAS, PARTS, BN, BT)
    elif tile < tiles0 + tiles1:
        row = ((tile - tiles0) * BN + tl.arange(0, BN)).to(tl.int64)
        acc, _ = walk(
            FORMAT1, FAST1, COMPUTE, False, b_codes, b_bits, b_scale, b_top, b_codes, b_bits, b_scale, b_top,
            tl.minimum(row, N1 - 1), p_x, token < tokens, first, end, K, BN, BT, NB, STAGES, PDL,
        )  # fmt: skip
        _end(y1, acc, bias1, part, arrived, row, token, tokens, N1, BIAS, PARTS, BN, BT)
    else:
        row = ((tile - tiles0 - tiles1) * BN + tl.arange(0, BN)).to(tl.int64)
        acc, _ = walk(
            FORMAT2, FAST2, COMPUTE, False, c_codes, c_bits, c_scale, c_top, c_codes, c_bits, c_scale, c_top,
            tl.minimum(row, N2 - 1), p_x, token < tokens, first, end, K, BN, BT, NB, STAGES, PDL,
        )  # fmt: skip
        _end(y2, acc, bias2, part, arrived, row, token, tokens, N2, BIAS, PARTS, BN, BT)


@triton.jit
def _end(
    y, acc, bias, part, arrived, row, token, tokens, N,
    BIAS: tl.constexpr, PARTS: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    if PARTS == 1:
        finish(y, acc, acc, bias, bias, y, row, token, tokens, 1.0, N, BIAS, False, False, "none")
    else:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        tiles = tl.num_programs(0) * tl.num_programs(1)
        last, acc, _ = meet(part, arrived, acc, acc, tile, tiles, False, PARTS, BN, BT)
        if last:
            finish(y, acc, acc, bias, bias, y, row, token, tokens, 1.0, N, BIAS, False, False, "none")


def _room(site: Site, shapes: Sequence[Shape], ns: Sequence[int], sums: int) -> tuple[Slot, Slot]:
    """Scratch for the parts' sums of MOST tokens, and a count for every tile."""
    part, counts = 1, 1
    for shape in shapes:
        if shape.parts > 1:
            tiles = sum(cdiv(n, shape.rows) for n in ns) * cdiv(MOST, shape.tokens)
            part = max(part, sums * shape.parts * tiles * shape.rows * shape.tokens)
            counts = max(counts, tiles)
    return site.scratch("one", part), site.zeros("one", counts)


def linear(
    site: Site, x: Slot, y: Slot, weight: Packed, bias: torch.Tensor | None, residual: Slot | None, alpha: float, axis: str
) -> Launch:
    """y = W x + bias, or residual + alpha * that, for up to MOST tokens of `axis`."""
    return _one(site, x, y, (weight,), () if bias is None else (bias,), residual, alpha, axis, "none")


def gate_up(
    site: Site, x: Slot, y: Slot, gate: Packed, up: Packed, biases: Sequence[torch.Tensor], activation: str, axis: str
) -> Launch:
    """y = activation(gate x) * up x; both matrices have one format and shape, biases are two or none."""
    return _one(site, x, y, (gate, up), biases, None, 1.0, axis, activation)


def _one(
    site: Site, x: Slot, y: Slot, weights: Sequence[Packed], biases: Sequence[torch.Tensor], residual: Slot | None,
    alpha: float, axis: str, kind: str,
) -> Launch:  # fmt: skip
    a, b = weights[0], weights[-1]
    gated = len(weights) == 2
    shapes = shapes_of(site, "gated" if gated else "one", weights)
    part, arrived = _room(site, shapes, [a.n], len(weights))
    compute = site.compute

    def run(live: Live) -> None:
        for first, count in slices(site, live.count(axis)):
            shape = shape_of(shapes, count)
            out = y.tensor[first * a.n :]
            site.launch(
                batch_tiles, (cdiv(a.n, shape.rows), cdiv(count, shape.tokens), shape.parts), out,
                x.tensor[first * a.k :], *a.planes, *b.planes, biases[0] if biases else out, biases[-1] if biases else out,
                out if residual is None else residual.tensor[first * a.n :], part.tensor, arrived.tensor, count, alpha,
                a.n, K=a.k, FORMAT=a.format, FAST=is_fast(a.format, compute, shape.blocks), COMPUTE=TL_TYPES[compute],
                BIAS=bool(biases), ADD=residual is not None, GATED=gated, KIND=kind, PARTS=shape.parts, BN=shape.rows,
                BT=shape.tokens, NB=shape.blocks, STAGES=shape.stages, warps=shape.warps, stages=shape.stages,
                early=starts_early(site),
            )  # fmt: skip

    return run


def linears(
    site: Site, x: Slot, ys: Sequence[Slot], weights: Sequence[Packed], biases: Sequence[torch.Tensor], axis: str
) -> Launch:
    """Three maps of one x in one launch; their formats may differ. Biases are three or none."""
    assert len(weights) == 3, len(weights)
    k, ns = weights[0].k, [w.n for w in weights]
    shapes = shapes_of(site, "three", weights)
    part, arrived = _room(site, shapes, ns, 1)
    compute = site.compute
    planes = [p for w in weights for p in w.planes]

    def run(live: Live) -> None:
        for first, count in slices(site, live.count(axis)):
            shape = shape_of(shapes, count)
            outs = [y.tensor[first * n :] for y, n in zip(ys, ns)]
            fast = [is_fast(w.format, compute, shape.blocks) for w in weights]
            site.launch(
                batch_three, (sum(cdiv(n, shape.rows) for n in ns), cdiv(count, shape.tokens), shape.parts), *outs,
                x.tensor[first * k :], *planes, *(biases or outs), part.tensor, arrived.tensor, count, *ns, K=k,
                FORMAT0=weights[0].format, FORMAT1=weights[1].format, FORMAT2=weights[2].format, FAST0=fast[0],
                FAST1=fast[1], FAST2=fast[2], COMPUTE=TL_TYPES[compute], BIAS=bool(biases), PARTS=shape.parts,
                BN=shape.rows, BT=shape.tokens, NB=shape.blocks, STAGES=shape.stages, warps=shape.warps,
                stages=shape.stages, early=starts_early(site),
            )  # fmt: skip

    return run
