"""The next token of each row, by the contract of ops/sample.py: thresholds found exactly, ties kept, no sort.

Three launches: the best logit of each of P chunks of a row; weights e = exp((logit - best) / temperature); and a
threadgroup a row that finds the thresholds and draws. Metal has no float64, so weights are whole numbers, 2^40 e: their
sums are exact in 64 bits, the same in any order, and closer to the reference's than float32 sums are. A logit is ordered by
its bits (`rank_of`), so top_k and top_p are searches for the largest 32-bit rank whose tail still holds enough, two bits a
pass.

    bytes        a row of logits twice, and a row of weights; each pass of a search reads both again from the cache
    threads      256 a chunk of 4096, then 512 a row; about 54 registers
    threadgroup  800 bytes
    expected     a greedy row is one read of the logits (600 kB: 10 us on an M1) and two launches that return at once;
                 a draw with top_k and top_p of 150000 tokens takes 34 passes of 1.2 MB, about 0.4 ms on one core
"""

from __future__ import annotations

import mlx.core as mx

from quarrel.mlx_backend.runtime.kernel import Kernel
from quarrel.mlx_backend.runtime.launch import Batch, Launch, Site, cdiv
from quarrel.mlx_backend.runtime.metal import FINITE, RANK_OF
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.ops.sample import SAMPLE

_CHUNK = 4096
_SIMDS = 16  # of the drawing threadgroup: for 1024 threads M1 and M2 have 52 registers each, and it takes 54

_TOP_OF_ROW = """
// The highest logit of the row, from its chunks; an infinite one means none.
template <class Best>
inline float top_of_row(Best best, uint row, int chunks, int lane) {
  float top = -INFINITY;
  for (int c = lane; c < chunks; c += 32) top = metal::max(top, best[row * chunks + c]);
  return simd_max(top);
}
"""

_FIRST_OF_ROW = """
// The first id with that logit.
template <class Best, class Where>
inline int first_of_row(Best best, Where where, float top, uint row, int chunks, int lane) {
  int first = 0x7FFFFFFF;
  for (int c = lane; c < chunks; c += 32) {
    if (best[row * chunks + c] == top) first = metal::min(first, where[row * chunks + c]);
  }
  return simd_min(first);
}
"""

_SUMS = """
inline ulong add_lanes(ulong x) {
  for (ushort other = 16; other > 0; other /= 2) {
    const uint2 halves = as_type<uint2>(x);
    x += as_type<ulong>(uint2(simd_shuffle_xor(halves.x, other), simd_shuffle_xor(halves.y, other)));
  }
  return x;
}

// Sums of the lanes before this one and of itself.
inline ulong add_up_to(ulong x, int lane) {
  for (ushort back = 1; back < 32; back *= 2) {
    const uint2 halves = as_type<uint2>(x);
    const ulong other = as_type<ulong>(uint2(simd_shuffle_up(halves.x, back), simd_shuffle_up(halves.y, back)));
    if (lane >= int(back)) x += other;
  }
  return x;
}

// Three sums over the threadgroup at once; every thread gets them.
inline void add_all(thread ulong* x, threadgroup ulong* sums, int simd, int lane) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL for (int i = 0; i < 3; i++) {
    const ulong part = add_lanes(x[i]);
    if (lane == 0) sums[i * SIMDS + simd] = part;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL for (int i = 0; i < 3; i++) x[i] = add_lanes(lane < SIMDS ? sums[i * SIMDS + lane] : 0ul);
}

// share * whole, share in [0, 1] to 2^-32, rounded down, or up.
inline ulong part_of(float share, ulong whole, bool up) {
  const ulong by = ulong(metal::clamp(share, 0.0f, 1.0f) * 4294967296.0f), low = (whole & 0xFFFFFFFFul) * by;
  return (whole >> 32) * by + (low >> 32) + (up && (low & 0xFFFFFFFFul) != 0 ? 1 : 0);
}
""".replace("SIMDS", str(_SIMDS))

