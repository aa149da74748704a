"""Attention over compressed keys that all heads share, and that are the values too (`AttentionSpec.latent`).

Four SIMD-groups hold the same 8 rows, each a query and one of its heads. A tile of keys lies in threadgroup memory for
scores and for values; of the scores' 576 columns (DeepSeek's) each SIMD-group adds up a quarter, of the result's 512 it
keeps one. A sequence with one new token is cut into splits of keys, as in `paged.py`, whose kernel combines them.

    bytes        RANK + DIM values a key for every 8 rows: from the cache of the device after the first of them
    threadgroup  16 keys of 576 values and 2 kB of scores: 21 kB in half precision; 8 keys in float32
    registers    RANK / 16 for the result, (RANK + DIM) / 16 for the queries: 70 of DeepSeek's
    expected     bound by arithmetic from 16 heads on: half of the matrix units' rate, as a tile serves 8 rows only
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from quarrel.mlx_backend.attention.flash import HEADER
from quarrel.mlx_backend.attention.kv_codes import KINDS
from quarrel.mlx_backend.attention.paged import COMBINE, SPLIT
from quarrel.mlx_backend.runtime.kernel import Kernel
from quarrel.mlx_backend.runtime.launch import Batch, Cache, Launch, Site, cdiv
from quarrel.ops.attention import ATTENTION, AttentionSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation

_BODY = """
  constexpr int WIDTH = 16 / int(sizeof(T)), D = DIM + RANK, STRIDE = D + WIDTH, PARTS = D / 8, MINE = (PARTS + 3) / 4;
  constexpr int OUT = RANK / 32;
  const int s = int(threadgroup_position_in_grid.z), tile_row = int(threadgroup_position_in_grid.x) * 8;
  const int tid = int(thread_index_in_threadgroup), lane = tid % 32, simd = tid / 32;
  const int begin = query_start[s], n_new = query_start[s + 1] - begin, n_keys = kv_len[s], rows = n_new * HEADS;
