"""Attention over the paged cache: a kernel for single queries (decode), the tiles of `flash.py` for several.

A sequence with one new token is cut into splits of 64 to 256 keys, a threadgroup each for every key head; `combine` adds
them up. How long they are depends on how many keys the sequence sees and on nothing else, and they begin at multiples of
that, so that a row's result never depends on the batch. The query heads of a key head, up to 5 (8 for narrow heads), share
what is loaded, as in MLX's two-pass kernel for long contexts; MLX's one-pass kernel and llama.cpp's load a key once for
each of them.

    bytes        2 * 2 D a key and key head, once; partial results are 4 (D + 2) bytes a head and split: 3 to 12% of that
    threads      128; 8 to 32 lanes a key, so that a lane's load is 8 bytes and a SIMD-group reads 1 to 4 keys at once
    in flight    a key row and a value row a lane group, unrolled over D: 64 bytes a lane for D = 128
    registers    2 D / lanes a head for queries and results, as much for a key and a value: 80 of 4 heads of 128, 105 in all
    threadgroup  4 partial results a head: 8 kB for 4 heads of 128
    expected     75 to 85% of the bus from 2000 keys on; below, the launch and the combination (3 us) are most of it
"""

from __future__ import annotations

import mlx.core as mx

from quarrel.mlx_backend.attention.flash import Flash, refuses
from quarrel.mlx_backend.attention.kv_codes import CACHED, KINDS
from quarrel.mlx_backend.runtime.kernel import Kernel
from quarrel.mlx_backend.runtime.launch import Batch, Cache, Launch, Site, cdiv
from quarrel.mlx_backend.runtime.metal import OLDEST, WIDE
from quarrel.ops.attention import ATTENTION, AttentionSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation

SPLIT = 256
"""Keys of the longest split: their partial results are 3% of what they read. Of 512 keys it would leave two threadgroups a
key head, 16 for 40 cores of an M4 Max; splits of 64 make 64, and partial results of 12%."""

_FADING = """
// exp(x - top), where no key has been seen if top is -inf.
inline float fading(float x, float top) {
  return top == -INFINITY ? 0.0f : precise::exp(x - top);
}
"""

