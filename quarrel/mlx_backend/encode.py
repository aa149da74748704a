"""What encoders need: attention in both directions over the sequence itself, a row added to all, means of rows.

Attention is the kernel of `flash.py` with keys where the queries lie; the row is an elementwise operation of MLX. A mean is
summed by one thread a column, first row first, so that it is the same in every batch.
"""

from __future__ import annotations

import mlx.core as mx

from quarrel.mlx_backend.flash import Flash, refuses
from quarrel.mlx_backend.kernel import Kernel
from quarrel.mlx_backend.runtime import Launch, Live, Site, cdiv
from quarrel.ops.encode import ADD_ROW, ENCODE, MEAN_ROWS, EncodeSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation

_THREADS = 64

_MEAN = """
  const int column = int(thread_position_in_grid.x), s = int(threadgroup_position_in_grid.y);
  if (column >= K) return;
  const int begin = starts[s], end = starts[s + 1];
  float sum = 0.0f;
  for (int row = begin; row < end; row++) sum += x[ulong(row) * K + column];
  y[ulong(s) * K + column] = sum / float(max(end - begin, 1));
"""


def build_encode(site: Site, node: Node) -> Launch:
    """ENCODE: q, k and v `[T, heads * head_dim]`, query_start `[S + 1]`."""
    spec: EncodeSpec = node.spec
    flash = Flash(spec.n_heads, spec.n_heads, spec.head_dim, spec.scale, site.act, paged=False)

    def run(live: Live, q: mx.array, k: mx.array, v: mx.array, query_start: mx.array) -> list[mx.array]:
        return [flash(q, k, v, query_start, live.longest)]

    return run


def build_add_row(site: Site, node: Node) -> Launch:
    """ADD_ROW: x `[T, n]` float32, row `[n]`."""
    row = site.vector(node.inputs[1])  # type: ignore[arg-type]

    def run(live: Live, x: mx.array) -> list[mx.array]:
        return [x + row]

    return run


def build_mean_rows(site: Site, node: Node) -> Launch:
    """MEAN_ROWS: x `[T, k]` float32, query_start `[S + 1]`."""
    k: int = node.spec.k
    kernel = Kernel("quarrel_mean_rows", ("x", "starts"), ("y",), _MEAN)

    def run(live: Live, x: mx.array, query_start: mx.array) -> list[mx.array]:
        seqs = query_start.shape[0] - 1
        return kernel([x, query_start], [(seqs, k)], [mx.float32], (cdiv(k, _THREADS), seqs), (_THREADS,), [("K", k)])

    return run


def _accepts(spec: EncodeSpec) -> str | None:
    return refuses(spec.n_heads, spec.n_heads, spec.head_dim)


IMPLEMENTATIONS = (
    Implementation(ENCODE, "SIMD-group matrices", build_encode, _accepts),
    Implementation(ADD_ROW, "MLX's addition", build_add_row),
    Implementation(MEAN_ROWS, "a column a lane", build_mean_rows),
)
