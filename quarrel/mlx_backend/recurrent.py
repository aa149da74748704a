"""Causal convolution and the selective scans of Mamba-1 and Mamba-2, prefill and single steps alike, state in float32.

Each kernel walks one sequence's tokens with its state in registers, reads the state's slot once before and hands the new
state out as rows, which one scatter puts back into the slots: 2 reads and 2 writes of the state a step, where in-place
kernels (llama.cpp's) have 1 and 1. Neither kernel uses threadgroup memory or a barrier. What of a sum a lane makes follows
from the shape alone, so a token's result depends neither on the batch nor on how a prompt is cut. The scans read a token
ahead, since the compiler cannot move a load before the store of a result that may be the same memory.

    conv    a thread a channel and CHUNK tokens: x once (plus W - 1 rows of halo), y once; 20 registers
    scan1   4 lanes a channel, N / 4 states each; the exponentials, not the bytes, bound prefill; 50 registers
    scan2   8 lanes by 4 rows of a head: a SIMD-group holds 8 rows of N states, N / 4 floats a lane, and adds a row's
            products over 8 lanes by 3 shuffles (a SIMD-group a row, as in llama.cpp, takes 5 a row and reads B and C 8
            times as often); 110 registers. A step moves the state and nothing else to speak of: 80% of the bus expected
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from quarrel.mlx_backend.kernel import Kernel
from quarrel.mlx_backend.norm import gated_norm, takes_norm
from quarrel.mlx_backend.runtime import Launch, Live, Site, cdiv
from quarrel.mlx_backend.scatter import put_rows
from quarrel.mlx_backend.text import vector_width
from quarrel.ops.mixer import MAMBA2_MIX, Mamba2MixSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.ops.state import CONV, SCAN1, SCAN2, ConvSpec, Scan1Spec, Scan2Spec

_CHUNK = 32  # tokens a thread of the convolution walks: a tenth of its reads are halo with four taps
_THREADS = 128
_ROWS_EACH = 2  # rows of a head that a lane of scan2 holds: 32 registers of state with 128 states

_STEP_SIZE = """
// log(1 + exp(x)) to a few ulp: log(1 + e) is 2 atanh(e / (2 + e)), whose series converges fast for e in (0, 1].
inline float softplus(float x) {
  const float e = precise::exp(-metal::abs(x));
  const float s = e / (2.0f + e), q = s * s;
  float series = 1.0f / 17;
  series = fma(series, q, 1.0f / 15);
  series = fma(series, q, 1.0f / 13);
  series = fma(series, q, 1.0f / 11);
  series = fma(series, q, 1.0f / 9);
  series = fma(series, q, 1.0f / 7);
  series = fma(series, q, 1.0f / 5);
  series = fma(series, q, 1.0f / 3);
  series = fma(series, q, 1.0f);
  return metal::max(x, 0.0f) + 2.0f * s * series;
}
"""

_CONV = Kernel(
    "quarrel_conv",
    ("x", "taps", "bias", "query_start", "kv_len", "slots", "state"),
    ("y", "after"),
    """
  const int channels = x_shape[1];
  const int c = int(thread_position_in_grid.x), s = int(threadgroup_position_in_grid.z);
  const int first = int(threadgroup_position_in_grid.y) * CHUNK;
  const int begin = query_start[s], count = query_start[s + 1] - begin;
  if (c >= channels || (first > 0 && first >= count)) return;
  const bool cached = kv_len[s] > count;
  float seen[W - 1], tap[W];  // the inputs before the next one
  UNROLL for (int j = 0; j < W; j++) tap[j] = taps[c * W + j];
  UNROLL for (int j = 0; j < W - 1; j++) {
    const int t = first - (W - 1) + j;
    seen[j] = 0.0f;
    if (t >= 0) {
      seen[j] = float(x[ulong(begin + t) * channels + c]);
    } else if (cached) {
      seen[j] = state[(ulong(slots[s]) * (W - 1) + ulong(W - 1 + t)) * channels + c];
    }
  }
  const int last = metal::min(first + CHUNK, count);
  for (int t = first; t < last; t++) {
    const ulong at = ulong(begin + t) * channels + c;
    const float newest = float(x[at]);
    float sum = 0.0f;
    UNROLL for (int j = 0; j < W - 1; j++) sum += seen[j] * tap[j];
    sum += newest * tap[W - 1] + bias[c];
    UNROLL for (int j = 0; j < W - 2; j++) seen[j] = seen[j + 1];
    seen[W - 2] = newest;
    y[at] = T(sum / (1.0f + precise::exp(-sum)));
  }
  if (last == count) {
    UNROLL for (int j = 0; j < W - 1; j++) after[(ulong(s) * (W - 1) + j) * channels + c] = seen[j];
  }
