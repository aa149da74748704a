"""Elementwise ops on `[T, n]`, flat: activations, sums, cap; and `activate`, which other kernels fuse.

Everything is computed in float32 and rounded once on the way out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from quarrel.ops.activation import CAP, CLAMP, GATED, PLAIN, GatedSpec
from quarrel.ops.encode import ADD_ROW
from quarrel.ops.linear import ADD
from quarrel.ops.position import BY_POSITION, ByPositionSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.triton_backend.formats.int8x2 import store_int8x2
from quarrel.triton_backend.linear.left_parts import stream_at
from quarrel.triton_backend.runtime.launch import cdiv
from quarrel.triton_backend.runtime.site import Batch, Launch, Site, dims, starts_early

BLOCK = 1024
BLOCKS = 8
"""Of 32 columns, that a program rounds."""


@triton.jit
def normed_row(
    x, gain, left, row, tokens, eps, K: tl.constexpr, C: tl.constexpr, LEFT: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """RMS norm of a row of float32, [C]; zeros in a row beyond the last. Waits for x, or its parts (`left_parts.py`)."""
    column = tl.arange(0, C)
    weight = tl.load(gain + column, mask=column < K, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    there = K * tl.minimum(tokens - row, 1)  # columns: none, beyond the last row
    row = tl.minimum(row, tokens - 1)
    value = stream_at(x, left, row, column, column < there, column < K, K, LEFT, PARTS)
    return value * (1.0 / tl.sqrt(tl.sum(value * value, 0) / K + eps)) * weight


@triton.jit
def tanh(x):
    """To a few ulp everywhere: an odd series near zero, where the exponential form cancels."""
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    s = x * x
    near = 1.0 + s * (-1.0 / 3 + s * (2.0 / 15 + s * (-17.0 / 315 + s * (62.0 / 2835 - s * (1382.0 / 155925)))))
    return tl.where(s < 0.09, x * near, tl.where(x < 0, -far, far))


@triton.jit
def normal_tail(x):
    """Q(x) for x >= 0: NORMAL_TAIL of `ops/activation.py`, which Triton wants written out."""
    t = 1.0 / (1.0 + 0.3535533905932738 * x)
    p = 0.899700557 + t * (-1.84695262 + t * (1.52883029 + t * (-0.579644331 + t * 0.0833509549)))
    p = -1.95829297 + t * (0.992187063 + t * (0.444800361 + t * (-0.25712667 + t * p)))
    return t * tl.exp(p - 0.5 * x * x)


@triton.jit
def activate(x, KIND: tl.constexpr):
    """The activation of float32 values."""
    if KIND == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif KIND == "sigmoid":
        y = 1.0 / (1.0 + tl.exp(-x))
    elif KIND == "identity":
        y = x
    elif KIND == "relu2":
        y = tl.where(x > 0, x * x, x * 0.0)
    elif KIND == "gelu_quick":
        y = x / (1.0 + tl.exp(-1.702 * x))
    elif KIND == "gelu_erf":
        above = normal_tail(tl.abs(x))
        y = x * tl.where(x < 0, above, 1.0 - above)
    else:
        tl.static_assert(KIND == "gelu_tanh", "unknown activation")
        # As x times a sigmoid: 1 + tanh would cancel.
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    return y


@triton.jit
def oai(gate, up):
    """gpt-oss's, of float32 values; a NaN stays one."""
    gate = tl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)
    up = tl.maximum(up, -7.0, propagate_nan=tl.PropagateNan.ALL)
    up = tl.minimum(up, 7.0, propagate_nan=tl.PropagateNan.ALL)
    return gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)


