"""Attention of many queries at once: tiles of keys in threadgroup memory, products by 8x8 SIMD-group matrices.

Four SIMD-groups hold 8 rows each: a row is a query and one of the query heads that share a key head, so that a key tile
serves them all, whatever their number. Keys and then values are copied into one tile; scores, the softmax (a row lives in
4 lanes: 2 shuffles a maximum) and the result stay in registers. MLX's own `scaled_dot_product_attention` wants keys in
one piece, knows no softcap and no head size of 96 or 256: a gather would move the whole cache once more in every layer.

    bytes        keys and values once per 32 rows: 2 * 2 D bytes a key, 64 D flops a byte; bound by arithmetic
    threadgroup  a tile of 32 keys (16 from D = 160, 8 from 264): 8.7 kB for D = 128 in half precision, so 3 threadgroups
                 a core
    registers    D / 4 for the result, as many for the query up to D = 128 (larger ones are read again), 8 scores
    expected     the 70 to 80% of the matrix units' rate that MLX's attention, built alike, reaches
"""

from __future__ import annotations

import mlx.core as mx

from quarrel.mlx_backend.attention.kv_codes import CACHED, KINDS
from quarrel.mlx_backend.runtime.kernel import Kernel
from quarrel.mlx_backend.runtime.launch import cdiv
from quarrel.mlx_backend.runtime.metal import OLDEST, WIDE
from quarrel.ops.kv import KVType, scaled

ROWS = 32
"""Queries times heads of a threadgroup."""
LARGEST_HEAD = 512

HEADER = (
    WIDE
    + CACHED
    + OLDEST
    + """
// Over the four lanes that hold a row of an 8x8 matrix.
inline float row_max(float x) {
  x = metal::max(x, simd_shuffle_xor(x, 1));
  return metal::max(x, simd_shuffle_xor(x, 8));
}
inline float row_sum(float x) {
  x += simd_shuffle_xor(x, 1);
  return x + simd_shuffle_xor(x, 8);
}

// Keys first to first + KEYS of one head into the tile; zeros before the oldest that any row sees, and past the last, as 0
// times what lies there may be NaN.
template <class T, int KIND, int D, int KEYS, int WIDTH, bool PAGED, int SIZE, class From, class Table>
inline void load_keys(
    threadgroup Wide<T, WIDTH>* tile, From from, Table table, ulong table_row, int begin, int heads, int head,
    int first, int oldest, int last, int tid) {
  constexpr int STRIDE = D / WIDTH + 1;
  for (int i = tid; i < KEYS * (D / WIDTH); i += 128) {
    const int key = first + i / (D / WIDTH), part = i % (D / WIDTH);
    Wide<T, WIDTH> value;
    UNROLL for (int j = 0; j < WIDTH; j++) value.v[j] = T(0.0f);
    if (key >= oldest && key < last) {
      const ulong slot = PAGED ? ulong(table[table_row + key / SIZE]) * SIZE + key % SIZE : ulong(begin + key);
      value = cached<T, KIND, D, WIDTH>(from, slot * heads + head, part * WIDTH);
    }
    *(threadgroup Wide<T, WIDTH>*)(tile + i / (D / WIDTH) * STRIDE + part) = value;
  }
}
"""
)