""",
)

_SCAN1 = Kernel(
    "quarrel_scan1",
    ("x", "dt", "b", "c", "a", "d", "query_start", "kv_len", "slots", "state"),
    ("y", "after"),
    """
  const int channels = x_shape[1];
  const int s = int(threadgroup_position_in_grid.y), channel = int(thread_position_in_grid.x) / 4;
  const int begin = query_start[s], count = query_start[s + 1] - begin;
  if (channel >= channels) return;  // all lanes of a quad together
  const int first = int(thread_index_in_simdgroup) % 4 * EACH;
  const bool cached = kv_len[s] > count;
  float h[EACH], decay[EACH], b_next[EACH], c_next[EACH], in_next = 0.0f, dt_next = 0.0f;
  UNROLL for (int i = 0; i < EACH; i++) {
    const int n = first + i;
    decay[i] = n < N ? a[channel * N + n] : 0.0f;
    h[i] = cached && n < N ? state[(ulong(slots[s]) * channels + channel) * N + n] : 0.0f;
    b_next[i] = c_next[i] = 0.0f;
  }
  const float skip = d[channel];
  // A token ahead: what it reads is under way while the one before is computed.
  for (int t = begin - 1; t < begin + count; t++) {
    const float in = in_next, step = softplus(dt_next);
    float b_now[EACH], c_now[EACH];
    UNROLL for (int i = 0; i < EACH; i++) {
      b_now[i] = b_next[i];
      c_now[i] = c_next[i];
    }
    if (t + 1 < begin + count) {
      in_next = float(x[ulong(t + 1) * channels + channel]);
      dt_next = float(dt[ulong(t + 1) * channels + channel]);
      UNROLL for (int i = 0; i < EACH; i++) {
        if (first + i >= N) break;
        b_next[i] = float(b[ulong(t + 1) * N + first + i]);
        c_next[i] = float(c[ulong(t + 1) * N + first + i]);
      }
    }
    if (t < begin) continue;
    const ulong at = ulong(t) * channels + channel;
    float sum = 0.0f;
    UNROLL for (int i = 0; i < EACH; i++) {
      h[i] = precise::exp(step * decay[i]) * h[i] + step * in * b_now[i];
      sum += h[i] * c_now[i];
    }
    sum = quad_sum(sum);
    if (first == 0) y[at] = T(sum + skip * in);
  }
  UNROLL for (int i = 0; i < EACH; i++) {
    if (first + i < N) after[(ulong(s) * channels + channel) * N + first + i] = h[i];
  }
