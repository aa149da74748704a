"""Causal convolution over the tokens of each sequence, prefill and single steps alike, state in float32.

A thread takes a channel and CHUNK tokens: x once (plus W - 1 rows of halo), y once; 20 registers, no threadgroup memory and
no barrier. As in the scans, the state's slot is read once before, and the new state comes out as rows, which one scatter
puts back into the slots: 2 reads and 2 writes of the state a step, where in-place kernels (llama.cpp's) have 1 and 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from quarrel.mlx_backend.runtime.cache import put_rows
from quarrel.mlx_backend.runtime.kernel import Kernel
from quarrel.mlx_backend.runtime.launch import Batch, Launch, Site, cdiv
from quarrel.ops.contract import Operand
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.ops.state import CONV, ConvSpec

_CHUNK = 32  # tokens a thread walks: a tenth of its reads are halo with four taps
_THREADS = 128

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
    y[at] = T(SILU ? sum / (1.0f + precise::exp(-sum)) : sum);
  }
  if (last == count) {
    UNROLL for (int j = 0; j < W - 1; j++) after[(ulong(s) * (W - 1) + j) * channels + c] = seen[j];
  }
""",
)


def conv(spec: ConvSpec, taps: mx.array, bias: mx.array, out: mx.Dtype) -> Launch:
    """x `[T, channels]`, query_start, kv_len, slots, state `[slots, W - 1, channels]`, to y of type `out` and the state."""
    template = [("T", out), ("W", spec.width), ("CHUNK", _CHUNK), ("SILU", int(spec.activation == "silu"))]

    def run(
        batch: Batch, x: mx.array, query_start: mx.array, kv_len: mx.array, slots: mx.array, state: mx.array
    ) -> list[mx.array]:
        seqs = kv_len.shape[0]
        y, after = _CONV(
            [x, taps, bias, query_start, kv_len, slots, state],
            [x.shape, (seqs, *spec.state)],
            [out, mx.float32],
            (cdiv(spec.channels, _THREADS), max(cdiv(batch.max_new, _CHUNK), 1), seqs),
            (_THREADS,),
            template,
        )
        return [y, put_rows(state, slots, after)]

    return run


def build_conv(site: Site, node: Node) -> Launch:
    """CONV: taps `[channels, W]`, bias `[channels]` if there is one."""
    taps, bias = conv_weights(site, node.spec, node.inputs[1:])
    return conv(node.spec, taps, bias, site.act)


def conv_weights(site: Site, spec: ConvSpec, weights: Sequence[Operand]) -> tuple[mx.array, mx.array]:
    """Taps and bias at the beginning of `weights`; zeros for a convolution without a bias."""
    taps = site.vector(weights[0])  # type: ignore[arg-type]
    # Not mx.zeros, which would be left to be evaluated in the thread of the first step.
    none = mx.array(np.zeros(spec.channels, np.float32))
    return taps, site.vector(weights[1]) if spec.bias else none  # type: ignore[arg-type]


def takes_conv(spec: ConvSpec) -> str | None:
    """Why a convolution of this width is declined, or None."""
    return None if 2 <= spec.width <= 16 else f"needs 2 to 16 taps, got {spec.width}"


IMPLEMENTATIONS = (Implementation(CONV, "a thread a channel", build_conv, takes_conv),)
