"""Linear maps of 2 to MOST tokens on the matrix units: y[t, n] = sum_k x[t, k] W[n, k], each byte of W read once.

Rows of W are the tall side of a tile, tokens the other, and a program has all tokens of up to 128. Weights are decoded in
registers. Where a matrix has too few rows to fill the device, K is cut into parts whose sums meet in float32
scratch; the last program to arrive adds them, always in order of K. Parts and tiles follow from the weight's shape, only
the width of a tile from the number of tokens, so a row's sum does not depend on the rows beside it.

Maps of one x (query, key and value) are one launch, and so is act(gate x) * up x.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from quarrel.ops.contract import Compute
from quarrel.triton_backend.elementwise.activation import activate
from quarrel.triton_backend.formats.float16 import decode_tile, high_offset, is_fast, low_columns
from quarrel.triton_backend.linear.maps import UNLIMITED, Maps, Serves
from quarrel.triton_backend.linear.tuned import Kind, Measured, Widths, key, table
from quarrel.triton_backend.runtime.arrays import Packed, Slot
from quarrel.triton_backend.runtime.launch import cdiv
from quarrel.triton_backend.runtime.site import Batch, Launch, Site, starts_early

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
    w, up, row, p_x, x_ok, first, last, K,
    BN: tl.constexpr, BT: tl.constexpr, NB: tl.constexpr, STAGES: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Sums `[BN, BT]` of the matrix w, and of `up` if GATED, over columns first to last.

    p_x `[BT]` points at rows of x, of which those exist that x_ok says.
    """
    acc = tl.zeros([BN, BT], tl.float32)
    acc_b = tl.zeros([BN, BT], tl.float32)
    if (FORMAT == "F16" and tl.float16 == COMPUTE) or (FORMAT == "BF16" and tl.bfloat16 == COMPUTE):
        k = tl.arange(0, NB * 32)
        p_a = w.codes.to(tl.pointer_type(COMPUTE)) + row[:, None] * K + k[None, :]
        p_b = up.codes.to(tl.pointer_type(COMPUTE)) + row[:, None] * K + k[None, :]
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
        low, high = decode_tile(FORMAT, FAST, COMPUTE, w, row, begin, K, BN, NB)
        low_b, high_b = low, high
        if GATED:
            low_b, high_b = decode_tile(FORMAT, FAST, COMPUTE, up, row, begin, K, BN, NB)
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
            low, high = decode_tile(FORMAT, FAST, COMPUTE, w, row, after, K, BN, NB)
            if GATED:
                low_b, high_b = decode_tile(FORMAT, FAST, COMPUTE, up, row, after, K, BN, NB)
    return acc, acc_b


class Epilogue(NamedTuple):
    """What is added to sums: biases [N] float32 of w and of `up`, read if BIAS; a residual `[T, N]`, read if ADD."""

    bias: Any
    bias_up: Any
    residual: Any


class SplitK(NamedTuple):
    """Where parts of K meet: float32 room for the sums of every part and tile, and an int32 count of every tile, zero."""

    sums: Any
    arrived: Any


