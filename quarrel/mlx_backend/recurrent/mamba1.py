"""The selective scan of Mamba-1, prefill and single steps alike, state in float32.

Four lanes take a channel, N / 4 states each, in registers; the exponentials, not the bytes, bound prefill; 50 registers, no
threadgroup memory, no barrier. The kernel reads a token ahead, since the compiler cannot move a load before the store of a
result that may be the same memory. What of a sum a lane makes follows from the shape alone, so a token's result depends
neither on the batch nor on how a prompt is cut. The state goes in and out as in `conv.py`.
"""

from __future__ import annotations

import mlx.core as mx

from quarrel.mlx_backend.runtime.cache import put_rows
from quarrel.mlx_backend.runtime.kernel import Kernel
from quarrel.mlx_backend.runtime.launch import Batch, Launch, Site, cdiv
from quarrel.mlx_backend.runtime.metal import SOFTPLUS
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.ops.state import SCAN1, Scan1Spec

_THREADS = 128

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
    SOFTPLUS,
)


def build_scan1(site: Site, node: Node) -> Launch:
    """SCAN1: x and dt `[T, channels]`, b and c `[T, n_state]`, a `[channels, n_state]`, d `[channels]`."""
    spec: Scan1Spec = node.spec
    a, d = (site.vector(w) for w in node.inputs[4:6])  # type: ignore[arg-type]
    template = [("T", site.act), ("N", spec.n_state), ("EACH", cdiv(spec.n_state, 4))]

    def run(
        batch: Batch,
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


def _takes_scan1(spec: Scan1Spec) -> str | None:
    return None if spec.n_state <= 128 else f"needs at most 128 states a channel, got {spec.n_state}"


IMPLEMENTATIONS = (Implementation(SCAN1, "four lanes a channel", build_scan1, _takes_scan1),)
