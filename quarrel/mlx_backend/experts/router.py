"""Choosing experts: a SIMD-group a token, the best taken one after the other, the lower id among equals.

A lane holds every 32nd expert. Scores are compared by their bits, so that a NaN is the last choice and an id is always an
expert's; where no bias is added the logits themselves are compared, as a float32 sigmoid makes ties of experts that are
not. A token's few kB of logits and its `used` rounds of two reductions over lanes cost less than the launch (2 us); MLX's
`argpartition` does not say which of equal scores it takes, and would need 6 launches. 30 registers for 128 experts.
"""

from __future__ import annotations

import mlx.core as mx

from quarrel.mlx_backend.runtime.kernel import Kernel
from quarrel.mlx_backend.runtime.launch import Batch, Launch, Site, cdiv
from quarrel.mlx_backend.runtime.metal import RANK_OF
from quarrel.ops.moe import ROUTE, SMALLEST_SUM, RouteSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation

_GATES = {"softmax": 0, "softmax_topk": 1, "sigmoid": 2}
_TOKENS = 4  # SIMD-groups of a threadgroup

_HEADER = (
    RANK_OF
    + """
// The id of the highest rank in the SIMD-group, the lower one among equals. A lane's experts are lane, lane + 32, ...
template <int EACH>
inline int highest(thread const uint* rank, int lane) {
  uint best = rank[0];
  int id = lane;
  UNROLL for (int i = 1; i < EACH; i++) {
    if (rank[i] > best) {
      best = rank[i];
      id = i * 32 + lane;
    }
  }
  const uint top = simd_max(best);
  return simd_min(best == top ? id : 0x7FFFFFFF);
}

// The value of an expert, from the lane that owns it.
template <int EACH>
inline float of_expert(thread const float* values, int id) {
  float value = values[0];
  UNROLL for (int i = 1; i < EACH; i++) value = id / 32 == i ? values[i] : value;
  return simd_shuffle(value, ushort(id % 32));
}
"""
)