_BEST = Kernel(
    "quarrel_sample_best",
    ("logits",),
    ("best", "where"),
    """
  const int n = logits_shape[1], chunk = int(threadgroup_position_in_grid.x), chunks = int(threadgroups_per_grid.x);
  const uint row = threadgroup_position_in_grid.y;
  const int tid = int(thread_index_in_threadgroup), lane = tid % 32;
  threadgroup float tops[8];
  threadgroup int firsts[8];
  float top = -INFINITY;
  int first = 0x7FFFFFFF;
  const int end = metal::min(n, (chunk + 1) * CHUNK);
  for (int i = chunk * CHUNK + tid; i < end; i += 256) {
    const float given = logits[ulong(row) * n + i];
    // A NaN marks its row with an infinity, which no finite logit is.
    const bool broken = (as_type<uint>(given) & 0x7FFFFFFFu) > 0x7F800000u;
    const float x = broken ? INFINITY : finite_or_least(given);
    if (first == 0x7FFFFFFF || x > top) {
      top = x;
      first = i;
    }
  }
  const float simd_top = simd_max(top);
  const int simd_first = simd_min(top == simd_top ? first : 0x7FFFFFFF);
  if (lane == 0) {
    tops[tid / 32] = simd_top;
    firsts[tid / 32] = simd_first;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (tid == 0) {
    UNROLL for (int g = 1; g < 8; g++) {
      if (tops[g] > tops[0] || (tops[g] == tops[0] && firsts[g] < firsts[0])) {
        tops[0] = tops[g];
        firsts[0] = firsts[g];
      }
    }
    best[row * chunks + chunk] = tops[0];
    where[row * chunks + chunk] = firsts[0];
  }
""",
    FINITE,
)

_WEIGH = Kernel(
    "quarrel_sample_weigh",
    ("logits", "best", "temperature"),
    ("weights",),
    """
  const int n = logits_shape[1], chunk = int(threadgroup_position_in_grid.x), chunks = int(threadgroups_per_grid.x);
  const uint row = threadgroup_position_in_grid.y;
  const float t = temperature[row];
  const float top = top_of_row(best, row, chunks, int(thread_index_in_simdgroup));
  if (!(t > 0.0f) || metal::abs(top) == INFINITY) return;
  const int end = metal::min(n, (chunk + 1) * CHUNK);
  for (int i = chunk * CHUNK + int(thread_index_in_threadgroup); i < end; i += 256) {
    const float x = finite_or_least(logits[ulong(row) * n + i]);
    // The quotient with what rounding lost of the difference and of itself: with many tokens of like weight, a float32
    // exponent moves the edges of the draw.
    const float d = x - top, lost = (x - (d + top)) + ((d + top) - d - top);
    float e = 0.0f;
    if (d > -INFINITY) {
      const float quotient = d / t;
      e = precise::exp(quotient) * (1.0f + (fma(-quotient, t, d) + lost) / t);
      e = quotient < -100.0f ? 0.0f : metal::clamp(e, 0.0f, 1.0f);
    }
    weights[ulong(row) * n + i] = e;
  }
""",
    FINITE + _TOP_OF_ROW,
)

