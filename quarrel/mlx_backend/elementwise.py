"""Elementwise ops on `[T, n]`: the gated activations as a kernel, whose `activate` others fuse; the rest by MLX.

Computed in float32 and rounded once on the way out. The kernel's call moves each array once and does little else, so one
thread takes four neighbours (loads of 8 or 16 bytes) and nothing is kept in threadgroup memory. `mx.compile` makes one such
kernel of each of the others too, the same bytes, so that there is nothing to win.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce

import mlx.core as mx

from quarrel.mlx_backend.runtime.kernel import Kernel
from quarrel.mlx_backend.runtime.launch import Batch, Launch, Site, cdiv
from quarrel.ops.activation import CAP, CLAMP, GATED, NORMAL_TAIL, PLAIN, CapSpec, ClampSpec, GatedSpec
from quarrel.ops.encode import ADD_ROW
from quarrel.ops.linear import ADD
from quarrel.ops.position import BY_POSITION, ByPositionSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation

_THREADS = 256
_EACH = 4

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "relu2": 2, "gelu_erf": 3, "sigmoid": 4, "identity": 5}
"""Activation -> its number in the Metal text."""

ACTIVATE = """
template <int KIND>
inline float activate(float x) {
    if (KIND == 0) {
        return x / (1.0f + precise::exp(-x));
    }
    if (KIND == 3) {
        // The normal distribution's tail, NORMAL_TAIL of ops/activation.py: 1 + erf would cancel.
        const float t = 1.0f / (1.0f + 0.35355339f * metal::abs(x));
        float p = @LAST;
@HORNER
        const float above = t * precise::exp(p - 0.5f * x * x);
        return x * (x < 0.0f ? above : 1.0f - above);
    }
    if (KIND == 4) {
        return 1.0f / (1.0f + precise::exp(-x));
    }
    if (KIND == 5) {
        return x;
    }
    // GELU with tanh as x times a sigmoid: 1 + tanh would cancel.
    return x / (1.0f + precise::exp(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
}
""".replace("@LAST", f"{NORMAL_TAIL[-1]}f").replace(
    "@HORNER", "\n".join(f"        p = p * t + {c}f;" for c in NORMAL_TAIL[-2::-1])
)

_GATED = Kernel(
    "quarrel_gated",
    ("gate", "up"),
    ("y",),
    """
    uint size = uint(up_shape[0]) * uint(N);
    uint first = thread_position_in_grid.x * 4;
    for (uint i = first; i < metal::min(first + 4, size); i++) {
        uint from = WIDTH ? i / N * uint(WIDTH) + uint(START) + i % N : i;
        y[i] = T(activate<KIND>(float(gate[PER_ROW ? i / N : i])) * float(up[from]));
    }
""",
    ACTIVATE,
)


def build_gated(site: Site, node: Node) -> Launch:
    """GATED: gate `[T, n]` or `[T, 1]`, up `[T, n]`, or of that some columns."""
    spec: GatedSpec = node.spec
    template = [("T", site.act), ("KIND", ACTIVATIONS[spec.activation]), ("PER_ROW", int(spec.per_row))]
    template += [("N", spec.n), ("WIDTH", spec.width), ("START", spec.start)]

    def run(batch: Batch, gate: mx.array, up: mx.array) -> list[mx.array]:
        shape = (up.shape[0], spec.n)
        groups = (cdiv(shape[0] * spec.n, _THREADS * _EACH),)
        return _GATED([gate, up], [shape], [site.act], groups, (_THREADS,), template)

    return run


def _gelu_erf(x: mx.array) -> mx.array:
    size = mx.abs(x)
    t = 1.0 / (1.0 + math.sqrt(0.125) * size)
    p = reduce(lambda p, c: p * t + c, NORMAL_TAIL[-2::-1], NORMAL_TAIL[-1])
    above = t * mx.exp(p - 0.5 * size * size)
    return x * mx.where(x < 0.0, above, 1.0 - above)


BY_MLX: dict[str, Callable[[mx.array], mx.array]] = {
    "silu": lambda x: x * mx.sigmoid(x),
    "gelu_tanh": lambda x: x * mx.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)),
    "gelu_erf": _gelu_erf,
    "gelu_quick": lambda x: x * mx.sigmoid(1.702 * x),
    "relu2": lambda x: mx.square(mx.maximum(x, 0.0)),
    "sigmoid": mx.sigmoid,
    "identity": lambda x: x,
}
"""Activations of float32 values by MLX's operations, which `mx.compile` makes one kernel of."""


def build_plain(site: Site, node: Node) -> Launch:
    """PLAIN: x `[T, n]`."""
    activate = BY_MLX[node.spec.activation]
    function = mx.compile(lambda x: activate(x.astype(mx.float32)).astype(site.act), shapeless=True)
    return lambda batch, x: [function(x)]


def build_cap(site: Site, node: Node) -> Launch:
    """CAP: x `[T, n]` float32."""
    spec: CapSpec = node.spec

    def function(x: mx.array) -> mx.array:
        x = x * spec.scale
        return spec.cap * mx.tanh(x / spec.cap) if spec.cap else x

    compiled = mx.compile(function, shapeless=True)
    return lambda batch, x: [compiled(x)]


def build_clamp(site: Site, node: Node) -> Launch:
    """CLAMP: x `[T, n]`."""
    spec: ClampSpec = node.spec
    function = mx.compile(lambda x: mx.clip(x.astype(mx.float32), spec.low, spec.high).astype(site.act), shapeless=True)
    return lambda batch, x: [function(x)]


def build_add(site: Site, node: Node) -> Launch:
    """ADD: a `[T, n]` float32, b `[T, n]` of any type."""
    scale: float = node.spec.scale
    function = mx.compile(lambda a, b: a + b.astype(mx.float32) * scale, shapeless=True)
    return lambda batch, a, b: [function(a, b)]


def build_add_row(site: Site, node: Node) -> Launch:
    """ADD_ROW: x `[T, n]` float32, row `[n]`."""
    row = site.vector(node.inputs[1])  # type: ignore[arg-type]

    def run(batch: Batch, x: mx.array) -> list[mx.array]:
        return [x + row]

    return run


def build_by_position(site: Site, node: Node) -> Launch:
    """BY_POSITION: positions `[T]` int32, factors `[n]`."""
    spec: ByPositionSpec = node.spec
    factors = site.const(node.inputs[1])  # type: ignore[arg-type]

    def run(batch: Batch, positions: mx.array) -> list[mx.array]:
        part = mx.minimum((positions + spec.shift) // spec.size, spec.n - 1)
        return [mx.expand_dims(mx.take(factors, part), 1)]

    return run


IMPLEMENTATIONS = (
    Implementation(BY_POSITION, "MLX's operations", build_by_position),
    Implementation(GATED, "flat", build_gated),
    Implementation(PLAIN, "MLX's operations", build_plain),
    Implementation(CAP, "MLX's operations", build_cap),
    Implementation(CLAMP, "MLX's operations", build_clamp),
    Implementation(ADD, "MLX's operations", build_add),
    Implementation(ADD_ROW, "MLX's addition", build_add_row),
)