@triton.jit
def gated_flat(y, gate, up, size, KIND: tl.constexpr, BLOCK: tl.constexpr, SHARE: tl.constexpr, PDL: tl.constexpr):
    """SHARE: neighbours that have one gate."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < size
    if SHARE > 1:
        g = tl.load(gate + at // SHARE, mask=ok, other=0.0).to(tl.float32)
    else:
        g = tl.load(gate + at, mask=ok, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(y + at, (activate(g, KIND) * u).to(y.dtype.element_ty), mask=ok)


@triton.jit
def gated_columns(
    y, gate, up, size, N, WIDTH: tl.constexpr, START: tl.constexpr, KIND: tl.constexpr, PER_ROW: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`gated_flat` with columns START to START + N of up `[.., WIDTH]`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < size
    g = tl.load(gate + (at // N if PER_ROW else at), mask=ok, other=0.0).to(tl.float32)
    u = tl.load(up + at // N * WIDTH + START + at % N, mask=ok, other=0.0).to(tl.float32)
    tl.store(y + at, (activate(g, KIND) * u).to(y.dtype.element_ty), mask=ok)


@triton.jit
def gated_int8x2(
    to, y, gate, up, N: tl.constexpr, START: tl.constexpr, KIND: tl.constexpr, B: tl.constexpr, PLAIN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`gated_columns` of one row, some or all, as int8x2 into `to`, and with PLAIN into y; a program has B blocks of 32."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block = tl.program_id(0) * B + tl.arange(0, B)
    ok = block < N // 32
    at = block[:, None, None] * 32 + tl.arange(0, 2)[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    g = tl.load(gate + at, mask=ok[:, None, None], other=0.0).to(tl.float32)
    u = tl.load(up + START + at, mask=ok[:, None, None], other=0.0).to(tl.float32)
    value = (activate(g, KIND) * u).to(y.dtype.element_ty)
    if PLAIN:
        tl.store(y + at, value, mask=ok[:, None, None])
    store_int8x2(to, value.to(tl.float32), block, ok, N)


@triton.jit
def plain_flat(y, x, size, KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(y + at, activate(value, KIND).to(y.dtype.element_ty), mask=at < size)


@triton.jit
def add_row_flat(y, x, row, size, N, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < size
    value = tl.load(x + at, mask=ok, other=0.0).to(tl.float32) + tl.load(row + at % N, mask=ok, other=0.0)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=ok)


@triton.jit
def add_flat(y, a, b, size, scale, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < size
    left = tl.load(a + at, mask=ok, other=0.0).to(tl.float32)
    right = tl.load(b + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(y + at, (left + scale * right).to(y.dtype.element_ty), mask=ok)


@triton.jit
def cap_flat(y, x, size, scale, limit, CAPPED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < size
    value = tl.load(x + at, mask=ok, other=0.0).to(tl.float32) * scale
    if CAPPED:
        value = limit * tanh(value / limit)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=ok)


@triton.jit
def clamp_flat(y, x, size, low, high, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < size
    value = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
    value = tl.where(value < low, low, value)  # a NaN stays one
    value = tl.where(value > high, high, value)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=ok)


@triton.jit
def by_position_rows(y, positions, factors, rows, n, size, shift, BLOCK: tl.constexpr):
    """y[t] = factors[min((positions[t] + shift) // size, n - 1)]."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = (tl.load(positions + row, mask=row < rows, other=0) + shift) // size
    tl.store(y + row, tl.load(factors + tl.maximum(tl.minimum(part, n - 1), 0)), mask=row < rows)


def _build(kernel: Any, site: Site, node: Node, *scalars: float, **constants: Any) -> Launch:
    arrays = [site.slot(v) for v in (node.outputs[0], *node.inputs)]  # type: ignore[arg-type]
    axis, width = dims(node.outputs[0])

    def run(batch: Batch) -> None:
        size = batch.count(axis) * width
        tensors = [a.tensor for a in arrays]
        site.launch(
            kernel, (cdiv(size, BLOCK),), *tensors, size, *scalars, **constants, BLOCK=BLOCK, early=starts_early(site)
        )

    return run


def build_gated(site: Site, node: Node) -> Launch:
    """GATED: gate `[T, n]` or `[T, 1]`, up `[T, n]`, or of that some columns."""
    spec: GatedSpec = node.spec
    if spec.up_width != spec.n:
        columns = {"WIDTH": spec.width, "START": spec.start}
        many = _build(gated_columns, site, node, spec.n, **columns, KIND=spec.activation, PER_ROW=spec.per_row)
        # Nothing that a step of one row fuses has only some columns of up.
        return many if spec.per_row or spec.n % 32 else build_rounded(site, node, many)
    return _build(gated_flat, site, node, KIND=spec.activation, SHARE=spec.n if spec.per_row else 1)


def build_rounded(site: Site, node: Node, many: Launch) -> Launch:
    """GATED that leaves one row as int8x2, if matvecs read it so."""
    to, plain = site.int8x2_target(node.outputs[0])
    if to is None:
        return many
    spec: GatedSpec = node.spec
    gate, up, y = (site.slot(v) for v in (*node.inputs, node.outputs[0]))  # type: ignore[arg-type]
    axis, _ = dims(node.outputs[0])

    def one_row() -> None:
        site.launch(
            gated_int8x2, (cdiv(spec.n // 32, BLOCKS),), to, y.tensor, gate.tensor, up.tensor, N=spec.n,
            START=spec.start, KIND=spec.activation, B=BLOCKS, PLAIN=plain, early=starts_early(site),
        )  # fmt: skip

    return lambda batch: one_row() if batch.count(axis) == 1 else many(batch)


def build_add(site: Site, node: Node) -> Launch:
    """ADD: a float32, b the compute type."""
    return _build(add_flat, site, node, node.spec.scale)


def build_cap(site: Site, node: Node) -> Launch:
    """CAP: logits."""
    return _build(cap_flat, site, node, node.spec.scale, node.spec.cap, CAPPED=node.spec.cap != 0.0)


def build_clamp(site: Site, node: Node) -> Launch:
    """CLAMP: x `[T, n]`."""
    return _build(clamp_flat, site, node, node.spec.low, node.spec.high)


def build_plain(site: Site, node: Node) -> Launch:
    """PLAIN: x `[T, n]`."""
    return _build(plain_flat, site, node, KIND=node.spec.activation)


def build_add_row(site: Site, node: Node) -> Launch:
    """ADD_ROW: x `[T, n]` float32 and a vector `[n]`."""
    x, ref = node.inputs
    source, target, row = site.slot(x), site.slot(node.outputs[0]), site.vector(ref)  # type: ignore[arg-type]
    axis, width = dims(node.outputs[0])

    def run(batch: Batch) -> None:
        size = batch.count(axis) * width
        site.launch(add_row_flat, (cdiv(size, BLOCK),), target.tensor, source.tensor, row, size, width, BLOCK=BLOCK)

    return run


def build_by_position(site: Site, node: Node) -> Launch:
    """BY_POSITION: positions `[T]` int32, factors `[n]` float32."""
    spec: ByPositionSpec = node.spec
    source, target = site.slot(node.inputs[0]), site.slot(node.outputs[0])  # type: ignore[arg-type]
    factors = site.const(node.inputs[1])  # type: ignore[arg-type]
    axis, _ = dims(node.outputs[0])

    def run(batch: Batch) -> None:
        rows = batch.count(axis)
        site.launch(
            by_position_rows, (cdiv(rows, BLOCK),), target.tensor, source.tensor, factors, rows, spec.n, spec.size,
            spec.shift, BLOCK=BLOCK,
        )  # fmt: skip

    return run


def _known(*kinds: str) -> Callable[[Any], str | None]:
    def accepts(spec: Any) -> str | None:
        known = spec.activation in kinds
        return None if known else f"needs one of the activations {', '.join(kinds)}, got {spec.activation}"

    return accepts


IMPLEMENTATIONS = (
    Implementation(GATED, "flat", build_gated, _known("silu", "gelu_tanh", "gelu_erf", "sigmoid", "identity")),
    Implementation(PLAIN, "flat", build_plain, _known("relu2", "gelu_erf", "gelu_tanh", "gelu_quick")),
    Implementation(ADD_ROW, "flat", build_add_row),
    Implementation(ADD, "flat", build_add),
    Implementation(CAP, "flat", build_cap),
    Implementation(CLAMP, "flat", build_clamp),
    Implementation(BY_POSITION, "table", build_by_position),
)