_DRAW = Kernel(
    "quarrel_sample_draw",
    ("logits", "weights", "best", "where", "temperature", "top_k", "top_p", "min_p", "drawn", "chunks"),
    ("tokens",),
    """
  const int n = logits_shape[1];
  const uint row = threadgroup_position_in_grid.x;
  const int tid = int(thread_index_in_threadgroup), lane = tid % 32, simd = tid / 32;
  threadgroup ulong sums[3 * SIMDS];
  const float top = top_of_row(best, row, chunks[0], lane);
  if (metal::abs(top) == INFINITY || !(temperature[row] > 0.0f)) {
    const int first = first_of_row(best, where, top, row, chunks[0], lane);
    if (tid == 0) tokens[row] = metal::abs(top) == INFINITY ? -1 : first;
    return;
  }
  const ulong from = ulong(row) * n;
  const float least = min_p[row], p = top_p[row];  // the best weight is 1
  const int k = top_k[row];
  uint floor_rank = 0;
  // Two searches: by count for top_k, then by weight for top_p.
  UNROLL for (int search = 0; search < 2; search++) {
    const bool by_count = search == 0;
    if (by_count ? k <= 0 || k >= n : !(p < 1.0f)) continue;
    // Without top_k the share is of all tokens; with it, of those that top_k and min_p leave.
    const float bound = k > 0 ? least : 0.0f;
    ulong wanted = ulong(k);
    if (!by_count) {
      ulong whole[3] = {0, 0, 0};
      for (int i = tid; i < n; i += 32 * SIMDS) {
        const float e = weights[from + i];
        if (rank_of(finite_or_least(logits[from + i])) >= floor_rank && e >= bound) whole[0] += ulong(e * 1099511627776.0f);
      }
      add_all(whole, sums, simd, lane);
      wanted = part_of(p, whole[0], true);
    }
    uint found = 0;
    for (int shift = 30; shift >= 0; shift -= 2) {
      ulong above[3] = {0, 0, 0};
      for (int i = tid; i < n; i += 32 * SIMDS) {
        const uint rank = rank_of(finite_or_least(logits[from + i]));
        const float e = by_count ? 0.0f : weights[from + i];
        const ulong by = by_count ? 1ul : e >= bound ? ulong(e * 1099511627776.0f) : 0ul;
        UNROLL for (uint d = 1; d < 4; d++) above[d - 1] += rank >= found + (d << uint(shift)) ? by : 0ul;
      }
      add_all(above, sums, simd, lane);
      uint digit = 0;
      UNROLL for (uint d = 1; d < 4; d++) digit = above[d - 1] >= wanted && above[d - 1] > 0 ? d : digit;
      found += digit << uint(shift);
    }
    floor_rank = metal::max(floor_rank, metal::min(found, rank_of(top)));
  }
  // Each SIMD-group adds up a run of tokens; the one whose run holds the goal walks it.
  const int span = (n + SIMDS * 32 - 1) / (SIMDS * 32) * 32, begin = simd * span, end = metal::min(n, begin + span);
  ulong mine = 0;
  for (int i = begin + lane; i < end; i += 32) {
    const float e = weights[from + i];
    if (rank_of(finite_or_least(logits[from + i])) >= floor_rank && e >= least) mine += ulong(e * 1099511627776.0f);
  }
  mine = add_lanes(mine);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane == 0) sums[simd] = mine;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  ulong before = add_up_to(lane < SIMDS ? sums[lane] : 0ul, lane);
  const ulong total = as_type<ulong>(simd_shuffle(as_type<uint2>(before), ushort(31)));
  before = as_type<ulong>(simd_shuffle(as_type<uint2>(before), ushort(simd))) - mine;
  const ulong goal = metal::min(part_of(drawn[row], total, false), total - 1);
  if (goal < before || goal >= before + mine) return;
  for (int i = begin; i < end; i += 32) {
    ulong by = 0;
    if (i + lane < end) {
      const float e = weights[from + i + lane];
      if (rank_of(finite_or_least(logits[from + i + lane])) >= floor_rank && e >= least) by = ulong(e * 1099511627776.0f);
    }
    const ulong running = before + add_up_to(by, lane);
    const bool here = running > goal && running - by <= goal;
    if (here) tokens[row] = i + lane;
    if (simd_any(here)) return;
    before = as_type<ulong>(simd_shuffle(as_type<uint2>(running), ushort(31)));
  }
""".replace("SIMDS", str(_SIMDS)),
    RANK_OF + FINITE + _TOP_OF_ROW + _FIRST_OF_ROW + _SUMS,
)


def build_sample(site: Site, node: Node) -> Launch:
    """SAMPLE: logits `[R, n]` float32 and five `[R]` controls to tokens `[R]` int32."""
    n: int = node.spec.n
    chunks = cdiv(n, _CHUNK)
    count = mx.array([chunks], mx.int32)
    template = [("CHUNK", _CHUNK)]

    def run(
        batch: Batch,
        logits: mx.array,
        temperature: mx.array,
        top_k: mx.array,
        top_p: mx.array,
        min_p: mx.array,
        uniform: mx.array,
    ) -> list[mx.array]:
        rows = logits.shape[0]
        shape, grid = (rows, chunks), (chunks, rows)
        best, where = _BEST([logits], [shape, shape], [mx.float32, mx.int32], grid, (256,), template)
        (weights,) = _WEIGH([logits, best, temperature], [logits.shape], [mx.float32], grid, (256,), template)
        inputs = [logits, weights, best, where, temperature, top_k, top_p, min_p, uniform, count]
        return _DRAW(inputs, [(rows,)], [mx.int32], (rows,), (32 * _SIMDS,))

    return run


IMPLEMENTATIONS = (Implementation(SAMPLE, "threshold search in whole numbers", build_sample),)
