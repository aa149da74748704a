"""Elementwise ops on `[T, n]`, flat: activations, sums, cap; and `activate`, which other kernels fuse.

Computed in float32 and rounded once on the way out. A call moves each array once and does little else, so one thread takes
four neighbours (loads of 8 or 16 bytes) and nothing is kept in threadgroup memory.
"""

from __future__ import annotations

import mlx.core as mx

from quarrel.mlx_backend.kernel import Kernel
from quarrel.mlx_backend.runtime import Launch, Live, Site, cdiv
from quarrel.ops.activation import GATED
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation

_THREADS = 256
_EACH = 4

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "relu2": 2, "gelu_erf": 3}
"""Activation -> its number in the Metal text."""

ACTIVATE = """
// tanh to a few ulp everywhere: an odd series near zero, where the exponential form cancels.
inline float exact_tanh(float x) {
    float e = precise::exp(-2.0f * metal::abs(x));
    float far = (1.0f - e) / (1.0f + e);
    float s = x * x;
    float odd = -17.0f / 315 + s * (62.0f / 2835 - s * (1382.0f / 155925));
    float near = x * (1.0f + s * (-1.0f / 3 + s * (2.0f / 15 + s * odd)));
    return s < 0.09f ? near : (x < 0 ? -far : far);
}

template <int KIND>
inline float activate(float x) {
    if (KIND == 0) {
        return x / (1.0f + precise::exp(-x));
    }
    return 0.5f * x * (1.0f + exact_tanh(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}
"""

_GATED = Kernel(
    "quarrel_gated",
    ("gate", "up"),
    ("y",),
    """
    uint size = uint(gate_shape[0]) * uint(gate_shape[1]);
    uint first = thread_position_in_grid.x * 4;
    for (uint i = first; i < metal::min(first + 4, size); i++) {
        y[i] = T(activate<KIND>(float(gate[i])) * float(up[i]));
    }
""",
    ACTIVATE,
)


def build_gated(site: Site, node: Node) -> Launch:
    """GATED: gate and up `[T, n]`."""
    template = [("T", site.act), ("KIND", ACTIVATIONS[node.spec.activation])]

    def run(live: Live, gate: mx.array, up: mx.array) -> list[mx.array]:
        groups = (cdiv(gate.size, _THREADS * _EACH),)
        return _GATED([gate, up], [gate.shape], [site.act], groups, (_THREADS,), template)

    return run


IMPLEMENTATIONS = (Implementation(GATED, "flat", build_gated),)
