"""Rows picked by index: token embeddings out of packed weights, and the rows whose results are wanted.

A thread unpacks 16 values of a row (`formats.py`), so that a token costs its packed bytes in and 4 bytes a value out; about
40 registers, no threadgroup memory. The rows wanted are MLX's `take`, a copy at the speed of the bus.
"""

from __future__ import annotations

import mlx.core as mx

from quarrel.mlx_backend.formats import bind, header, plane_names
from quarrel.mlx_backend.kernel import Kernel
from quarrel.mlx_backend.pack import Packed
from quarrel.mlx_backend.runtime import Launch, Live, Site, cdiv
from quarrel.ops.embedding import EMBEDDING, GATHER_ROWS, EmbeddingSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation

_THREADS = 64

_SOURCE = """
  const int part = int(thread_position_in_grid.x), block = part / 2, h = part % 2, t = int(threadgroup_position_in_grid.y);
  if (block * 32 >= K) return;
  const int row = ids[t];
  decltype(w)::Q q[16];
  w.part(row, block, h, q);
  const float4 by = w.scales(row, block) * scale[0];
  UNROLL for (int i = 0; i < 16; i++) {
    const int column = block * 32 + h * 8 + (i & 7) + (i & 8) * 2;
    if (column < K) y[ulong(t) * K + column] = (i < 8 ? by.x : by.y) * float(q[i]) - (i < 8 ? by.z : by.w);
  }
"""


def _kernel(weight: Packed) -> Kernel:
    inputs = ("ids", *plane_names(weight.type), "scale")
    name = f"quarrel_embedding_{weight.type.name.lower()}"
    return Kernel(name, inputs, ("y",), bind(weight, "K") + _SOURCE, header(weight.type))


def build_embedding(site: Site, node: Node) -> Launch:
    """EMBEDDING: ids `[T]` to rows of a packed `[n, k]`, float32."""
    spec: EmbeddingSpec = node.spec
    weight = site.weight(node.inputs[1])  # type: ignore[arg-type]
    kernel, scale = _kernel(weight), mx.array([spec.scale], mx.float32)

    def run(live: Live, ids: mx.array) -> list[mx.array]:
        groups = (cdiv(cdiv(spec.k, 32) * 2, _THREADS), ids.shape[0])
        shape = (ids.shape[0], spec.k)
        return kernel([ids, *weight.planes, scale], [shape], [mx.float32], groups, (_THREADS,), [("K", spec.k)])

    return run


def build_gather(site: Site, node: Node) -> Launch:
    """GATHER_ROWS: x `[T, k]`, rows `[R]`."""
    return lambda live, x, rows: [mx.take(x, rows, axis=0)]


IMPLEMENTATIONS = (
    Implementation(EMBEDDING, "unpacked by lanes", build_embedding),
    Implementation(GATHER_ROWS, "MLX's take", build_gather),
)
