"""The selective scan of Mamba-2, and the whole mixer: convolution, scan, gated norm; state in float32.

8 lanes take 4 rows of a head: a SIMD-group holds 8 rows of N states, N / 4 floats a lane, and adds a row's products over 8
lanes by 3 shuffles (a SIMD-group a row, as in llama.cpp, takes 5 a row and reads B and C 8 times as often); 110 registers,
no threadgroup memory, no barrier. A step moves the state and nothing else to speak of: 80% of the bus expected. Tokens are
read ahead, and a result depends neither on the batch nor on how a prompt is cut, as in `mamba1.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from quarrel.mlx_backend.norm import gated_norm, takes_norm
from quarrel.mlx_backend.recurrent.conv import conv, conv_weights, takes_conv
from quarrel.mlx_backend.runtime.cache import put_rows
from quarrel.mlx_backend.runtime.kernel import Kernel
from quarrel.mlx_backend.runtime.launch import Batch, Launch, Site, cdiv
from quarrel.mlx_backend.runtime.metal import SOFTPLUS, vector_width
from quarrel.ops.mixer import MAMBA2_MIX, Mamba2MixSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.ops.state import SCAN2, Scan2Spec

_THREADS = 128
_ROWS_EACH = 2  # rows of a head that a lane holds: 32 registers of state with 128 states

# Lane l of 8 holds states (i * 8 + l) * VEC + j of a row, so that its loads are wide and neighbours' adjoin. Reads of a
# token are under way while the one before is computed.
_SCAN2 = Kernel(
    "quarrel_scan2",
    ("xbc", "dt", "dt_bias", "a", "d", "query_start", "kv_len", "slots", "state"),
    ("y", "after"),
    """
  constexpr int TILES = (P + 4 * ROWS - 1) / (4 * ROWS), WIDTH = H * P + 2 * G * N;
  const int lane = int(thread_index_in_simdgroup), l = lane % 8;
  const int tile = int(threadgroup_position_in_grid.x) * 4 + int(simdgroup_index_in_threadgroup);
  if (tile >= H * TILES) return;
  const int head = tile / TILES, s = int(threadgroup_position_in_grid.y);
  const int row = (tile % TILES * 4 + lane / 8) * ROWS;
  const int begin = query_start[s], count = query_start[s + 1] - begin;
  const bool cached = kv_len[s] > count;
  const int b_at = H * P + head / (H / G) * N, c_at = b_at + G * N;
  float h[ROWS][EACH];
  UNROLL for (int r = 0; r < ROWS; r++) {
    UNROLL for (int i = 0; i < EACH; i++) {
      const int n = (i / VEC * 8 + l) * VEC + i % VEC;
      const bool mine = cached && n < N && row + r < P;
      h[r][i] = mine ? state[((ulong(slots[s]) * H + head) * P + row + r) * N + n] : 0.0f;
    }
  }
  const float rate = a[head], shift = dt_bias[head], skip = d[head];
  X in_next[ROWS], b_next[EACH], c_next[EACH];
  float my_step = 0.0f, my_keep = 0.0f;
  for (int t = -1; t < count; t++) {
    if (t >= 0 && t % 32 == 0) {
      // Each lane makes the step size of one of the next 32 tokens.
      const int ahead = metal::min(t + lane, count - 1);
      my_step = softplus(float(dt[ulong(begin + ahead) * H + head]) + shift);
      my_keep = precise::exp(my_step * rate);
    }
    float in[ROWS], b[EACH], c[EACH], sum[ROWS];
    if (t >= 0) {
      UNROLL for (int r = 0; r < ROWS; r++) in[r] = float(in_next[r]);
      UNROLL for (int i = 0; i < EACH; i++) {
        b[i] = float(b_next[i]);
        c[i] = float(c_next[i]);
      }
    }
    if (t + 1 < count) {
      const ulong from = ulong(begin + t + 1) * WIDTH;
      UNROLL for (int r = 0; r < ROWS; r++) in_next[r] = row + r < P ? xbc[from + head * P + row + r] : X(0.0f);
      UNROLL for (int i = 0; i < EACH; i++) {
        const int n = (i / VEC * 8 + l) * VEC + i % VEC;
        b_next[i] = n < N ? xbc[from + b_at + n] : X(0.0f);
        c_next[i] = n < N ? xbc[from + c_at + n] : X(0.0f);
      }
    }
    if (t < 0) continue;
    const float step = simd_shuffle(my_step, ushort(t % 32)), keep = simd_shuffle(my_keep, ushort(t % 32));
    UNROLL for (int r = 0; r < ROWS; r++) {
      sum[r] = 0.0f;
      UNROLL for (int i = 0; i < EACH; i++) {
        h[r][i] = keep * h[r][i] + step * in[r] * b[i];
        sum[r] += h[r][i] * c[i];
      }
      sum[r] += simd_shuffle_xor(sum[r], 4);
      sum[r] += simd_shuffle_xor(sum[r], 2);
      sum[r] += simd_shuffle_xor(sum[r], 1);
    }
    UNROLL for (int r = 0; r < ROWS; r++) {
      if (l == r && row + r < P) y[(ulong(begin + t) * H + head) * P + row + r] = T(sum[r] + skip * in[r]);
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


def scan2(spec: Scan2Spec, weights: Sequence[mx.array], out: mx.Dtype) -> Launch:
    """xbc `[T, H P + 2 G N]`, dt `[T, H]`, then as `conv`, state `[slots, H, P, N]`; `weights`: dt_bias, a and d `[H]`."""
    # Wide loads where 8 lanes of them make a row without a rest.
    wide = vector_width(spec.n_state // 8) if spec.n_state % 8 == 0 else 1
    each = cdiv(spec.n_state, 8 * wide) * wide
    tiles = spec.n_heads * cdiv(spec.head_dim, 4 * _ROWS_EACH)
    template = [("T", out), ("H", spec.n_heads), ("P", spec.head_dim), ("G", spec.n_groups), ("N", spec.n_state)]
    template += [("EACH", each), ("VEC", wide), ("ROWS", _ROWS_EACH)]

    def run(
        batch: Batch,
        xbc: mx.array,
        dt: mx.array,
        query_start: mx.array,
        kv_len: mx.array,
        slots: mx.array,
        state: mx.array,
    ) -> list[mx.array]:
        seqs = kv_len.shape[0]
        y, after = _SCAN2(
            [xbc, dt, *weights, query_start, kv_len, slots, state],
            [(xbc.shape[0], spec.d_inner), (seqs, *spec.state)],
            [out, mx.float32],
            (cdiv(tiles, 4), seqs),
            (_THREADS,),
            [*template, ("X", xbc.dtype)],
        )
        return [y, put_rows(state, slots, after)]

    return run


def build_scan2(site: Site, node: Node) -> Launch:
    """SCAN2."""
    return scan2(node.spec, [site.vector(w) for w in node.inputs[2:5]], site.act)  # type: ignore[arg-type]


def build_mamba2_mix(site: Site, node: Node) -> Launch:
    """MAMBA2_MIX: the three in a row, float32 in between, which float16 may not hold."""
    spec: Mamba2MixSpec = node.spec
    taps, offset = conv_weights(site, spec.conv, node.inputs[3:])
    dt_bias, a, d, gain = (site.vector(w) for w in node.inputs[-9:-5])  # type: ignore[arg-type]
    before, scan = conv(spec.conv, taps, offset, mx.float32), scan2(spec.scan, (dt_bias, a, d), mx.float32)
    after = gated_norm(spec.norm, gain, site.act)

    def run(
        batch: Batch,
        xbc: mx.array,
        dt: mx.array,
        z: mx.array,
        query_start: mx.array,
        kv_len: mx.array,
        slots: mx.array,
        conv_state: mx.array,
        state: mx.array,
    ) -> list[mx.array]:
        ragged = (query_start, kv_len, slots)
        xbc, conv_state = before(batch, xbc, *ragged, conv_state)
        y, state = scan(batch, xbc, dt, *ragged, state)
        return [*after(batch, y, z), conv_state, state]

    return run


def _takes_scan2(spec: Scan2Spec) -> str | None:
    return None if spec.n_state <= 256 else f"needs at most 256 states a row, got {spec.n_state}"


def _takes_mix(spec: Mamba2MixSpec) -> str | None:
    return takes_conv(spec.conv) or _takes_scan2(spec.scan) or takes_norm(spec.norm)


IMPLEMENTATIONS = (
    Implementation(SCAN2, "eight lanes a row", build_scan2, _takes_scan2),
    Implementation(MAMBA2_MIX, "three launches, float32 in between", build_mamba2_mix, _takes_mix),
)
