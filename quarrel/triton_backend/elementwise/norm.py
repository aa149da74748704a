"""RMS, layer and gated norm of `[T, groups * k]`, each run of `k` values by itself; and the largest values of rows.

A program takes R runs and walks them C columns at a time, once for the mean (layer), once for the variance and once to
write; the second and third walk hit the cache. R and C follow from k alone, so a row's sums never depend on the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quarrel.ops.activation import LARGEST, LargestSpec
from quarrel.ops.contract import Value
from quarrel.ops.norm import NORM, NormSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.ops.state import GATED_NORM, GatedNormSpec
from quarrel.triton_backend.elementwise import ring_x, wgmma_x
from quarrel.triton_backend.elementwise.activation import activate, normed_row
from quarrel.triton_backend.formats.fragments import place_of
from quarrel.triton_backend.linear.left_parts import nothing, stream_at
from quarrel.triton_backend.runtime.arrays import Slot
from quarrel.triton_backend.runtime.launch import cdiv, power_of_two
from quarrel.triton_backend.runtime.site import Batch, Launch, Site, dims, starts_early

_MOST_ARRANGED = 16384
_TILE = 4096  # elements of a program's tile: 32 a thread at 4 warps


@dataclass(frozen=True)
class Onto:
    """Where a norm's result is added instead of being kept: out = factor * (stream + scale * norm)."""

    stream: Value
    out: Value
    scale: float = 1.0
    factor: float = 1.0