# LANES lanes share a key: lane l holds values (i * LANES + l) * WIDTH + j of it. TOGETHER query heads share its load.
_SINGLE = Kernel(
    "quarrel_attend_single",
    ("q", "keys", "values", "query_start", "kv_len", "table", "numbers", "written"),
    ("part", "top_sum"),
    """
  constexpr int GROUP = HEADS / KV_HEADS, CHUNKS = D / LANES / WIDTH, EACH = D / LANES;
  constexpr int HEAD_TILES = (GROUP + TOGETHER - 1) / TOGETHER, ABREAST = 32 / LANES;
  const int tid = int(thread_index_in_threadgroup), lane = tid % 32, simd = tid / 32, l = lane % LANES;
  const int kv_head = int(threadgroup_position_in_grid.y) / HEAD_TILES, s = int(threadgroup_position_in_grid.z);
  const int first_head = int(threadgroup_position_in_grid.y) % HEAD_TILES * TOGETHER;
  const int begin = query_start[s], n_keys = kv_len[s];
  const int split = int(threadgroup_position_in_grid.x), oldest = oldest_key<WINDOW, CHUNKED>(n_keys - 1);
  const int size = metal::max(64, metal::min(256, (n_keys - oldest) / 64 & ~63)), from = (oldest / size + split) * size;
  const int first = metal::max(from, oldest), last = metal::min(from + size, n_keys);
  if (query_start[s + 1] - begin != 1 || first >= last) return;
  const float scale = numbers[0], cap = numbers[1];

  float b_q[TOGETHER][EACH], acc[TOGETHER][EACH], top[TOGETHER], total[TOGETHER];
  UNROLL for (int h = 0; h < TOGETHER; h++) {
    const int head = kv_head * GROUP + metal::min(first_head + h, GROUP - 1);
    UNROLL for (int i = 0; i < EACH; i++) {
      const int d = (i / WIDTH * LANES + l) * WIDTH + i % WIDTH;
      b_q[h][i] = float(q[(ulong(begin) * HEADS + head) * D + d]) * scale;
      acc[h][i] = 0.0f;
    }
    top[h] = -INFINITY;
    total[h] = 0.0f;
  }
  const ulong table_row = ulong(s) * table_shape[1];
  for (int start = first + simd * ABREAST; start < last; start += 4 * ABREAST) {
    const int key = start + lane / LANES;
    const bool seen = key < last;
    const int at = seen ? key : last - 1;
    const ulong slot = ulong(table[table_row + at / SIZE]) * SIZE + at % SIZE;
    const ulong row = slot * KV_HEADS + kv_head;
    float b_k[EACH], b_v[EACH];
    UNROLL for (int i = 0; i < CHUNKS; i++) {
      const Wide<T, WIDTH> k4 = cached<T, KIND, D, WIDTH>(keys, row, (i * LANES + l) * WIDTH);
      const Wide<T, WIDTH> v4 = cached<T, KIND, D, WIDTH>(values, row, (i * LANES + l) * WIDTH);
      UNROLL for (int j = 0; j < WIDTH; j++) {
        b_k[i * WIDTH + j] = float(k4.v[j]);
        b_v[i * WIDTH + j] = float(v4.v[j]);
      }
    }
    UNROLL for (int h = 0; h < TOGETHER; h++) {
      float x = 0.0f;
      UNROLL for (int i = 0; i < EACH; i++) x += b_q[h][i] * b_k[i];
      UNROLL for (ushort other = LANES / 2; other > 0; other /= 2) x += simd_shuffle_xor(x, other);
      if (cap > 0.0f) x = cap * precise::tanh(x / cap);
      x = seen ? x : -INFINITY;
      const float new_top = metal::max(top[h], x), fade = fading(top[h], new_top), p = fading(x, new_top);
      total[h] = total[h] * fade + p;
      UNROLL for (int i = 0; i < EACH; i++) acc[h][i] = acc[h][i] * fade + p * (seen ? b_v[i] : 0.0f);
      top[h] = new_top;
    }
  }
  // First the keys that a SIMD-group reads abreast, then the SIMD-groups.
  threadgroup float parts[4][TOGETHER][D];
  threadgroup float tops[4][TOGETHER], sums[4][TOGETHER];
  UNROLL for (int h = 0; h < TOGETHER; h++) {
    UNROLL for (ushort other = LANES; other < 32; other *= 2) {
      const float its_top = simd_shuffle_xor(top[h], other), new_top = metal::max(top[h], its_top);
      const float fade = fading(top[h], new_top), share = fading(its_top, new_top);
      total[h] = total[h] * fade + simd_shuffle_xor(total[h], other) * share;
      UNROLL for (int i = 0; i < EACH; i++) acc[h][i] = acc[h][i] * fade + simd_shuffle_xor(acc[h][i], other) * share;
      top[h] = new_top;
    }
    if (lane < LANES) {
      UNROLL for (int i = 0; i < EACH; i++) parts[simd][h][(i / WIDTH * LANES + l) * WIDTH + i % WIDTH] = acc[h][i];
    }
    if (lane == 0) {
      tops[simd][h] = top[h];
      sums[simd][h] = total[h];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const ulong item = ulong(s) * threadgroups_per_grid.x + split;
  for (int i = tid; i < TOGETHER * D; i += 128) {
    const int h = i / D, d = i % D;
    if (first_head + h >= GROUP) break;
    float best = tops[0][h], value = 0.0f, sum = 0.0f;
    UNROLL for (int g = 1; g < 4; g++) best = metal::max(best, tops[g][h]);
    UNROLL for (int g = 0; g < 4; g++) {
      const float share = fading(tops[g][h], best);
      value += parts[g][h][d] * share;
      sum += sums[g][h] * share;
    }
    const ulong place = item * HEADS + kv_head * GROUP + first_head + h;
    part[place * D + d] = value;
    if (d == 0) {
      top_sum[place * 2] = best;
      top_sum[place * 2 + 1] = sum;
    }
  }
""",
    WIDE + CACHED + OLDEST + _FADING,
)

# A SIMD-group a head: the lanes find the best of all splits, then each adds up its values of D.
COMBINE = Kernel(
    "quarrel_attend_combine",
    ("part", "top_sum", "query_start", "kv_len", "sinks"),
    ("y",),
    """
  constexpr int EACH = (D + 31) / 32;
  const int lane = int(thread_index_in_simdgroup), s = int(threadgroup_position_in_grid.y);
  const int head = int(threadgroup_position_in_grid.x) * 4 + int(simdgroup_index_in_threadgroup);
  const int begin = query_start[s], n_keys = kv_len[s];
  if (head >= HEADS || query_start[s + 1] - begin != 1) return;
  const int oldest = oldest_key<WINDOW, CHUNKED>(n_keys - 1);
  const int size = SPLIT > 0 ? SPLIT : metal::max(64, metal::min(256, (n_keys - oldest) / 64 & ~63));
  const int splits = (n_keys + size - 1) / size - oldest / size;
  const ulong items = ulong(s) * part_shape[1];
  float best = SINKS ? float(sinks[head]) : -INFINITY;
  for (int i = lane; i < splits; i += 32) best = metal::max(best, top_sum[((items + i) * HEADS + head) * 2]);
  best = simd_max(best);
  float sum = SINKS && lane == 0 ? fading(sinks[head], best) : 0.0f;
  for (int i = lane; i < splits; i += 32) {
    const ulong place = ((items + i) * HEADS + head) * 2;
    sum += fading(top_sum[place], best) * top_sum[place + 1];
  }
  sum = simd_sum(sum);
  float acc[EACH];
  UNROLL for (int i = 0; i < EACH; i++) acc[i] = 0.0f;
  for (int item = 0; item < splits; item++) {
    const ulong place = (items + item) * HEADS + head;
    const float share = fading(top_sum[place * 2], best);
    UNROLL for (int i = 0; i < EACH; i++) {
      if (i * 32 + lane < D) acc[i] += part[place * D + i * 32 + lane] * share;
    }
  }
  const float by = sum > 0.0f ? 1.0f / sum : 0.0f;
  UNROLL for (int i = 0; i < EACH; i++) {
    if (i * 32 + lane < D) y[(ulong(begin) * HEADS + head) * D + i * 32 + lane] = T(acc[i] * by);
  }
""",
    OLDEST + _FADING,
)


