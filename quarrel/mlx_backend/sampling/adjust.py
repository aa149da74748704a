"""Logits with biases and penalties, by the contract of ops/adjust.py: a thread a token, which looks through its row's list.

bytes        a row of logits read and written once; its list of some 64 entries from the cache
threads      256; 20 registers
threadgroup  none
expected     1.2 MB a row of 150000 tokens (20 us on an M1), and 64 comparisons a thread, as long again
"""

from __future__ import annotations

import mlx.core as mx

from quarrel.mlx_backend.runtime.kernel import Kernel
from quarrel.mlx_backend.runtime.launch import Batch, Launch, Site, cdiv
from quarrel.ops.adjust import ADJUST, MOST
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation

_THREADS = 256

_ADJUST = Kernel(
    "quarrel_adjust",
    (
        "logits", "ids", "rows", "list_end", "list_ids", "list_counts", "list_biases",
        "repetition", "presence", "frequency", "mask_row", "masks",
    ),
    ("adjusted",),
    """
  const int n = logits_shape[1], id = int(thread_position_in_grid.x);
  const uint row = threadgroup_position_in_grid.y;
  if (id >= n) return;
  float x = logits[ulong(row) * n + id];
  if (metal::fabs(x) == INFINITY) x = -INFINITY;
  float count = ids[rows[row]] == id ? 1.0f : 0.0f, bias = 0.0f;
  const int end = list_end[row];
  for (int i = row > 0 ? list_end[row - 1] : 0; i < end; i++) {
    if (list_ids[i] == id) {
      count += list_counts[i];
      bias += list_biases[i];
    }
  }
  x += bias;
  if (count > 0.0f) {
    x = x > 0.0f ? x / repetition[row] : x * repetition[row];
    if (x > MOST) x = MOST;  // a NaN stays one
    x = x - count * frequency[row] - presence[row];
  }
  const int mask = mask_row[row], words = (n + 31) / 32;
  if (mask >= 0 && !metal::isnan(x) && !(uint(masks[ulong(mask) * words + id / 32]) >> (id % 32) & 1)) x = -INFINITY;
  adjusted[ulong(row) * n + id] = x;
""",
    f"constant constexpr float MOST = {MOST:g}f;\n",
)  # fmt: skip


def build_adjust(site: Site, node: Node) -> Launch:
    """ADJUST: logits `[R, n]` float32, ids `[T]`, rows `[R]`, and the lists, to logits `[R, n]`."""
    n: int = node.spec.n

    def run(batch: Batch, *given: mx.array) -> list[mx.array]:
        logits, ids, rows, end, *lists = given
        lists = [one if one.size else mx.zeros(1, one.dtype) for one in lists]  # no buffer is empty
        inputs, groups = [logits, ids, rows, end, *lists], (cdiv(n, _THREADS), logits.shape[0])
        return _ADJUST(inputs, [logits.shape], [mx.float32], groups, (_THREADS,))

    return run


IMPLEMENTATIONS = (Implementation(ADJUST, "a thread a token", build_adjust),)