@triton.jit(do_not_specialize=["runs"])
def norm_rows(
    y, x, gain, bias, stream, rounded, left, runs, K, eps, scale, factor, LAYER: tl.constexpr, ADDS: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, LEFT: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """With ADDS, y = factor * (stream + scale * norm), of the norm as it is in the type of `rounded`. LEFT needs a tile of
    all columns (`left_parts.py`)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    run = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    run_ok = (run < runs)[:, None]
    column = tl.arange(0, C)
    p_x = x + run[:, None] * K
    if K <= C:
        # One tile is all: what was read for the sums is still in registers.
        at = column[None, :]
        ok = run_ok & (at < K)
        weight = tl.load(gain + at, mask=at < K, other=0.0)
        if PDL:
            tl.extra.cuda.gdc_wait()
        row = tl.minimum(run, runs - 1)[:, None]
        value = stream_at(x, left, row, at, ok, at < K, K, LEFT, PARTS)
        if ADDS:
            before = tl.load(stream + run[:, None] * K + at, mask=ok, other=0.0)
        if LAYER:
            value = tl.where(ok, value - tl.sum(value, 1)[:, None] / K, 0.0)
        by = 1.0 / tl.sqrt(tl.sum(value * value, 1)[:, None] / K + eps)
        value = value * by * weight
        if LAYER:
            value += tl.load(bias + at, mask=at < K, other=0.0)
        if ADDS:
            value = added(before, value, rounded, scale, factor)
        tl.store(y + run[:, None] * K + at, value.to(y.dtype.element_ty), mask=ok)
        return
    if PDL:
        tl.extra.cuda.gdc_wait()
    mean = tl.zeros([R, 1], tl.float32)
    if LAYER:
        total = tl.zeros([R, C], tl.float32)
        for start in range(0, K, C):
            at = (start + column)[None, :]
            total += tl.load(p_x + at, mask=run_ok & (at < K), other=0.0).to(tl.float32)
        mean = tl.sum(total, 1)[:, None] / K
    square = tl.zeros([R, C], tl.float32)
    for start in range(0, K, C):
        at = (start + column)[None, :]
        ok = run_ok & (at < K)
        centred = tl.load(p_x + at, mask=ok, other=0.0).to(tl.float32) - mean
        square += tl.where(ok, centred * centred, 0.0)
    by = 1.0 / tl.sqrt(tl.sum(square, 1)[:, None] / K + eps)
    for start in range(0, K, C):
        at = (start + column)[None, :]
        ok = run_ok & (at < K)
        value = (tl.load(p_x + at, mask=ok, other=0.0).to(tl.float32) - mean) * by
        value = value * tl.load(gain + at, mask=at < K, other=0.0)
        if LAYER:
            value += tl.load(bias + at, mask=at < K, other=0.0)
        if ADDS:
            before = tl.load(stream + run[:, None] * K + at, mask=ok, other=0.0)
            value = added(before, value, rounded, scale, factor)
        tl.store(y + run[:, None] * K + at, value.to(y.dtype.element_ty), mask=ok)


@triton.jit
def added(left, value, rounded, scale, factor):
    """factor * (left + scale * value), as two launches more would compute it, the value rounded to a type between."""
    return (left + scale * value.to(rounded.dtype.element_ty).to(tl.float32)) * factor


@triton.jit(do_not_specialize=["tokens"])
def norm_arranged(
    to, x, gain, left, tokens, eps, K: tl.constexpr, C: tl.constexpr, LEFT: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """RMS norm of rows into the order of `fragments.arrange`; a program a row, of which those beyond the last are zero."""
    row = tl.program_id(0)
    column = tl.arange(0, C)
    value = normed_row(x, gain, left, row, tokens, eps, K, C, LEFT, PARTS, PDL)
    tl.store(to + place_of(row, column, K), value.to(to.dtype.element_ty), mask=column < (K + 255) // 256 * 256)


@triton.jit(do_not_specialize=["runs"])
def gated_norm_rows(out, y, z, gain, runs, K, eps, GROUPS: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    run = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    run_ok = (run < runs)[:, None]
    column = tl.arange(0, C)
    square = tl.zeros([R, C], tl.float32)
    if K <= C:
        # One tile is all: what was read for the sum is still in registers.
        at = run[:, None] * K + column[None, :]
        ok = run_ok & (column < K)[None, :]
        u = _gate(y, z, at, ok)
        weight = tl.load(gain + (run % GROUPS)[:, None] * K + column[None, :], mask=ok, other=0.0)
        scale = 1.0 / tl.sqrt(tl.sum(u * u, 1)[:, None] / K + eps)
        tl.store(out + at, (u * scale * weight).to(out.dtype.element_ty), mask=ok)
        return
    for start in range(0, K, C):
        at = run[:, None] * K + (start + column)[None, :]
        ok = run_ok & (start + column < K)[None, :]
        u = _gate(y, z, at, ok)
        square += u * u
    scale = 1.0 / tl.sqrt(tl.sum(square, 1)[:, None] / K + eps)
    for start in range(0, K, C):
        at = run[:, None] * K + (start + column)[None, :]
        ok = run_ok & (start + column < K)[None, :]
        weight = tl.load(gain + (run % GROUPS)[:, None] * K + (start + column)[None, :], mask=ok, other=0.0)
        tl.store(out + at, (_gate(y, z, at, ok) * scale * weight).to(out.dtype.element_ty), mask=ok)


@triton.jit
def _gate(y, z, at, ok):
    gate = tl.load(z + at, mask=ok, other=0.0).to(tl.float32)
    return tl.load(y + at, mask=ok, other=0.0).to(tl.float32) * activate(gate, "silu")


@triton.jit
def largest_rows(y, x, N, deviations, C: tl.constexpr):
    """A program a row: y = max(x - mean - deviations * std, 0)."""
    row = tl.program_id(0).to(tl.int64) * N
    column = tl.arange(0, C)
    total = tl.zeros([C], tl.float32)
    for start in range(0, N, C):
        at = start + column
        total += tl.load(x + row + at, mask=at < N, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / N
    square = tl.zeros([C], tl.float32)
    for start in range(0, N, C):
        at = start + column
        centred = tl.load(x + row + at, mask=at < N, other=0.0).to(tl.float32) - mean
        square += tl.where(at < N, centred * centred, 0.0)
    bound = mean + deviations * tl.sqrt(tl.sum(square, 0) / N)
    for start in range(0, N, C):
        at = start + column
        above = tl.load(x + row + at, mask=at < N, other=0.0).to(tl.float32) - bound
        tl.store(y + row + at, tl.where(above > 0, above, above * 0.0).to(y.dtype.element_ty), mask=at < N)


def shape_of(k: int) -> tuple[int, int]:
    """Columns at a time, and runs to a program: a whole hidden state to one, several heads share one."""
    columns = min(power_of_two(k), _TILE)
    return columns, 1 if columns >= 1024 else 1024 // columns


def build_gated_norm(site: Site, node: Node) -> Launch:
    """GATED_NORM: y and z `[T, groups * k]`, gain `[groups, k]` float32."""
    spec: GatedNormSpec = node.spec
    y, z, gain = node.inputs
    source, gate, target = site.slot(y), site.slot(z), site.slot(node.outputs[0])  # type: ignore[arg-type]
    weight = site.vector(gain)  # type: ignore[arg-type]
    axis, _ = dims(node.outputs[0])
    return lambda batch: gated_norm(site, spec, batch.count(axis), target, source, gate, weight)


def gated_norm(site: Site, spec: GatedNormSpec, rows: int, out: Slot, y: Slot, z: Slot, gain: torch.Tensor) -> None:
    """Launches it on so many rows."""
    columns, runs_each = shape_of(spec.k)
    runs = rows * spec.groups
    site.launch(
        gated_norm_rows, (cdiv(runs, runs_each),), out.tensor, y.tensor, z.tensor, gain, runs, spec.k, spec.eps,
        GROUPS=spec.groups, R=runs_each, C=columns,
    )  # fmt: skip


def build_norm(site: Site, node: Node, onto: Onto | None = None) -> Launch:
    """NORM: x `[T, groups * k]` float32 or the compute type, gain and bias `[k]` float32."""
    spec: NormSpec = node.spec
    x, *gains = node.inputs
    source, rounded = site.slot(x), site.slot(node.outputs[0])  # type: ignore[arg-type]
    stream, target = (rounded, rounded) if onto is None else (site.slot(onto.stream), site.slot(onto.out))
    scale, factor = (1.0, 1.0) if onto is None else (onto.scale, onto.factor)
    vectors = [site.vector(g) for g in gains]  # type: ignore[arg-type]
    axis, _ = dims(node.outputs[0])
    columns, runs_each = shape_of(spec.k)
    left_parts = site.left_parts(x)  # type: ignore[arg-type]

    def run(batch: Batch) -> None:
        runs = batch.count(axis) * spec.groups
        left, constants = (
            nothing(source.tensor) if left_parts is None else left_parts.take(source.tensor, spec.k <= columns)
        )
        site.launch(
            norm_rows, (cdiv(runs, runs_each),), target.tensor, source.tensor, vectors[0], vectors[-1], stream.tensor,
            rounded.tensor, left, runs, spec.k, spec.eps, scale, factor, LAYER=spec.kind == "layer", ADDS=onto is not None,
            R=runs_each, C=columns, **constants,
            warps=8 if columns > 2048 else 4, early=starts_early(site),
        )  # fmt: skip

    return run


def build_largest(site: Site, node: Node) -> Launch:
    """LARGEST: x and y `[T, n]`."""
    spec: LargestSpec = node.spec
    source, target = site.slot(node.inputs[0]), site.slot(node.outputs[0])  # type: ignore[arg-type]
    axis, _ = dims(node.outputs[0])
    columns, _ = shape_of(spec.n)
    return lambda batch: site.launch(
        largest_rows, (batch.count(axis),), target.tensor, source.tensor, spec.n, spec.deviations, C=columns
    )


def arranger(site: Site, node: Node) -> Callable[[Slot, Batch, int], None] | None:
    """Puts a norm's result where kernels read it (`linear/maps.py: Arrange`)."""
    spec: NormSpec = node.spec
    if spec.kind != "rms" or spec.groups != 1 or spec.k > _MOST_ARRANGED:
        return None
    source, gain = site.slot(node.inputs[0]), site.vector(node.inputs[1])  # type: ignore[arg-type]
    left_parts = site.left_parts(node.inputs[0])  # type: ignore[arg-type]
    axis, _ = dims(node.outputs[0])

    def fill(to: Slot, batch: Batch, width: int) -> None:
        left, constants = nothing(source.tensor) if left_parts is None else left_parts.take(source.tensor)
        count, padded = batch.count(axis), cdiv(spec.k, 256) * 256
        kernel, shape = norm_arranged, {}
        if not width:
            kernel, shape = ring_x.norm_arranged, {"KP": padded}
        elif width in wgmma_x.WIDTHS:
            kernel, shape = wgmma_x.norm_arranged, {"BT": width}
        site.launch(
            kernel, (width or count,), to.tensor, source.tensor, gain, left, count, spec.eps, **shape, **constants,
            K=spec.k, C=power_of_two(padded), warps=8 if spec.k > 2048 else 4, early=starts_early(site),
        )  # fmt: skip

    return fill


def _accepts(spec: NormSpec) -> str | None:
    return None if spec.kind in ("rms", "layer") else f"needs a norm of kind rms or layer, got {spec.kind}"


IMPLEMENTATIONS = (
    Implementation(NORM, "rows", build_norm, _accepts),
    Implementation(GATED_NORM, "rows", build_gated_norm),
    Implementation(LARGEST, "rows", build_largest),
)