@RANGE
  const int row = (lane / 4 & 4) + lane / 2 % 4, column = (lane / 4 & 2) * 2 + lane % 2 * 2;
  const int flat = tile_row + row;
  const bool mine = flat < rows;
  const int position = n_keys - n_new + flat / HEADS;
  const ulong q_at = (ulong(begin) * HEADS + (mine ? flat : 0)) * D + column;
  const ulong table_row = ulong(s) * table_shape[1];
  threadgroup Wide<T, WIDTH> tile[KEYS * STRIDE / WIDTH];
  threadgroup float shared[4][8][KEYS];
  const threadgroup T* flat_tile = (const threadgroup T*)tile;
  simdgroup_matrix<float, 8, 8> b_q[MINE], out[OUT], score[KEYS / 8];
  UNROLL for (int f = 0; f < OUT; f++) out[f] = simdgroup_matrix<float, 8, 8>(0.0f);
  UNROLL for (int m = 0; m < MINE; m++) {
    const int f = simd * MINE + m;
    UNROLL for (int i = 0; i < 2; i++) {
      b_q[m].thread_elements()[i] = mine && f < PARTS ? float(q[q_at + f * 8 + i]) * scale[0] : 0.0f;
    }
  }
  float top = -INFINITY, total = 0.0f;
  for (int start = first; start < last; start += KEYS) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // Zeros past the last key, as 0 times what lies there may be NaN.
    for (int i = tid; i < KEYS * (D / WIDTH); i += 128) {
      const int key = start + i / (D / WIDTH), part = i % (D / WIDTH);
      Wide<T, WIDTH> value;
      UNROLL for (int j = 0; j < WIDTH; j++) value.v[j] = T(0.0f);
      if (key < last) {
        const ulong slot = ulong(table[table_row + key / SIZE]) * SIZE + key % SIZE;
        if (part < DIM / WIDTH) {
          value = cached<T, KIND, DIM, WIDTH>(keys, slot, part * WIDTH);
        } else {
          value = cached<T, KIND, RANK, WIDTH>(values, slot, part * WIDTH - DIM);
        }
      }
      tile[i / (D / WIDTH) * (STRIDE / WIDTH) + part] = value;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (int j = 0; j < KEYS / 8; j++) score[j] = simdgroup_matrix<float, 8, 8>(0.0f);
    UNROLL for (int m = 0; m < MINE; m++) {
      const int f = metal::min(simd * MINE + m, PARTS - 1);
      UNROLL for (int j = 0; j < KEYS / 8; j++) {
        simdgroup_matrix<float, 8, 8> b_k;
        UNROLL for (int i = 0; i < 2; i++) {
          b_k.thread_elements()[i] = float(flat_tile[(j * 8 + column + i) * STRIDE + f * 8 + row]);
        }
        simdgroup_multiply_accumulate(score[j], b_q[m], b_k, score[j]);
      }
    }
    UNROLL for (int j = 0; j < KEYS / 8; j++) {
      UNROLL for (int i = 0; i < 2; i++) shared[simd][row][j * 8 + column + i] = score[j].thread_elements()[i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float new_top = top;
    UNROLL for (int j = 0; j < KEYS / 8; j++) {
      UNROLL for (int i = 0; i < 2; i++) {
        const int at = j * 8 + column + i;
        float x = shared[0][row][at] + shared[1][row][at] + shared[2][row][at] + shared[3][row][at];
        x = mine && start + at <= position && start + at < last ? x : -INFINITY;
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
    UNROLL for (int f = 0; f < OUT; f++) {
      simdgroup_matrix<float, 8, 8> b_v;
      UNROLL for (int i = 0; i < 2; i++) out[f].thread_elements()[i] *= fade;
      UNROLL for (int j = 0; j < KEYS / 8; j++) {
        UNROLL for (int i = 0; i < 2; i++) {
          const int at = DIM + (simd * OUT + f) * 8 + column + i;
          b_v.thread_elements()[i] = float(flat_tile[(j * 8 + row) * STRIDE + at]);
        }
        simdgroup_multiply_accumulate(out[f], score[j], b_v, out[f]);
      }
    }
  }
@STORE
"""

_SPLIT = _BODY.replace(
    "@RANGE",
    """
  const int split = int(threadgroup_position_in_grid.y), first = split * SPLIT;
  const int last = metal::min(first + SPLIT, n_keys);
  if (n_new != 1 || first >= last || tile_row >= rows) return;
""",
).replace(
    "@STORE",
    """
  const ulong place = (ulong(s) * threadgroups_per_grid.y + split) * HEADS + flat;
  UNROLL for (int f = 0; f < OUT; f++) {
    UNROLL for (int i = 0; i < 2; i++) {
      if (mine) part[place * RANK + (simd * OUT + f) * 8 + column + i] = out[f].thread_elements()[i];
    }
  }
  if (mine && simd == 0 && column == 0) {
    top_sum[place * 2] = top;
    top_sum[place * 2 + 1] = total;
  }
""",
)

_WHOLE = _BODY.replace(
    "@RANGE",
    """
  const int first = 0, last = n_keys - n_new + metal::min((tile_row + 7) / HEADS, n_new - 1) + 1;
  if (tile_row >= rows) return;
  if (SINGLES && n_new == 1) {
    // Done in splits: a few rows of the result are put together here.
    const ulong at = (ulong(begin) * HEADS + tile_row) * RANK;
    for (int i = tid; i < metal::min(8, rows - tile_row) * RANK; i += 128) y[at + i] = single[at + i];
    return;
  }
""",
).replace(
    "@STORE",
    """
  const float share = total > 0.0f ? 1.0f / total : 0.0f;
  const ulong place = (ulong(begin) * HEADS + flat) * RANK;
  UNROLL for (int f = 0; f < OUT; f++) {
    UNROLL for (int i = 0; i < 2; i++) {
      if (mine) y[place + (simd * OUT + f) * 8 + column + i] = T(out[f].thread_elements()[i] * share);
    }
  }
""",
)

_INPUTS = ("q", "keys", "values", "query_start", "kv_len", "table", "scale", "written")
_ONE = Kernel("quarrel_latent_split", _INPUTS, ("part", "top_sum"), _SPLIT, HEADER)
_MANY = Kernel("quarrel_latent", (*_INPUTS, "single"), ("y",), _WHOLE, HEADER)


def build_attention(site: Site, node: Node) -> Launch:
    """ATTENTION: q `[T, heads * (head_dim + latent)]`, query_start `[S + 1]`, kv_len `[S]`, block_table `[S, B]`."""
    spec: AttentionSpec = node.spec
    heads, rank, scale = spec.n_heads, spec.latent, mx.array([spec.scale], mx.float32)
    fixed = [("T", site.act), ("HEADS", heads), ("DIM", spec.head_dim), ("RANK", rank), ("SPLIT", SPLIT)]
    fixed += [("KEYS", 8 if site.act == mx.float32 else 16)]
    combine = [("T", site.act), ("SINKS", False), ("HEADS", heads), ("D", rank), ("WINDOW", 0), ("CHUNKED", False)]
    combine += [("SPLIT", SPLIT)]

    def run(
        batch: Batch, q: mx.array, query_start: mx.array, kv_len: mx.array, table: mx.array, cache: Cache
    ) -> list[mx.array]:
        seqs, shape = kv_len.shape[0], (q.shape[0], spec.out_width)
        template: list[tuple[str, Any]] = [*fixed, ("SIZE", batch.block_size), ("KIND", KINDS[batch.kv_cache])]
        inputs = [q.astype(site.act), cache.k, cache.v, query_start, kv_len, table.reshape(seqs, -1), scale, cache.written]
        single = None
        if batch.tokens.any_decode:
            splits = cdiv(table.shape[1] * batch.block_size, SPLIT)
            shapes = [(seqs, splits, heads, rank), (seqs, splits, heads, 2)]
            grid = (cdiv(heads, 8), splits, seqs)
            part, top_sum = _ONE(inputs, shapes, [mx.float32, mx.float32], grid, (128,), template)
            parts = [part, top_sum, query_start, kv_len, scale]
            (single,) = COMBINE(parts, [shape], [site.act], (cdiv(heads, 4), seqs), (128,), combine)
            if batch.tokens.all_decode:
                return [single]
        template.append(("SINGLES", single is not None))
        grid = (cdiv(batch.max_new * heads, 8), 1, seqs)
        return _MANY([*inputs, q if single is None else single], [shape], [site.act], grid, (128,), template)

    return run


def _accepts(spec: AttentionSpec) -> str | None:
    if not spec.latent:
        return "needs values that the scores read too"
    if spec.head_dim % 8 or spec.latent % 32 or spec.head_dim + spec.latent > 576:
        return f"needs keys in eights and values in 32s up to 576 in all, got {spec.head_dim} and {spec.latent}"
    if spec.n_kv != 1 or spec.window or spec.cap or spec.sinks:
        return f"needs one key head and neither window, cap nor sinks, got {spec}"
    return None


IMPLEMENTATIONS = (Implementation(ATTENTION, "compressed keys by SIMD-group matrices", build_attention, _accepts),)
