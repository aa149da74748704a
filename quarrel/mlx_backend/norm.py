"""RMS, layer and gated norm of `[T, groups * k]`, each run of `k` values by itself; and the largest values of rows.

A run is loaded once into the registers of its threads, summed (twice for layer norm), scaled and written: 4 bytes in and 2
out a value for the float32 stream, against 4 + 4 + 4 + 2 for MLX's `rms_norm`, whose result has the type of its inputs,
and a cast behind it. Where everything is float32 MLX's kernels move the same bytes, and are used.

    threads      32 a run up to 256 values (heads: 4 runs a threadgroup), then 128, 256 (more find no room on M1)
    registers    8 values a thread up to 2048 values a run, about 30 in all; 80 of the longest, about 110
    threadgroup  128 bytes, for runs of more than one SIMD-group
    bandwidth    a decode step's one row is bound by the launch (2 us); prefill rows reach 80 to 90% of the bus
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from quarrel.mlx_backend.runtime.kernel import Kernel
from quarrel.mlx_backend.runtime.launch import Batch, Launch, Site, cdiv
from quarrel.mlx_backend.runtime.metal import vector_width
from quarrel.ops.activation import LARGEST, LargestSpec
from quarrel.ops.norm import NORM, NormSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.ops.state import GATED_NORM, GatedNormSpec

_LONGEST = 20480
_EACH = 8

_HEADER = """
// The sum over a run: over its SIMD-group, then over the PARTS SIMD-groups in their order, which every thread adds.
template <int PARTS>
inline float over_run(float mine, threadgroup float* sums, int place, int lane) {
  float total = simd_sum(mine);
  if (PARTS > 1) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (lane == 0) sums[place] = total;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    total = 0.0f;
    UNROLL for (int i = 0; i < PARTS; i++) total += sums[i];
  }
  return total;
}
"""

# PARTS SIMD-groups a run. A SIMD-group past the last run computes the last one again, so that none misses a barrier.
_SOURCE = """
  const int K = sizes[0], gains = sizes[1];
  const ulong runs = ulong(x_shape[0]) * ulong(x_shape[1] / K);
  const int lane = int(thread_index_in_simdgroup), place = int(simdgroup_index_in_threadgroup);
  const int run = int(threadgroup_position_in_grid.x) * (GROUPS / PARTS) + place / PARTS;
  const bool mine = ulong(run) < runs;
  const ulong begin = (mine ? ulong(run) : runs - 1) * ulong(K);
  const int first = (place % PARTS * 32 + lane) * VEC;
  constexpr int STRIDE = PARTS * 32 * VEC;
  threadgroup float sums[PARTS];
  float v[EACH];
  float sum = 0.0f;
  UNROLL for (int i = 0; i < EACH / VEC; i++) {
    const int at = first + i * STRIDE;
    UNROLL for (int j = 0; j < VEC; j++) v[i * VEC + j] = 0.0f;
    if (at >= K) continue;
    UNROLL for (int j = 0; j < VEC; j++) v[i * VEC + j] = float(x[begin + ulong(at + j)]);
    if (GATED) {
      UNROLL for (int j = 0; j < VEC; j++) {
        const float gate = float(z[begin + ulong(at + j)]);
        v[i * VEC + j] *= gate / (1.0f + precise::exp(-gate));
      }
    }
    UNROLL for (int j = 0; j < VEC; j++) sum += LAYER ? v[i * VEC + j] : v[i * VEC + j] * v[i * VEC + j];
  }
  sum = over_run<PARTS>(sum, sums, place % PARTS, lane);
  float mean = 0.0f;
  if (LAYER) {
    mean = sum / float(K);
    sum = 0.0f;
    UNROLL for (int i = 0; i < EACH / VEC; i++) {
      if (first + i * STRIDE >= K) break;
      UNROLL for (int j = 0; j < VEC; j++) sum += (v[i * VEC + j] - mean) * (v[i * VEC + j] - mean);
    }
    sum = over_run<PARTS>(sum, sums, place % PARTS, lane);
  }
  const float scale = 1.0f / precise::sqrt(sum / float(K) + eps[0]);
  const int gain_at = run % gains * K;
  UNROLL for (int i = 0; i < EACH / VEC; i++) {
    const int at = first + i * STRIDE;
    if (!mine || at >= K) break;
    UNROLL for (int j = 0; j < VEC; j++) {
      float value = v[i * VEC + j] - mean;
      if (LARGEST) {
        value -= eps[0] * precise::sqrt(sum / float(K));  // eps: how many deviations
        value = value > 0.0f ? value : value * 0.0f;
      } else {
        value = value * scale * gain[gain_at + at + j];
        if (LAYER) value += bias[at + j];
      }
      y[begin + ulong(at + j)] = Y(value);
    }
  }