# The place of a lane in an 8x8 matrix is Apple's: row (lane / 4 & 4) + lane / 2 % 4, two neighbouring columns.
_SOURCE = """
  constexpr int GROUP = HEADS / KV_HEADS, WIDTH = 16 / int(sizeof(T)), STRIDE = D + WIDTH, PARTS = D / 8;
  const int kv_head = int(threadgroup_position_in_grid.y), s = int(threadgroup_position_in_grid.z);
  const int tile_row = int(threadgroup_position_in_grid.x) * 32;
  const int tid = int(thread_index_in_threadgroup), lane = tid % 32;
  const int begin = query_start[s], n_new = query_start[s + 1] - begin, n_keys = PAGED ? kv_len[s] : n_new;
  if (tile_row >= n_new * GROUP) return;
  if (SINGLES && n_new == 1) {
    // Done by the kernel for single queries: one result is put together here.
    const ulong at = (ulong(begin) * HEADS + kv_head * GROUP) * D;
    for (int i = tid; i < GROUP * D; i += 128) y[at + i] = single[at + i];
    return;
  }
  const int row = (lane / 4 & 4) + lane / 2 % 4, column = (lane / 4 & 2) * 2 + lane % 2 * 2;
  const int flat = tile_row + tid / 32 * 8 + row, query = flat / GROUP, head = kv_head * GROUP + flat % GROUP;
  const bool mine = query < n_new;
  const ulong q_at = (ulong(begin + (mine ? query : 0)) * HEADS + head) * D + column;
  const int position = n_keys - n_new + query;
  const int newest = metal::min((tile_row + 31) / GROUP, n_new - 1);
  // Without a cache a row sees both sides, WINDOW - 1 keys away.
  // Those that see ahead do so in order: the newest sees the most.
  const int reached = SPANS ? metal::min(see_to[begin + newest], n_keys - 1) : n_keys - n_new + newest;
  const int seen_to = SPANS ? see_to[begin + (mine ? query : 0)] : position;
  const int last = PAGED ? reached + 1 : WINDOW > 0 ? metal::min(n_keys, newest + WINDOW) : n_keys;
  const int oldest = oldest_key<WINDOW, CHUNKED>(n_keys - n_new + tile_row / GROUP);
  const int first_key = oldest_key<WINDOW, CHUNKED>(position);
  const ulong table_row = PAGED ? ulong(s) * table_shape[1] : 0;
  const float scale = numbers[0], cap = numbers[1];

  threadgroup Wide<T, WIDTH> tile[KEYS * STRIDE / WIDTH];
  const threadgroup T* flat_tile = (const threadgroup T*)tile;
  simdgroup_matrix<float, 8, 8> kept_q[KEEP_Q ? PARTS : 1], out[PARTS], score[KEYS / 8];
  UNROLL for (int f = 0; f < PARTS; f++) out[f] = simdgroup_matrix<float, 8, 8>(0.0f);
  if (KEEP_Q) {
    UNROLL for (int f = 0; f < PARTS; f++) {
      UNROLL for (int i = 0; i < 2; i++) kept_q[f].thread_elements()[i] = mine ? float(q[q_at + f * 8 + i]) * scale : 0.0f;
    }
  }
  float top = -INFINITY, total = 0.0f;
  for (int start = oldest / KEYS * KEYS; start < last; start += KEYS) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    load_keys<T, KIND, D, KEYS, WIDTH, PAGED, SIZE>(
        tile, keys, table, table_row, begin, KV_HEADS, kv_head, start, oldest, last, tid);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (int j = 0; j < KEYS / 8; j++) score[j] = simdgroup_matrix<float, 8, 8>(0.0f);
    UNROLL for (int f = 0; f < PARTS; f++) {
      simdgroup_matrix<float, 8, 8> b_q, b_k;
      if (KEEP_Q) {
        b_q = kept_q[f];
      } else {
        UNROLL for (int i = 0; i < 2; i++) b_q.thread_elements()[i] = mine ? float(q[q_at + f * 8 + i]) * scale : 0.0f;
      }
      UNROLL for (int j = 0; j < KEYS / 8; j++) {
        UNROLL for (int i = 0; i < 2; i++) {
          b_k.thread_elements()[i] = float(flat_tile[(j * 8 + column + i) * STRIDE + f * 8 + row]);
        }
        simdgroup_multiply_accumulate(score[j], b_q, b_k, score[j]);
      }
    }
    float new_top = top;
    UNROLL for (int j = 0; j < KEYS / 8; j++) {
      UNROLL for (int i = 0; i < 2; i++) {
        float x = score[j].thread_elements()[i];
        if (cap > 0.0f) x = cap * precise::tanh(x / cap);
        const int back = position - (start + j * 8 + column + i);
        bool seen = PAGED ? start + j * 8 + column + i <= seen_to : start + j * 8 + column + i < last;
        if (WINDOW > 0) seen = seen && start + j * 8 + column + i >= first_key && (PAGED || back > -WINDOW);
        x = seen && mine ? x : -INFINITY;
        score[j].thread_elements()[i] = x;
        new_top = metal::max(new_top, x);
      }
    }
    new_top = row_max(new_top);
    // A row that has seen no key yet keeps -inf; zero in its place leaves every exponential zero.
    const float base = new_top == -INFINITY ? 0.0f : new_top;
    const float fade = precise::exp(top - base);
    float sum = 0.0f;
    UNROLL for (int j = 0; j < KEYS / 8; j++) {
      UNROLL for (int i = 0; i < 2; i++) {
        const float p = precise::exp(score[j].thread_elements()[i] - base);
        score[j].thread_elements()[i] = p;
        sum += p;
      }
    }
    total = total * fade + row_sum(sum);
    top = new_top;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    load_keys<T, KIND, D, KEYS, WIDTH, PAGED, SIZE>(
        tile, values, table, table_row, begin, KV_HEADS, kv_head, start, oldest, last, tid);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (int f = 0; f < PARTS; f++) {
      simdgroup_matrix<float, 8, 8> b_v;
      UNROLL for (int i = 0; i < 2; i++) out[f].thread_elements()[i] *= fade;
      UNROLL for (int j = 0; j < KEYS / 8; j++) {
        UNROLL for (int i = 0; i < 2; i++) {
          b_v.thread_elements()[i] = float(flat_tile[(j * 8 + row) * STRIDE + f * 8 + column + i]);
        }
        simdgroup_multiply_accumulate(out[f], score[j], b_v, out[f]);
      }
    }
  }
  float share = 1.0f;
  if (SINKS) {
    const float sink = sinks[head], new_top = metal::max(top, sink);
    share = precise::exp(top - new_top);
    total = total * share + precise::exp(sink - new_top);
  }
  share /= total > 0.0f ? total : 1.0f;
  UNROLL for (int f = 0; f < PARTS; f++) {
    UNROLL for (int i = 0; i < 2; i++) {
      if (mine) y[q_at + f * 8 + i] = T(out[f].thread_elements()[i] * share);
    }
  }
"""

