"""Token embeddings out of packed weights, the rows whose results are wanted, and the mean of a sequence's rows.

A thread unpacks 16 values of a row (`formats.py`), so that a token costs its packed bytes in and 4 bytes a value out; about
40 registers, no threadgroup memory. The rows wanted are MLX's `take`, a copy at the speed of the bus. A mean
is summed by one thread a column, first row first, so that it is the same in every batch.
"""

from __future__ import annotations

import mlx.core as mx

from quarrel.mlx_backend.formats.layout import Packed
from quarrel.mlx_backend.formats.table import header
from quarrel.mlx_backend.runtime.kernel import Kernel
from quarrel.mlx_backend.runtime.launch import Batch, Launch, Site, cdiv, evaluated
from quarrel.ops.embedding import EMBEDDING, GATHER_ROWS, PUT_ROWS, EmbeddingSpec, GatherRowsSpec, PutRowsSpec
from quarrel.ops.encode import MEAN_ROWS
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation

_THREADS = 64

_SOURCE = """
  const int part = int(thread_position_in_grid.x), block = part / 2, h = part % 2, t = int(threadgroup_position_in_grid.y);
  if (block * 32 >= K) return;
  const int row = ids[t];
  typename decltype(w)::Q q[16];
  w.part(row, block, h, q);
  const float4 by = w.scales(row, block) * scale[0];
  UNROLL for (int i = 0; i < 16; i++) {
    const int column = block * 32 + h * 8 + (i & 7) + (i & 8) * 2;
    if (column < K) y[ulong(t) * K + column] = fma(i < 8 ? by.x : by.y, float(q[i]), i < 8 ? -by.z : -by.w);
  }
"""

_MEAN = """
  const int column = int(thread_position_in_grid.x), s = int(threadgroup_position_in_grid.y);
  if (column >= K) return;
  const int begin = starts[s], end = starts[s + 1];
  float sum = 0.0f;
  for (int row = begin; row < end; row++) sum += x[ulong(row) * K + column];
  y[ulong(s) * K + column] = sum / float(max(end - begin, 1));
"""


def _kernel(weight: Packed) -> Kernel:
    inputs = ("ids", *weight.inputs(), "scale")
    name = f"quarrel_embedding_{weight.format.name.lower()}"
    return Kernel(name, inputs, ("y",), weight.bind("K") + _SOURCE, header(weight.format))


def build_embedding(site: Site, node: Node) -> Launch:
    """EMBEDDING: ids `[T]` to rows of a packed `[n, k]`, float32."""
    spec: EmbeddingSpec = node.spec
    weight = site.weight(node.inputs[1])  # type: ignore[arg-type]
    kernel, scale = _kernel(weight), mx.array([spec.scale], mx.float32)

    def run(batch: Batch, ids: mx.array) -> list[mx.array]:
        groups = (cdiv(cdiv(spec.k, 32) * 2, _THREADS), ids.shape[0])
        shape = (ids.shape[0], spec.k)
        return kernel([ids, *weight.planes, scale], [shape], [mx.float32], groups, (_THREADS,), [("K", spec.k)])

    return run


def build_gather(site: Site, node: Node) -> Launch:
    """GATHER_ROWS: x `[T, k]`, rows `[R]`."""
    spec: GatherRowsSpec = node.spec
    if spec.n == 1:
        return lambda batch, x, rows: [mx.take(x, rows, axis=0)]
    each = evaluated(mx.arange(spec.n, dtype=mx.int32))

    def run(batch: Batch, x: mx.array, rows: mx.array) -> list[mx.array]:
        together = mx.take(x, rows[:, None] + each, axis=0)  # [R, n, k]
        return [together.mean(1) if spec.mean else together.reshape(rows.shape[0], spec.width)]

    return run


def build_put_rows(site: Site, node: Node) -> Launch:
    """PUT_ROWS: x `[T, k]`, rows `[T]`, source `[N, width]`."""
    spec: PutRowsSpec = node.spec

    def run(batch: Batch, x: mx.array, rows: mx.array, source: mx.array) -> list[mx.array]:
        new = mx.take(source[:, spec.start : spec.start + spec.k], mx.maximum(rows, 0), axis=0)
        return [mx.where(rows[:, None] >= 0, x + new if spec.add else new, x)]

    return run


def build_mean_rows(site: Site, node: Node) -> Launch:
    """MEAN_ROWS: x `[T, k]` float32, query_start `[S + 1]`."""
    k: int = node.spec.k
    kernel = Kernel("quarrel_mean_rows", ("x", "starts"), ("y",), _MEAN)

    def run(batch: Batch, x: mx.array, query_start: mx.array) -> list[mx.array]:
        seqs = query_start.shape[0] - 1
        return kernel([x, query_start], [(seqs, k)], [mx.float32], (cdiv(k, _THREADS), seqs), (_THREADS,), [("K", k)])

    return run


IMPLEMENTATIONS = (
    Implementation(EMBEDDING, "unpacked by lanes", build_embedding),
    Implementation(GATHER_ROWS, "MLX's take", build_gather),
    Implementation(PUT_ROWS, "MLX's take", build_put_rows),
    Implementation(MEAN_ROWS, "a column a lane", build_mean_rows),
)
