"""Rows of several residual streams (`ops/streams.py`), float32.

A thread of the mix owns one column of a row in all its streams, so that each value is read once; about 20 registers, no
threadgroup memory. The others, twice a model or a few times a layer, are MLX's operations.
"""

from __future__ import annotations

import mlx.core as mx

from quarrel.mlx_backend.runtime.kernel import Kernel
from quarrel.mlx_backend.runtime.launch import Batch, Launch, Site, cdiv, evaluated
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.ops.streams import MATCH_STREAMS, MIX_STREAMS, PICK_STREAMS, MatchSpec, MixSpec, PickSpec

_THREADS = 64

_MIX = Kernel(
    "quarrel_mix_streams",
    ("base", "x", "coefs", "offset"),
    ("y",),
    """
  const int column = int(thread_position_in_grid.x), t = int(threadgroup_position_in_grid.y);
  if (column >= N) return;
  float read[INPUTS];
  UNROLL for (int i = 0; i < INPUTS; i++) read[i] = x[ulong(t * INPUTS + i) * N + column];
  UNROLL for (int j = 0; j < STREAMS; j++) {
    const ulong at = ulong(t * STREAMS + j) * N + column;
    float sum = base[at];
    UNROLL for (int i = 0; i < INPUTS; i++) {
      const float by = offset[0] + (COEFS ? float(coefs[(t * STREAMS + j) * INPUTS + i]) : 0.0f);
      if (j >= FIRST) sum += by * read[i];
    }
    y[at] = sum;
  }
""",
)


def build_pick(site: Site, node: Node) -> Launch:
    """PICK_STREAMS: x `[T, streams * n]`, gain `[n]` float32."""
    spec: PickSpec = node.spec
    gain = evaluated(mx.tile(site.vector(node.inputs[1]).reshape(-1), spec.count))  # type: ignore[arg-type]
    start, stop = spec.first * spec.n, (spec.first + spec.count) * spec.n
    return lambda batch, x: [x[:, start:stop] * gain]


def build_mix(site: Site, node: Node) -> Launch:
    """MIX_STREAMS: base `[T, streams * n]`, x `[T, inputs * n]`, coefs `[T, streams * inputs]`."""
    spec: MixSpec = node.spec
    offset = mx.array([spec.offset], mx.float32)
    template = [("N", spec.n), ("STREAMS", spec.streams), ("INPUTS", spec.inputs)]
    template += [("COEFS", int(spec.coefs)), ("FIRST", spec.first)]

    def run(batch: Batch, base: mx.array, x: mx.array, *coefs: mx.array) -> list[mx.array]:
        groups = (cdiv(spec.n, _THREADS), base.shape[0])
        read = [base, x, *(coefs or (base,)), offset]
        return _MIX(read, [base.shape], [mx.float32], groups, (_THREADS,), template)

    return run


def build_match(site: Site, node: Node) -> Launch:
    """MATCH_STREAMS: ref `[T, n]` float32, x `[T, (streams - 1) * n]`."""
    spec: MatchSpec = node.spec

    def run(batch: Batch, ref: mx.array, x: mx.array) -> list[mx.array]:
        first, others = (a.astype(mx.float32).reshape(a.shape[0], -1, spec.n) for a in (ref, x))
        target, own = (mx.mean(mx.square(a), axis=2, keepdims=True) for a in (first, others))
        y = mx.concatenate([first, others * mx.sqrt(target / mx.maximum(own, spec.least))], 1)
        return [mx.mean(y, axis=1) if spec.mean else y.reshape(ref.shape[0], spec.out_width)]

    return run


IMPLEMENTATIONS = (
    Implementation(PICK_STREAMS, "MLX's operations", build_pick),
    Implementation(MIX_STREAMS, "a column of all streams a thread", build_mix),
    Implementation(MATCH_STREAMS, "MLX's operations", build_match),
)