@triton.jit
def finish(
    y, acc, acc_up, more, row, token, tokens, alpha, N,
    BIAS: tl.constexpr, ADD: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Bias, activation or residual (`more` is an Epilogue), and the store."""
    row_ok = row < N
    if BIAS:
        acc += tl.load(more.bias + row, mask=row_ok, other=0.0)[:, None]
        if GATED:
            acc_up += tl.load(more.bias_up + row, mask=row_ok, other=0.0)[:, None]
    if GATED:
        acc = activate(acc, KIND) * acc_up
    at = token[None, :] * N + row[:, None]
    ok = row_ok[:, None] & (token < tokens)[None, :]
    if ADD:
        acc = tl.load(more.residual + at, mask=ok, other=0.0).to(tl.float32) + alpha * acc
    tl.store(y + at, acc.to(y.dtype.element_ty), mask=ok)


@triton.jit
def meet(split, acc, acc_up, tile, tiles, GATED: tl.constexpr, PARTS: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr):
    """Leaves this part's sums in scratch; whether it was the last of its tile, and then the sums of all parts."""
    inside = tl.arange(0, BN)[:, None] * BT + tl.arange(0, BT)[None, :]
    p_part = split.sums + tile.to(tl.int64) * (BN * BT) + inside
    stride = tiles.to(tl.int64) * (BN * BT)
    mine = tl.program_id(2)
    tl.store(p_part + mine * stride, acc)
    if GATED:
        tl.store(p_part + (PARTS + mine) * stride, acc_up)
    tl.debug_barrier()
    last = tl.atomic_add(split.arrived + tile, 1, sem="acq_rel") == PARTS - 1
    if last:
        acc = tl.zeros([BN, BT], tl.float32)
        acc_up = tl.zeros([BN, BT], tl.float32)
        for i in tl.static_range(PARTS):
            acc += tl.load(p_part + i * stride, cache_modifier=".cg")
            if GATED:
                acc_up += tl.load(p_part + (PARTS + i) * stride, cache_modifier=".cg")
        tl.store(split.arrived + tile, 0)
    return last, acc, acc_up


@triton.jit(do_not_specialize=["tokens"])
def batch_tiles(
    y, x, w, up, more, split, tokens, alpha, N, K: tl.constexpr,
    FORMAT: tl.constexpr, FAST: tl.constexpr, COMPUTE: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    GATED: tl.constexpr, KIND: tl.constexpr, PARTS: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, NB: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One map, or gate and up. Grid (N / BN, tokens / BT, PARTS).

    y       [tokens, N], float32 or the compute type;  x [tokens, K], float32 or the compute type
    w, up   Planes of weights [N, K] of one format; `up` is w again unless GATED
    more    Epilogue: y = act(w x + bias) * (up x + bias_up), or residual + alpha * (w x + bias)
    split   SplitK: float32 [(1 + GATED) * PARTS * tiles * BN * BT], and counts [tiles]
    FAST    as `is_fast` says;  NB  blocks of 32 columns to a step;  STAGES  of the pipeline
    """
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
    acc, acc_up = walk(
        FORMAT, FAST, COMPUTE, GATED, w, up, near, p_x, token < tokens, first, tl.minimum(first + each, K), K, BN, BT, NB,
        STAGES, PDL,
    )  # fmt: skip
    _end(y, acc, acc_up, more, split, row, token, tokens, alpha, N, BIAS, ADD, GATED, KIND, PARTS, BN, BT)


@triton.jit
def _end(
    y, acc, acc_up, more, split, row, token, tokens, alpha, N, BIAS: tl.constexpr, ADD: tl.constexpr,
    GATED: tl.constexpr, KIND: tl.constexpr, PARTS: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    if PARTS == 1:
        finish(y, acc, acc_up, more, row, token, tokens, alpha, N, BIAS, ADD, GATED, KIND)
    else:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        tiles = tl.num_programs(0) * tl.num_programs(1)
        last, acc, acc_up = meet(split, acc, acc_up, tile, tiles, GATED, PARTS, BN, BT)
        if last:
            finish(y, acc, acc_up, more, row, token, tokens, alpha, N, BIAS, ADD, GATED, KIND)


@triton.jit(do_not_specialize=["tokens"])
def batch_three(
    ys, x, ws, biases, split, tokens, ns, K: tl.constexpr,
    FORMATS: tl.constexpr, FAST: tl.constexpr, COMPUTE: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr,
    BN: tl.constexpr, BT: tl.constexpr, NB: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Three maps of one x, as `batch_tiles`: ys, ws, biases, ns, FORMATS and FAST are tuples of three.

    Row tiles of the first matrix, then of the second, then of the third.
    """
    # Parts of a constant are constants by annotation only (Triton 3.6).
    F0: tl.constexpr = FORMATS[0]
    F1: tl.constexpr = FORMATS[1]
    F2: tl.constexpr = FORMATS[2]
    S0: tl.constexpr = FAST[0]
    S1: tl.constexpr = FAST[1]
    S2: tl.constexpr = FAST[2]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    tiles0, tiles1 = tl.cdiv(ns[0], BN), tl.cdiv(ns[1], BN)
    token = (tl.program_id(1) * BT + tl.arange(0, BT)).to(tl.int64)
    p_x = x + token * K
    steps = K // (NB * 32)
    each = (steps + PARTS - 1) // PARTS * (NB * 32)
    first = tl.program_id(2) * each
    end = tl.minimum(first + each, K)
    if tile < tiles0:
        row = (tile * BN + tl.arange(0, BN)).to(tl.int64)
        _one_of_three(
            ys[0], ws[0], biases[0], split, row, token, p_x, tokens, first, end, ns[0], K, F0, S0, COMPUTE,
            BIAS, PARTS, BN, BT, NB, STAGES, PDL,
        )  # fmt: skip
    elif tile < tiles0 + tiles1:
        row = ((tile - tiles0) * BN + tl.arange(0, BN)).to(tl.int64)
        _one_of_three(
            ys[1], ws[1], biases[1], split, row, token, p_x, tokens, first, end, ns[1], K, F1, S1, COMPUTE,
            BIAS, PARTS, BN, BT, NB, STAGES, PDL,
        )  # fmt: skip
    else:
        row = ((tile - tiles0 - tiles1) * BN + tl.arange(0, BN)).to(tl.int64)
        _one_of_three(
            ys[2], ws[2], biases[2], split, row, token, p_x, tokens, first, end, ns[2], K, F2, S2, COMPUTE,
            BIAS, PARTS, BN, BT, NB, STAGES, PDL,
        )  # fmt: skip


@triton.jit
def _one_of_three(
    y, w, bias, split, row, token, p_x, tokens, first, end, N, K: tl.constexpr, FORMAT: tl.constexpr, FAST: tl.constexpr,
    COMPUTE: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, NB: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    acc, _ = walk(
        FORMAT, FAST, COMPUTE, False, w, w, tl.minimum(row, N - 1), p_x, token < tokens, first, end, K, BN, BT, NB, STAGES,
        PDL,
    )  # fmt: skip
    more = Epilogue(bias, bias, y)
    _end(y, acc, acc, more, split, row, token, tokens, 1.0, N, BIAS, False, False, "none", PARTS, BN, BT)


def _room(site: Site, shapes: Sequence[Shape], ns: Sequence[int], sums: int) -> tuple[Slot, Slot]:
    """Scratch for the parts' sums of MOST tokens, and a count for every tile."""
    part, counts = 1, 1
    for shape in shapes:
        if shape.parts > 1:
            tiles = sum(cdiv(n, shape.rows) for n in ns) * cdiv(MOST, shape.tokens)
            part = max(part, sums * shape.parts * tiles * shape.rows * shape.tokens)
            counts = max(counts, tiles)
    return site.scratch("one", part), site.zeros("one", counts)


def declines(site: Site, maps: Maps) -> str | None:
    """Takes 16-bit arithmetic on whole blocks of 32 columns."""
    return maps.together() or declines_weights(site, maps.weights)


def declines_weights(site: Site, weights: Sequence[Packed]) -> str | None:
    """Why it does not take a weight, or None."""
    for w in weights:
        if not takes(w, site.compute):
            return f"needs 16-bit arithmetic, whole blocks of 32 columns, got {site.compute}, {w.format} of {w.k} columns"
    return None


def build(site: Site, maps: Maps) -> Serves:
    """From 2 rows to MOST; where a row's bits may not depend on how many there are, all."""
    if len(maps.weights) == 3:
        run = _three(site, maps)
    else:
        run = _one(site, maps, maps.ys[0], maps.weights, maps.given)
    return Serves(run, 0, UNLIMITED) if site.deterministic else Serves(run, 2, MOST)


def _one(site: Site, maps: Maps, y: Slot, weights: Sequence[Packed], biases: Sequence[torch.Tensor]) -> Launch:
    """One map, or gate and up."""
    x, residual, alpha, axis, kind = maps.x, maps.residual, maps.alpha, maps.axis, maps.activation
    a, b = weights[0], weights[-1]
    gated = len(weights) == 2
    shapes = shapes_of(site, "gated" if gated else "one", weights)
    part, arrived = _room(site, shapes, [a.n], len(weights))
    compute = site.compute

    def run(batch: Batch) -> None:
        for first, count in slices(site, batch.count(axis)):
            shape = shape_of(shapes, count)
            out = y.tensor[first * a.n :]
            before = None if residual is None else residual.tensor[first * a.n :]
            site.launch(
                batch_tiles, (cdiv(a.n, shape.rows), cdiv(count, shape.tokens), shape.parts), out,
                x.tensor[first * a.k :], a.planes, b.planes,
                Epilogue(*(biases[i] if biases else out for i in (0, -1)), out if before is None else before),
                SplitK(part.tensor, arrived.tensor), count, alpha, a.n, K=a.k, FORMAT=a.format,
                FAST=is_fast(a.format, compute, shape.blocks), COMPUTE=TL_TYPES[compute], BIAS=bool(biases),
                ADD=residual is not None, GATED=gated, KIND=kind, PARTS=shape.parts, BN=shape.rows, BT=shape.tokens,
                NB=shape.blocks, STAGES=shape.stages, warps=shape.warps, stages=shape.stages, early=starts_early(site),
            )  # fmt: skip

    return run


def _three(site: Site, maps: Maps) -> Launch:
    """Three maps of one x in one launch; their formats may differ."""
    x, ys, weights, biases, axis = maps.x, maps.ys, maps.weights, maps.given, maps.axis
    k, ns = weights[0].k, tuple(w.n for w in weights)
    shapes = shapes_of(site, "three", weights)
    part, arrived = _room(site, shapes, ns, 1)
    compute = site.compute
    planes, formats = tuple(w.planes for w in weights), tuple(w.format for w in weights)

    def run(batch: Batch) -> None:
        for first, count in slices(site, batch.count(axis)):
            shape = shape_of(shapes, count)
            outs = tuple(y.tensor[first * n :] for y, n in zip(ys, ns))
            fast = tuple(is_fast(w.format, compute, shape.blocks) for w in weights)
            site.launch(
                batch_three, (sum(cdiv(n, shape.rows) for n in ns), cdiv(count, shape.tokens), shape.parts), outs,
                x.tensor[first * k :], planes, biases or outs, SplitK(part.tensor, arrived.tensor), count, ns, K=k,
                FORMATS=formats, FAST=fast, COMPUTE=TL_TYPES[compute], BIAS=bool(biases), PARTS=shape.parts,
                BN=shape.rows, BT=shape.tokens, NB=shape.blocks, STAGES=shape.stages, warps=shape.warps,
                stages=shape.stages, early=starts_early(site),
            )  # fmt: skip

    return run