_ROUTE = Kernel(
    "quarrel_route",
    ("logits", "bias", "gains", "numbers"),
    ("ids", "weights"),
    """
  constexpr int EACH = (EXPERTS + 31) / 32;
  const int lane = int(thread_index_in_simdgroup), tokens = logits_shape[0];
  const int t = int(threadgroup_position_in_grid.x) * 4 + int(simdgroup_index_in_threadgroup);
  if (t >= tokens) return;
  float z[EACH], p[EACH], score[EACH], least = -INFINITY;
  UNROLL for (int i = 0; i < EACH; i++) {
    z[i] = i * 32 + lane < EXPERTS ? float(logits[ulong(t) * EXPERTS + i * 32 + lane]) : -INFINITY;
  }
  if (GATE == 0) {
    float top = z[0], sum = 0.0f;
    UNROLL for (int i = 1; i < EACH; i++) top = metal::max(top, z[i]);
    top = simd_max(top);
    UNROLL for (int i = 0; i < EACH; i++) {
      p[i] = precise::exp(z[i] - top);
      sum += p[i];
    }
    sum = simd_sum(sum);
    UNROLL for (int i = 0; i < EACH; i++) p[i] /= sum;
    least = top - 745.1332f;
  } else {
    UNROLL for (int i = 0; i < EACH; i++) p[i] = GATE == 1 ? z[i] : 1.0f / (1.0f + precise::exp(-z[i]));
  }
  // 0 is taken or no expert at all, 1 the last choice.
  uint rank[EACH];
  UNROLL for (int i = 0; i < EACH; i++) {
    const int id = i * 32 + lane;
    score[i] = p[i] + (BIAS && id < EXPERTS ? float(bias[id]) : 0.0f);
    // Logits in place of scores, with the ties that float64 has: of 1 from 37.4 on, of 0 below -745 of the top.
    float by = BIAS ? score[i] : GATE == 2 ? metal::clamp(z[i], -745.1332f, 37.42995f) : z[i] < least ? -INFINITY : z[i];
    if (metal::isnan(z[i])) by = z[i];
    rank[i] = id >= EXPERTS ? 0 : metal::isnan(by) ? 1 : rank_of(by);
  }
  if (GROUPS > 1) {
    constexpr int MEMBERS = EXPERTS / GROUPS;
    uint group_rank[1] = {0};  // of the lane's group
    UNROLL for (int g = 0; g < GROUPS; g++) {
      uint inside[EACH];
      UNROLL for (int i = 0; i < EACH; i++) inside[i] = (i * 32 + lane) / MEMBERS == g ? rank[i] : 0;
      const int first = highest<EACH>(inside, lane);
      float both = of_expert<EACH>(score, first);
      if (MEMBERS > 1) {
        UNROLL for (int i = 0; i < EACH; i++) inside[i] = i * 32 + lane == first ? 0 : inside[i];
        both += of_expert<EACH>(score, highest<EACH>(inside, lane));
      }
      if (lane == g) group_rank[0] = metal::isnan(both) ? 1 : rank_of(both);
    }
    bool open[EACH];
    UNROLL for (int i = 0; i < EACH; i++) open[i] = false;
    for (int j = 0; j < GROUPS_USED; j++) {
      const int chosen = highest<1>(group_rank, lane);
      UNROLL for (int i = 0; i < EACH; i++) open[i] = open[i] || (i * 32 + lane) / MEMBERS == chosen;
      if (lane == chosen) group_rank[0] = 0;
    }
    UNROLL for (int i = 0; i < EACH; i++) rank[i] = open[i] || rank[i] == 0 ? rank[i] : 1;
  }
  int my_id = 0;
  float mine = 0.0f;
  for (int j = 0; j < USED; j++) {
    const int id = highest<EACH>(rank, lane);
    const float weight = of_expert<EACH>(p, id);
    UNROLL for (int i = 0; i < EACH; i++) rank[i] = i * 32 + lane == id ? 0 : rank[i];
    if (lane == j) {
      my_id = id;
      mine = weight;
    }
  }
  const bool used = lane < USED;
  if (GATE == 1) {
    const float top = simd_max(used ? mine : -INFINITY);
    mine = used ? precise::exp(mine - top) : 0.0f;
    mine /= simd_sum(mine);
  } else if (RENORMALISE) {
    const float sum = simd_sum(used ? mine : 0.0f);
    mine /= metal::isnan(sum) ? sum : metal::max(sum, numbers[1]);
  }
  if (used) {
    ids[ulong(t) * USED + lane] = my_id;
    weights[ulong(t) * USED + lane] = mine * numbers[0] * (GAINS ? float(gains[my_id]) : 1.0f);
  }
""",
    _HEADER,
)


def build_route(site: Site, node: Node) -> Launch:
    """ROUTE: logits `[T, experts]` float32 to ids `[T, used]` int32 and weights `[T, used]` float32."""
    spec: RouteSpec = node.spec
    numbers = mx.array([spec.scale, SMALLEST_SUM], mx.float32)
    bias = site.vector(node.inputs[1]) if spec.bias else numbers  # type: ignore[arg-type]
    gains = site.vector(node.inputs[-1]) if spec.gains else numbers  # type: ignore[arg-type]
    template = [("EXPERTS", spec.n_experts), ("USED", spec.used), ("GATE", _GATES[spec.gate]), ("BIAS", spec.bias)]
    template += [("RENORMALISE", spec.renormalise), ("GROUPS", spec.n_groups), ("GROUPS_USED", spec.groups_used)]
    template += [("GAINS", spec.gains)]

    def run(batch: Batch, logits: mx.array) -> list[mx.array]:
        shape = (logits.shape[0], spec.used)
        groups = (cdiv(logits.shape[0], _TOKENS),)
        return _ROUTE(
            [logits, bias, gains, numbers], [shape, shape], [mx.int32, mx.float32], groups, (32 * _TOKENS,), template
        )

    return run


def _accepts(spec: RouteSpec) -> str | None:
    if spec.n_experts > 1024 or spec.used > 32 or spec.n_groups > 32:
        most = "at most 1024 experts, 32 of them used, in 32 groups"
        return f"needs {most}, got {spec.n_experts}, {spec.used} and {spec.n_groups}"
    return None


IMPLEMENTATIONS = (Implementation(ROUTE, "a SIMD-group a token", build_route, _accepts),)