""",
    _STEP_SIZE,
)

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
    _STEP_SIZE,
)


def conv(spec: ConvSpec, taps: mx.array, bias: mx.array, out: mx.Dtype) -> Launch:
    """x `[T, channels]`, query_start, kv_len, slots, state `[slots, W - 1, channels]`, to y of type `out` and the state."""
    template = [("T", out), ("W", spec.width), ("CHUNK", _CHUNK)]

    def run(
        live: Live, x: mx.array, query_start: mx.array, kv_len: mx.array, slots: mx.array, state: mx.array
    ) -> list[mx.array]:
        seqs = kv_len.shape[0]
        y, after = _CONV(
            [x, taps, bias, query_start, kv_len, slots, state],
            [x.shape, (seqs, *spec.state)],
            [out, mx.float32],
            (cdiv(spec.channels, _THREADS), max(cdiv(live.longest, _CHUNK), 1), seqs),
            (_THREADS,),
            template,
        )
        return [y, put_rows(state, slots, after)]

    return run


def build_conv(site: Site, node: Node) -> Launch:
    """CONV: taps `[channels, W]`, bias `[channels]`."""
    taps, bias = (site.vector(w) for w in node.inputs[1:3])  # type: ignore[arg-type]
    return conv(node.spec, taps, bias, site.act)


def build_scan1(site: Site, node: Node) -> Launch:
    """SCAN1: x and dt `[T, channels]`, b and c `[T, n_state]`, a `[channels, n_state]`, d `[channels]`."""
    spec: Scan1Spec = node.spec
    a, d = (site.vector(w) for w in node.inputs[4:6])  # type: ignore[arg-type]
    template = [("T", site.act), ("N", spec.n_state), ("EACH", cdiv(spec.n_state, 4))]

    def run(
        live: Live,
        x: mx.array,
        dt: mx.array,
        b: mx.array,
        c: mx.array,
        query_start: mx.array,
        kv_len: mx.array,
        slots: mx.array,
        state: mx.array,
    ) -> list[mx.array]:
        seqs = kv_len.shape[0]
        y, after = _SCAN1(
            [x, dt, b, c, a, d, query_start, kv_len, slots, state],
            [x.shape, (seqs, *spec.state)],
            [site.act, mx.float32],
            (cdiv(spec.channels * 4, _THREADS), seqs),
            (_THREADS,),
            template,
        )
        return [y, put_rows(state, slots, after)]

    return run


def scan2(spec: Scan2Spec, weights: Sequence[mx.array], out: mx.Dtype) -> Launch:
    """xbc `[T, H P + 2 G N]`, dt `[T, H]`, then as `conv`, state `[slots, H, P, N]`; `weights`: dt_bias, a and d `[H]`."""
    # Wide loads where 8 lanes of them make a row without a rest.
    wide = vector_width(spec.n_state // 8) if spec.n_state % 8 == 0 else 1
    each = cdiv(spec.n_state, 8 * wide) * wide
    tiles = spec.n_heads * cdiv(spec.head_dim, 4 * _ROWS_EACH)
    template = [("T", out), ("H", spec.n_heads), ("P", spec.head_dim), ("G", spec.n_groups), ("N", spec.n_state)]
    template += [("EACH", each), ("VEC", wide), ("ROWS", _ROWS_EACH)]

    def run(
        live: Live,
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
            [(xbc.shape[0], spec.inner), (seqs, *spec.state)],
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
    taps, offset, dt_bias, a, d, gain = (site.vector(w) for w in node.inputs[3:9])  # type: ignore[arg-type]
    before, scan = conv(spec.conv, taps, offset, mx.float32), scan2(spec.scan, (dt_bias, a, d), mx.float32)
    after = gated_norm(spec.norm, gain, site.act)

    def run(
        live: Live,
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
        xbc, conv_state = before(live, xbc, *ragged, conv_state)
        y, state = scan(live, xbc, dt, *ragged, state)
        return [*after(live, y, z), conv_state, state]

    return run


def _takes_scan2(spec: Scan2Spec) -> str | None:
    return None if spec.n_state <= 256 else f"needs at most 256 states a row, got {spec.n_state}"


def _takes_scan1(spec: Scan1Spec) -> str | None:
    return None if spec.n_state <= 128 else f"needs at most 128 states a channel, got {spec.n_state}"


def _takes_mix(spec: Mamba2MixSpec) -> str | None:
    return _takes_conv(spec.conv) or _takes_scan2(spec.scan) or takes_norm(spec.norm)


def _takes_conv(spec: ConvSpec) -> str | None:
    return None if 2 <= spec.width <= 16 else f"needs 2 to 16 taps, got {spec.width}"


IMPLEMENTATIONS = (
    Implementation(CONV, "a thread a channel", build_conv, _takes_conv),
    Implementation(SCAN1, "four lanes a channel", build_scan1, _takes_scan1),
    Implementation(SCAN2, "eight lanes a row", build_scan2, _takes_scan2),
    Implementation(MAMBA2_MIX, "three launches, float32 in between", build_mamba2_mix, _takes_mix),
)
