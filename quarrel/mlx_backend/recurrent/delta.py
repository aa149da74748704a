"""The gated delta rule, prefill and single steps alike, state in float32.

As in `mamba2.py`, 8 lanes take rows of a head: a SIMD-group holds 8 rows of N states, N / 4 floats a lane. What the decayed
state predicts for the key and gives the query are summed together, two sums a row over 8 lanes; the products of the query
and the key with themselves and each other are made by all rows alike. 130 registers, no threadgroup memory, no barrier; a
step moves the state and nothing else to speak of. The next token is read ahead; a result depends neither on the batch nor
on how a prompt is cut.
"""

from __future__ import annotations

import mlx.core as mx

from quarrel.mlx_backend.runtime.cache import put_rows
from quarrel.mlx_backend.runtime.kernel import Kernel
from quarrel.mlx_backend.runtime.launch import Batch, Launch, Site, cdiv
from quarrel.mlx_backend.runtime.metal import SOFTPLUS, vector_width
from quarrel.ops.delta import DELTA, DeltaSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation

_THREADS = 128
_ROWS_EACH = 2  # rows of a head that a lane holds: 32 registers of state with keys of 128 values

# Lane l of 8 holds values (i * 8 + l) * VEC + j of a row, so that its loads are wide and neighbours' adjoin.
_DELTA = Kernel(
    "quarrel_delta",
    ("qkv", "alpha", "beta", "dt_bias", "a", "eps", "query_start", "kv_len", "slots", "state"),
    ("y", "after"),
    """
  constexpr int TILES = (P + 4 * ROWS - 1) / (4 * ROWS), WIDTH = 2 * G * N + H * P;
  const int lane = int(thread_index_in_simdgroup), l = lane % 8;
  const int tile = int(threadgroup_position_in_grid.x) * 4 + int(simdgroup_index_in_threadgroup);
  if (tile >= H * TILES) return;
  const int head = tile / TILES, s = int(threadgroup_position_in_grid.y);
  const int row = (tile % TILES * 4 + lane / 8) * ROWS;
  const int begin = query_start[s], count = query_start[s + 1] - begin;
  const bool cached = kv_len[s] > count;
  const int key = GROUPED ? head / (H / G) : head % G, k_at = G * N;
  float h[ROWS][EACH];
  UNROLL for (int r = 0; r < ROWS; r++) {
    UNROLL for (int i = 0; i < EACH; i++) {
      const int n = (i / VEC * 8 + l) * VEC + i % VEC;
      const bool mine = cached && n < N && row + r < P;
      h[r][i] = mine ? state[((ulong(slots[s]) * H + head) * P + row + r) * N + n] : 0.0f;
    }
  }
  const float decay = a[head], shift = dt_bias[head], scale = precise::rsqrt(float(N));
  X v_next[ROWS], q_next[EACH], k_next[EACH];
  float my_keep = 0.0f, my_rate = 0.0f;
  for (int t = -1; t < count; t++) {
    if (t >= 0 && t % 32 == 0) {
      // Each lane makes the decay and the rate of one of the next 32 tokens.
      const ulong ahead = ulong(begin + metal::min(t + lane, count - 1)) * H + head;
      my_keep = precise::exp(softplus(float(alpha[ahead]) + shift) * decay);
      my_rate = 1.0f / (1.0f + precise::exp(-float(beta[ahead])));
    }
    float v[ROWS], q[EACH], k[EACH], out[ROWS];
    if (t >= 0) {
      UNROLL for (int r = 0; r < ROWS; r++) v[r] = float(v_next[r]);
      UNROLL for (int i = 0; i < EACH; i++) {
        q[i] = float(q_next[i]);
        k[i] = float(k_next[i]);
      }
    }
    if (t + 1 < count) {
      const ulong from = ulong(begin + t + 1) * WIDTH;
      UNROLL for (int r = 0; r < ROWS; r++) {
        v_next[r] = row + r < P ? qkv[from + 2 * G * N + head * P + row + r] : X(0.0f);
      }
      UNROLL for (int i = 0; i < EACH; i++) {
        const int n = (i / VEC * 8 + l) * VEC + i % VEC;
        q_next[i] = n < N ? qkv[from + key * N + n] : X(0.0f);
        k_next[i] = n < N ? qkv[from + k_at + key * N + n] : X(0.0f);
      }
    }
    if (t < 0) continue;
    float qq = 0.0f, kk = 0.0f, qk = 0.0f;
    UNROLL for (int i = 0; i < EACH; i++) {
      qq += q[i] * q[i];
      kk += k[i] * k[i];
      qk += q[i] * k[i];
    }
    UNROLL for (ushort other = 4; other > 0; other /= 2) {
      qq += simd_shuffle_xor(qq, other);
      kk += simd_shuffle_xor(kk, other);
      qk += simd_shuffle_xor(qk, other);
    }
    const float of_q = scale / precise::sqrt(qq + eps[0]), of_k = 1.0f / precise::sqrt(kk + eps[0]);
    const float keep = simd_shuffle(my_keep, ushort(t % 32)), rate = simd_shuffle(my_rate, ushort(t % 32));
    UNROLL for (int r = 0; r < ROWS; r++) {
      float predicted = 0.0f, seen = 0.0f;
      UNROLL for (int i = 0; i < EACH; i++) {
        h[r][i] = keep * h[r][i];
        predicted += h[r][i] * k[i];
        seen += h[r][i] * q[i];
      }
      UNROLL for (ushort other = 4; other > 0; other /= 2) {
        predicted += simd_shuffle_xor(predicted, other);
        seen += simd_shuffle_xor(seen, other);
      }
      const float wrong = rate * (v[r] - predicted * of_k) * of_k;
      UNROLL for (int i = 0; i < EACH; i++) h[r][i] += wrong * k[i];
      out[r] = (seen + wrong * qk) * of_q;
    }
    UNROLL for (int r = 0; r < ROWS; r++) {
      if (l == r && row + r < P) y[(ulong(begin + t) * H + head) * P + row + r] = T(out[r]);
    }
  }
  UNROLL for (int r = 0; r < ROWS; r++) {
    UNROLL for (int i = 0; i < EACH; i++) {
      const int n = (i / VEC * 8 + l) * VEC + i % VEC;
      if (n < N && row + r < P) after[((ulong(s) * H + head) * P + row + r) * N + n] = h[r][i];
    }
  }
""",
    SOFTPLUS,
)


