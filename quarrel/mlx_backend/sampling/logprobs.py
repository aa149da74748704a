"""The log probabilities of drawn tokens and of the best of their rows, by the contract of ops/logprobs.py.

Two launches: each SIMD-group lists the best of a run of 512 logits and sums exp(logit - its highest); a threadgroup a row
lists the best of the lists and puts the sums together. A key holds the rank of a logit above what its id lacks of the
largest, so that no two are equal; a list is `TOP` maxima, each of what lies below the one before. Sums are float32, some
1e-6 off, which is what their logarithm is off.

    bytes        a row of logits once; of its lists (4 % of its ids) 20 times what a thread holds, from the cache
    threads      256 for 8 runs, then 256 a row; 30 registers
    threadgroup  1.3 kB
    expected     600 kB a row (10 us on an M1), and 20 rounds of some 20 loads a thread for 150000 tokens, 20 us
"""

from __future__ import annotations

import mlx.core as mx

from quarrel.mlx_backend.runtime.kernel import Kernel
from quarrel.mlx_backend.runtime.launch import Batch, Launch, Site, cdiv
from quarrel.mlx_backend.runtime.metal import FINITE, RANK_OF
from quarrel.ops.logprobs import LOGPROBS
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation

_RUN = 512
_SIMDS = 8

_KEYS = """
// Of a logit: the greater the better, of equals the lower id. Never 0.
inline ulong key_of(float x, int id) {
  return ulong(rank_of(finite_or_least(x))) << 32 | (0xFFFFFFFFu - uint(id));
}

inline int id_of(ulong key) {
  return int(0xFFFFFFFFu - uint(key & 0xFFFFFFFFul));
}

// The greatest of the SIMD-group.
inline ulong greatest(ulong key) {
  const uint high = uint(key >> 32), top = simd_max(high);
  return ulong(top) << 32 | simd_max(high == top ? uint(key & 0xFFFFFFFFul) : 0u);
}
"""

_LIST = Kernel(
    "quarrel_logprobs_list",
    ("logits",),
    ("ids", "tops", "sums"),
    """
  const int n = logits_shape[1], lane = int(thread_index_in_simdgroup), runs = (n + RUN - 1) / RUN;
  const int run = int(threadgroup_position_in_grid.x) * SIMDS + int(simdgroup_index_in_threadgroup);
  const uint row = threadgroup_position_in_grid.y;
  if (run >= runs) return;
  const int begin = int(ulong(run) * RUN);
  ulong key[RUN / 32];
  float top = -INFINITY, sum = 0.0f;
  UNROLL for (int i = 0; i < RUN / 32; i++) {
    const int id = begin + i * 32 + lane;
    const float x = id < n ? finite_or_least(logits[ulong(row) * n + id]) : -INFINITY;
    key[i] = id < n ? key_of(x, id) : 0;
    top = metal::max(top, x);
  }
  top = simd_max(top);
  UNROLL for (int i = 0; i < RUN / 32; i++) {
    const int id = begin + i * 32 + lane;
    const float x = id < n ? finite_or_least(logits[ulong(row) * n + id]) : -INFINITY;
    if (x > -INFINITY) sum += precise::exp(x - top);
  }
  sum = simd_sum(sum);
  const uint at = row * runs + run;
  if (lane == 0) {
    tops[at] = top;
    sums[at] = sum;
  }
  ulong found = 0xFFFFFFFFFFFFFFFFul;
  for (int j = 0; j < TOP; j++) {
    ulong best = 0;
    UNROLL for (int i = 0; i < RUN / 32; i++) best = key[i] < found && key[i] > best ? key[i] : best;
    found = greatest(best);
    if (lane == 0) ids[ulong(at) * TOP + j] = found > 0 ? id_of(found) : -1;
  }
""",
    RANK_OF + FINITE + _KEYS,
)

_MERGE = Kernel(
    "quarrel_logprobs_merge",
    ("logits", "tokens", "ids", "tops", "sums"),
    ("logprobs", "best"),
    """
  const int n = logits_shape[1], runs = (n + RUN - 1) / RUN, tid = int(thread_index_in_threadgroup);
  const int lane = tid % 32, simd = tid / 32;
  const uint row = threadgroup_position_in_grid.x;
  const ulong from = ulong(row) * n, first_out = ulong(row) * (TOP + 1), listed = ulong(row) * TOP;
  const int token = tokens[row];
  if (token < 0) {
    for (int j = tid; j < TOP + 1; j += 32 * SIMDS) logprobs[first_out + j] = -INFINITY;
    for (int j = tid; j < TOP; j += 32 * SIMDS) best[listed + j] = 0;
    return;
  }
  threadgroup ulong lists[SIMDS * TOP];
  ulong found = 0xFFFFFFFFFFFFFFFFul;
  for (int j = 0; j < TOP; j++) {
    ulong next = 0;
    for (int i = tid; i < runs * TOP; i += 32 * SIMDS) {
      const int id = ids[ulong(row) * runs * TOP + i];
      const ulong key = id < 0 ? 0 : key_of(logits[from + id], id);
      next = key < found && key > next ? key : next;
    }
    found = greatest(next);
    if (lane == 0) lists[simd * TOP + j] = found;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simd > 0) return;
  float top = -INFINITY, sum = 0.0f;
  for (int i = lane; i < runs; i += 32) top = metal::max(top, tops[row * runs + i]);
  top = simd_max(top);
  for (int i = lane; i < runs; i += 32) {
    const float part = tops[row * runs + i];
    if (part > -INFINITY) sum += sums[row * runs + i] * precise::exp(part - top);
  }
  const float total = precise::log(simd_sum(sum));
  found = 0xFFFFFFFFFFFFFFFFul;
  for (int j = 0; j < TOP; j++) {
    ulong next = 0;
    for (int i = lane; i < SIMDS * TOP; i += 32) next = lists[i] < found && lists[i] > next ? lists[i] : next;
    found = greatest(next);
    if (lane == 0) {
      best[listed + j] = id_of(found);
      logprobs[first_out + 1 + j] = finite_or_least(logits[from + id_of(found)]) - top - total;
    }
  }
  if (lane == 0) logprobs[first_out] = finite_or_least(logits[from + token]) - top - total;
""",
    RANK_OF + FINITE + _KEYS,
)


def build_logprobs(site: Site, node: Node) -> Launch:
    """LOGPROBS: logits `[R, n]` float32 and tokens `[R]` int32 to log probabilities `[R, 1 + top]` and ids `[R, top]`."""
    top: int = node.spec.top
    runs = cdiv(node.spec.n, _RUN)
    template = [("RUN", _RUN), ("SIMDS", _SIMDS), ("TOP", top)]

    def run(batch: Batch, logits: mx.array, tokens: mx.array) -> list[mx.array]:
        rows = logits.shape[0]
        shapes, kinds = [(rows, runs, top), (rows, runs), (rows, runs)], [mx.int32, mx.float32, mx.float32]
        lists = _LIST([logits], shapes, kinds, (cdiv(runs, _SIMDS), rows), (32 * _SIMDS,), template)
        inputs, shapes = [logits, tokens, *lists], [(rows, 1 + top), (rows, top)]
        return _MERGE(inputs, shapes, [mx.float32, mx.int32], (rows,), (32 * _SIMDS,), template)

    return run


IMPLEMENTATIONS = (Implementation(LOGPROBS, "lists of runs", build_logprobs),)