_FLASH = Kernel(
    "quarrel_flash",
    ("q", "keys", "values", "query_start", "kv_len", "table", "sinks", "single", "see_to", "numbers", "written"),
    ("y",),
    _SOURCE,
    HEADER,
)


class Flash:
    """The launches for one set of static facts; `paged` keys are a cache's and seen from behind only."""

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        act: mx.Dtype,
        paged: bool,
        window: int = 0,
        cap: float = 0.0,
        sinks: mx.array | None = None,
        chunked: bool = False,
        spans: bool = False,
    ) -> None:
        self._act, self._kv_heads, self._group, self._sinks = act, kv_heads, heads // kv_heads, sinks
        self._numbers = mx.array([scale, cap], mx.float32)
        keys = 32 if head_dim <= 128 else 16 if head_dim <= 256 else 8
        self._template = [("T", act), ("HEADS", heads), ("KV_HEADS", kv_heads), ("D", head_dim), ("KEYS", keys)]
        self._template += [("PAGED", paged), ("WINDOW", window), ("CHUNKED", chunked), ("SINKS", sinks is not None)]
        self._template += [("KEEP_Q", head_dim <= 128), ("SPANS", spans)]

    def __call__(
        self,
        q: mx.array,
        keys: mx.array,
        values: mx.array,
        query_start: mx.array,
        max_new: int,
        kv_len: mx.array | None = None,
        table: mx.array | None = None,
        block_size: int = 1,
        kept: KVType = "auto",
        single: mx.array | None = None,
        see_to: mx.array | None = None,
        written: mx.array | None = None,
    ) -> mx.array:
        """`[T, heads * head_dim]`; rows of sequences with one query are `single`'s, where it is given. `kept`: as what keys
        and values are stored. `see_to`: of `spans`, the last position that a query sees."""
        seqs = query_start.shape[0] - 1
        lengths, blocks = query_start if kv_len is None else kv_len, query_start if table is None else table
        template = [*self._template, ("SIZE", block_size), ("SINGLES", single is not None), ("KIND", KINDS[kept])]
        keys, values = (a if scaled(kept) else a.astype(self._act) for a in (keys, values))
        (y,) = _FLASH(
            [
                q.astype(self._act),
                keys,
                values,
                query_start,
                lengths,
                blocks.reshape(seqs, -1) if table is not None else blocks.reshape(1, -1),
                self._numbers if self._sinks is None else self._sinks,
                q.astype(self._act) if single is None else single,
                query_start if see_to is None else see_to,
                self._numbers,
                self._numbers if written is None else written,
            ],
            [q.shape],
            [self._act],
            (cdiv(max_new * self._group, ROWS), self._kv_heads, seqs),
            (128,),
            template,
        )
        return y


def refuses(heads: int, kv_heads: int, head_dim: int) -> str | None:
    """Why no kernel here takes such heads, or None."""
    if head_dim % 8 or head_dim > LARGEST_HEAD:
        return f"needs a head_dim that is a multiple of 8 and at most {LARGEST_HEAD}, got {head_dim}"
    if heads % kv_heads:
        return f"needs key heads that divide the query heads, got {kv_heads} and {heads}"
    return None