def build_delta(site: Site, node: Node) -> Launch:
    """DELTA: qkv `[T, 2 G N + H P]`, alpha and beta `[T, H]`, then as `conv`, state `[slots, H, P, N]`."""
    spec: DeltaSpec = node.spec
    dt_bias, a = (site.vector(w) for w in node.inputs[3:5])  # type: ignore[arg-type]
    eps = mx.array([spec.eps], mx.float32)
    # Wide loads where 8 lanes of them make a row without a rest.
    wide = vector_width(spec.k_dim // 8) if spec.k_dim % 8 == 0 else 1
    each = cdiv(spec.k_dim, 8 * wide) * wide
    tiles = spec.n_v * cdiv(spec.v_dim, 4 * _ROWS_EACH)
    template = [("T", site.act), ("H", spec.n_v), ("P", spec.v_dim), ("G", spec.n_k), ("N", spec.k_dim)]
    template += [("EACH", each), ("VEC", wide), ("ROWS", _ROWS_EACH), ("GROUPED", int(spec.grouped))]

    def run(
        batch: Batch,
        qkv: mx.array,
        alpha: mx.array,
        beta: mx.array,
        query_start: mx.array,
        kv_len: mx.array,
        slots: mx.array,
        state: mx.array,
    ) -> list[mx.array]:
        seqs = kv_len.shape[0]
        y, after = _DELTA(
            [qkv, alpha, beta, dt_bias, a, eps, query_start, kv_len, slots, state],
            [(qkv.shape[0], spec.d_inner), (seqs, *spec.state)],
            [site.act, mx.float32],
            (cdiv(tiles, 4), seqs),
            (_THREADS,),
            [*template, ("X", qkv.dtype)],
        )
        return [y, put_rows(state, slots, after)]

    return run


def _takes_delta(spec: DeltaSpec) -> str | None:
    return None if spec.k_dim <= 256 else f"needs keys of at most 256 values, got {spec.k_dim}"


IMPLEMENTATIONS = (Implementation(DELTA, "eight lanes a row", build_delta, _takes_delta),)