"""

_NORM = Kernel("quarrel_norm", ("x", "z", "gain", "bias", "sizes", "eps"), ("y",), _SOURCE, _HEADER)


@dataclass(frozen=True)
class _Rows:
    """A launch for runs of `k` values: how they are dealt out follows from k alone, never from how many there are."""

    k: int
    gains: int
    eps: float
    layer: bool = False
    gated: bool = False
    largest: bool = False

    def build(self, gain: mx.array, bias: mx.array, out: mx.Dtype) -> Callable[[mx.array, mx.array], list[mx.array]]:
        """`(x, z) -> [y]`; z is read by gated norms only."""
        parts, each = _shape(self.k)
        groups = max(parts, 4)
        sizes, eps = mx.array([self.k, self.gains], mx.int32), mx.array([self.eps], mx.float32)
        fixed = [("EACH", each), ("PARTS", parts), ("GROUPS", groups), ("VEC", vector_width(self.k))]
        fixed += [("LAYER", self.layer), ("GATED", self.gated), ("LARGEST", self.largest), ("Y", out)]

        def run(x: mx.array, z: mx.array) -> list[mx.array]:
            count = cdiv(x.size // self.k, groups // parts)
            return _NORM([x, z, gain, bias, sizes, eps], [x.shape], [out], (count,), (groups * 32,), fixed)

        return run


def _shape(k: int) -> tuple[int, int]:
    """SIMD-groups to a run, and values to a thread."""
    parts = next((p for p in (1, 4) if k <= p * 32 * _EACH), 8)
    return parts, cdiv(k, parts * 32 * _EACH) * _EACH


def build_norm(site: Site, node: Node) -> Launch:
    """NORM: x `[T, groups * k]` float32 or the compute type, gain and bias `[k]` float32."""
    spec: NormSpec = node.spec
    vectors = [site.vector(g) for g in node.inputs[1:]]  # type: ignore[arg-type]
    out = site.dtype(spec.out)
    rows = _Rows(spec.k, 1, spec.eps, layer=spec.kind == "layer").build(vectors[0], vectors[-1], out)

    def run(batch: Batch, x: mx.array) -> list[mx.array]:
        if x.dtype == out == mx.float32:
            runs = x.reshape(-1, spec.k)
            layer = spec.kind == "layer"
            y = mx.fast.layer_norm(runs, *vectors, spec.eps) if layer else mx.fast.rms_norm(runs, *vectors, spec.eps)
            return [y.reshape(x.shape)]
        return rows(x, x)

    return run


def gated_norm(spec: GatedNormSpec, gain: mx.array, out: mx.Dtype) -> Launch:
    """y and z `[T, groups * k]`, of any float type each, to rows of type `out`."""
    rows = _Rows(spec.k, spec.groups, spec.eps, gated=True).build(gain, gain, out)

    def run(batch: Batch, y: mx.array, z: mx.array) -> list[mx.array]:
        return rows(y, z)

    return run


def build_gated_norm(site: Site, node: Node) -> Launch:
    """GATED_NORM: gain `[groups, k]` float32."""
    return gated_norm(node.spec, site.vector(node.inputs[2]), site.act)  # type: ignore[arg-type]


def build_largest(site: Site, node: Node) -> Launch:
    """LARGEST: x `[T, n]`."""
    spec: LargestSpec = node.spec
    none = mx.array([0.0])
    rows = _Rows(spec.n, 1, spec.deviations, layer=True, largest=True).build(none, none, site.act)
    return lambda batch, x: rows(x, x)


def takes_largest(spec: LargestSpec) -> str | None:
    """Why rows of this length are declined, or None."""
    return None if spec.n <= _LONGEST else f"needs rows of at most {_LONGEST} values, got {spec.n}"


def takes_norm(spec: NormSpec | GatedNormSpec) -> str | None:
    """Why runs of this length are declined, or None."""
    return None if spec.k <= _LONGEST else f"needs runs of at most {_LONGEST} values, got {spec.k}"


IMPLEMENTATIONS = (
    Implementation(NORM, "rows in registers", build_norm, takes_norm),
    Implementation(GATED_NORM, "rows in registers", build_gated_norm, takes_norm),
    Implementation(LARGEST, "rows in registers", build_largest, takes_largest),
)