def most_splits(keys: int, window: int = 0) -> int:
    """Of a sequence of at most so many keys: a window may begin and end within a split."""
    seen = min(keys, window) if window else keys
    return max(min(cdiv(seen, 64), 128), cdiv(seen, SPLIT)) + (1 if window else 0)


def lanes_of(head_dim: int) -> tuple[int, int]:
    """Lanes that share a key, and values in one load."""
    lanes = 8
    if head_dim % 32 == 0 and head_dim > 32:
        lanes = 16 if head_dim <= 128 else 32
    each = head_dim // lanes
    return lanes, next(width for width in (4, 2, 1) if each % width == 0)


def heads_together(group: int, head_dim: int) -> int:
    """Query heads of a threadgroup: what 96 registers of queries and results and 16 KiB of threadgroup memory hold."""
    most = max(1, min(8, 48 // (head_dim // lanes_of(head_dim)[0]) - 1, 1024 // head_dim))
    return cdiv(group, cdiv(group, most))


def build_attention(site: Site, node: Node) -> Launch:
    """ATTENTION: q `[T, heads * head_dim]`, query_start `[S + 1]`, kv_len `[S]`, block_table `[S, B]`, sinks `[heads]`."""
    spec: AttentionSpec = node.spec
    heads, kv_heads, dim = spec.n_heads, spec.n_kv, spec.head_dim
    sinks = site.vector(node.inputs[5]) if spec.sinks else None  # type: ignore[arg-type]
    flash = Flash(heads, kv_heads, dim, spec.scale, site.act, True, spec.window, spec.cap, sinks, spec.chunked, spec.spans)
    numbers = mx.array([spec.scale, spec.cap], mx.float32)
    lanes, width = lanes_of(dim)
    together = heads_together(heads // kv_heads, dim)
    shared = [("HEADS", heads), ("D", dim), ("WINDOW", spec.window), ("CHUNKED", spec.chunked)]
    template = [("T", site.act), ("KV_HEADS", kv_heads), ("LANES", lanes), ("WIDTH", width), ("TOGETHER", together)]
    template += shared
    combine = [("T", site.act), ("SINKS", spec.sinks), ("SPLIT", 0), *shared]
    head_tiles = cdiv(heads // kv_heads, together)

    def decode(
        batch: Batch, q: mx.array, query_start: mx.array, kv_len: mx.array, table: mx.array, cache: Cache
    ) -> mx.array:
        seqs, splits = kv_len.shape[0], most_splits(table.shape[1] * batch.block_size, spec.window)
        part, top_sum = _SINGLE(
            [q, cache.k, cache.v, query_start, kv_len, table, numbers, cache.written],
            [(seqs, splits, heads, dim), (seqs, splits, heads, 2)],
            [mx.float32, mx.float32],
            (splits, kv_heads * head_tiles, seqs),
            (128,),
            [*template, ("SIZE", batch.block_size), ("KIND", KINDS[batch.kv_cache])],
        )
        weights = numbers if sinks is None else sinks
        inputs, groups = [part, top_sum, query_start, kv_len, weights], (cdiv(heads, 4), seqs)
        (y,) = COMBINE(inputs, [q.shape], [site.act], groups, (128,), combine)
        return y

    def run(
        batch: Batch,
        q: mx.array,
        query_start: mx.array,
        kv_len: mx.array,
        table: mx.array,
        cache: Cache,
        see_to: mx.array | None = None,
    ) -> list[mx.array]:
        decoded = decode(batch, q, query_start, kv_len, table, cache) if batch.tokens.any_decode else None
        if batch.tokens.all_decode and decoded is not None:
            return [decoded]
        size, kept = batch.block_size, batch.kv_cache
        keys = (cache.k, cache.v)
        more = (decoded, see_to, cache.written)
        return [flash(q, *keys, query_start, batch.max_new, kv_len, table, size, kept, *more)]

    return run


def _accepts(spec: AttentionSpec) -> str | None:
    if spec.latent:
        return f"needs values of their own, got {spec.latent} that are a key's too"
    return refuses(spec.n_heads, spec.n_kv, spec.head_dim)


IMPLEMENTATIONS = (Implementation(ATTENTION, "splits of keys, or SIMD-group matrices", build_attention, _accepts),)
