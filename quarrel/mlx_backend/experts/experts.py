"""Products with the chosen experts only.

Decoding: a matrix-vector product a pair of token and expert, `up` with both matrices and the activation in one launch,
`down` with the weighted sum in the order of the choice in one. Several tokens of a sequence: the pairs are put in the order
of their experts, and tiles of 32 pairs are multiplied by 8x8 SIMD-group matrices.

    decode   bytes: the chosen experts' blocks once, x from the cache. A SIMD-group takes 2 rows of each of two matrices or
             4 of one, a lane 16 columns at a time (`matvec.py`): about 60 registers, no threadgroup memory; 80% of the bus
             expected. llama.cpp and MLX launch gate, up, activation, down, scaling and the sum one by one
    prefill  bytes: an expert's blocks once per 32 of its pairs, x once per 64 rows. 128 threads unpack 64 rows by 32
             columns into threadgroup memory (7.7 kB in half precision), each SIMD-group multiplies 16 rows by 32 pairs:
             8 matrices of sums, 16 registers. Which pairs share a tile has no influence on a pair's sums. 60% of the
             matrix units' rate expected, as unpacking is shared by 32 pairs only
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from quarrel.mlx_backend.formats.layout import Packed
from quarrel.mlx_backend.formats.table import header
from quarrel.mlx_backend.linear.matvec import HEADER as MATVEC
from quarrel.mlx_backend.runtime.kernel import Kernel
from quarrel.mlx_backend.runtime.launch import Batch, Launch, Site, cdiv
from quarrel.ops.moe import EXPERT_DOWN, EXPERT_UP, ExpertDownSpec, ExpertUpSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation

_KINDS = {"silu": 0, "relu2": 1, "oai": 2, "gelu_tanh": 4}
NO_KIND = 3
_PAIRS = 32  # of a tile
_TILE_ROWS = 64  # of one or two matrices

_ACTIVATE = """
template <int KIND>
inline float activate_expert(float gate, float up) {
  if (KIND == 0) return gate / (1.0f + precise::exp(-gate)) * up;
  if (KIND == 1) return up > 0.0f || metal::isnan(up) ? up * up : 0.0f;
  if (KIND == 2) {
    const float g = gate > 7.0f ? 7.0f : gate, u = up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up;
    return g / (1.0f + precise::exp(-1.702f * g)) * (u + 1.0f);
  }
  if (KIND == 4) {
    const float inner = 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
    return gate / (1.0f + precise::exp(-inner)) * up;
  }
  return up;
}
"""

# A threadgroup: 4 SIMD-groups of R rows for one pair. Sums: R of each matrix, in lanes 0 to R - 1, then R to 2 R - 1.
_UP = """
  const int lane = int(thread_index_in_simdgroup), pair = int(threadgroup_position_in_grid.y);
  const int row = (int(threadgroup_position_in_grid.x) * 4 + int(simdgroup_index_in_threadgroup)) * R;
  if (row >= N) return;
  const int base = ids[pair] * N;
@BIND
  float sums[COUNT * R];
  UNROLL for (int i = 0; i < COUNT * R; i++) sums[i] = 0.0f;
  for (int unit = lane; unit < (K + 31) / 32 * 2; unit += 32) {
    Columns<X, 1> columns;
    Row<TAIL>::template load<X>(x, ulong(pair / USED) * K, (unit >> 1) * 32 + (unit & 1) * 8, K, columns.v[0]);
    add_up<@OFFSET>(columns);
@MULTIPLY
  }
  const float first = gather<COUNT * R>(sums, lane), second = simd_shuffle(first, ushort((lane + R * (COUNT - 1)) % 32));
  const int out = row + lane;
  if (lane < R && out < N) {
    const float gate = first + (BIAS ? float(bias0[base + out]) : 0.0f);
    const float up = second + (BIAS ? float(bias1[base + out]) : 0.0f);
    y[ulong(pair) * N + out] = T(activate_expert<KIND>(gate, up));
  }
"""

_DOWN = """
  const int lane = int(thread_index_in_simdgroup), token = int(threadgroup_position_in_grid.y);
  const int row = (int(threadgroup_position_in_grid.x) * 4 + int(simdgroup_index_in_threadgroup)) * R;
  if (row >= N) return;
@BIND
  const int out = row + lane;
  float total = 0.0f;
  for (int j = 0; j < USED; j++) {
    const int pair = token * USED + j, base = ids[pair] * N;
    float sums[R];
    UNROLL for (int i = 0; i < R; i++) sums[i] = 0.0f;
    for (int unit = lane; unit < (K + 31) / 32 * 2; unit += 32) {
      Columns<X, 1> columns;
      Row<TAIL>::template load<X>(x, ulong(pair) * K, (unit >> 1) * 32 + (unit & 1) * 8, K, columns.v[0]);
      add_up<bool(decltype(w0)::OFFSET)>(columns);
      multiply<R, 1>(w0, base + row, base + N - 1, unit, columns, sums);
    }
    const float mine = gather<R>(sums, lane);
    if (lane < R && out < N) total += weights[pair] * (mine + (BIAS ? float(bias0[base + out]) : 0.0f));
  }
  if (lane < R && out < N) y[ulong(token) * N + out] = total;
"""

# A SIMD-group an expert: `order` gets its pairs in their order, `starts` where they begin.
_GROUP = Kernel(
    "quarrel_expert_pairs",
    ("ids",),
    ("order", "starts"),
    """
  const int lane = int(thread_index_in_simdgroup), pairs = ids_shape[0];
  const int expert = int(threadgroup_position_in_grid.x) * 4 + int(simdgroup_index_in_threadgroup);
  if (expert >= EXPERTS) return;
  int lower = 0;
  for (int i = lane; i < pairs; i += 32) lower += ids[i] < expert ? 1 : 0;
  int at = simd_sum(lower);
  if (lane == 0) {
    starts[expert] = at;
    if (expert == 0) starts[EXPERTS] = pairs;
  }
  for (int i = 0; i < pairs; i += 32) {
    const int mine = i + lane < pairs && ids[metal::min(i + lane, pairs - 1)] == expert ? 1 : 0;
    const int before = simd_prefix_exclusive_sum(mine);
    if (mine) order[at + before] = i + lane;
    at += simd_sum(mine);
  }
""",
)

# Row r of a tile of two matrices is row r / 16 * 8 + r % 8 of matrix r / 8 % 2, so that a SIMD-group has both halves of a
# gate; of one matrix it is row r.
_TILES = """
  constexpr int STRIDE = 32 + 16 / int(sizeof(M)), MATRIX_ROWS = 64 / COUNT;
  const int tid = int(thread_index_in_threadgroup), lane = tid % 32, simd = tid / 32;
  const int tile = int(threadgroup_position_in_grid.y), first_row = int(threadgroup_position_in_grid.x) * MATRIX_ROWS;
  // The last expert whose tiles, one at most of them not full, begin at or before this one.
  int expert = 0;
  for (int high = EXPERTS; high - expert > 1;) {
    const int middle = (expert + high) / 2;
    if (starts[middle] / 32 + middle <= tile) {
      expert = middle;
    } else {
      high = middle;
    }
  }
  const int begin = starts[expert] + (tile - starts[expert] / 32 - expert) * 32;
  const int count = metal::min(starts[expert + 1] - begin, 32), base = expert * N;
  if (count <= 0) return;
@BIND
  threadgroup M w_tile[64 * STRIDE];
  threadgroup M x_tile[32 * STRIDE];
  const int w_row = tid / 2, h = tid % 2;
  const int row = first_row + (COUNT == 2 ? w_row / 16 * 8 + w_row % 8 : w_row), source = base + metal::min(row, N - 1);
  const int x_row = tid / 4, x_column = tid % 4 * 8;
  const ulong x_at = ulong(order[begin + metal::min(x_row, count - 1)] / PER) * K;
  simdgroup_matrix<float, 8, 8> sums[4][2];
  UNROLL for (int i = 0; i < 4; i++) sums[i][0] = sums[i][1] = simdgroup_matrix<float, 8, 8>(0.0f);
  for (int block = 0; block < (K + 31) / 32; block++) {
    @VALUE q[16];
    float4 by;
@UNPACK
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (int i = 0; i < 8; i++) {
      w_tile[w_row * STRIDE + h * 8 + i] = M(fma(by.x, float(q[i]), -by.z));
      w_tile[w_row * STRIDE + h * 8 + 16 + i] = M(fma(by.y, float(q[8 + i]), -by.w));
      const int column = block * 32 + x_column + i;
      x_tile[x_row * STRIDE + x_column + i] = x_row < count && column < K ? M(x[x_at + column]) : M(0.0f);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (int k = 0; k < 32; k += 8) {
      simdgroup_matrix<M, 8, 8> a, b[2];
      UNROLL for (int j = 0; j < 2; j++) {
        simdgroup_load(b[j], w_tile + (simd * 16 + j * 8) * STRIDE + k, STRIDE, ulong2(0, 0), true);
      }
      UNROLL for (int i = 0; i < 4; i++) {
        simdgroup_load(a, x_tile + i * 8 * STRIDE + k, STRIDE);
        UNROLL for (int j = 0; j < 2; j++) simdgroup_multiply_accumulate(sums[i][j], a, b[j], sums[i][j]);
      }
    }
  }
  const int a_row = (lane / 4 & 4) + lane / 2 % 4, a_column = (lane / 4 & 2) * 2 + lane % 2 * 2;
  UNROLL for (int i = 0; i < 4; i++) {
    if (i * 8 + a_row >= count) break;
    const ulong pair = order[begin + i * 8 + a_row];
    UNROLL for (int c = 0; c < 2; c++) {
      UNROLL for (int j = 0; j < 3 - COUNT; j++) {
        const int n = first_row + (COUNT == 2 ? simd * 8 : simd * 16 + j * 8) + a_column + c;
        if (n >= N) continue;
        const float first = sums[i][j].thread_elements()[c] + (BIAS ? float(bias0[base + n]) : 0.0f);
        const float second = sums[i][1].thread_elements()[c] + (BIAS ? float(bias1[base + n]) : 0.0f);
        y[pair * N + n] = T(activate_expert<KIND>(first, COUNT == 2 ? second : first));
      }
    }
  }
"""

_MIX = Kernel(
    "quarrel_expert_mix",
    ("rows", "weights"),
    ("y",),
    """
  const int n = int(thread_position_in_grid.x), token = int(threadgroup_position_in_grid.y);
  if (n >= N) return;
  float total = 0.0f;
  for (int j = 0; j < USED; j++) total += weights[token * USED + j] * rows[ulong(token * USED + j) * N + n];
  y[ulong(token) * N + n] = total;
""",
)


_PART = """    @W.part(source, block, h, q);
    by = @W.scales(source, block);
"""
_PART_AS_FLOATS = """    typename decltype(@W)::Q own[16];
    @W.part(source, block, h, own);
    UNROLL for (int i = 0; i < 16; i++) q[i] = float(own[i]);
    by = @W.scales(source, block);
"""


class Experts:
    """Stacks of one or two matrices, their biases, and the two ways to multiply with them."""

    def __init__(
        self, stacks: list[Packed], biases: list[mx.array], experts: int, used: int, n: int, kind: int, act: mx.Dtype
    ) -> None:
        self.n, self.k, self.used, self.experts, self._act = n, stacks[0].k, used, experts, act
        count = len(stacks)
        self._planes = [p for s in stacks for p in s.planes]
        none = mx.array([0.0] * 8, mx.float32)  # not zeros(): lazy arrays stay in their thread
        self._biases = [biases[0], biases[-1]] if biases else [none, none]
        self._fixed: list[tuple[str, Any]] = [("N", n), ("K", self.k), ("USED", used), ("BIAS", bool(biases))]
        self._matrices = [("COUNT", count), ("KIND", kind)]
        self._each = 4 // count
        self._tile_rows = _TILE_ROWS // count
        binds = "".join("  " + s.bind("K", f"w{i}") for i, s in enumerate(stacks))
        names = tuple(name for i, s in enumerate(stacks) for name in s.inputs(f"w{i}"))
        multiply = "".join(
            f"    multiply<R, 1>(w{i}, base + row, base + N - 1, unit, columns, sums + {i} * R);\n" for i in range(count)
        )
        formats = list(dict.fromkeys(s.format for s in stacks))
        offset = " || ".join(f"bool(decltype(w{i})::OFFSET)" for i in range(count))
        # Files made with a type for each tensor may have two formats here, whose codes are of different types.
        value, part = ("typename decltype(w0)::Q", _PART) if len(formats) == 1 else ("float", _PART_AS_FLOATS)
        unpack = part.replace("@W", "w0")
        if count == 2:
            unpack = f"    if (w_row / 8 % 2 == 0) {{\n{unpack}    }} else {{\n{part.replace('@W', 'w1')}    }}\n"
        text = header(*formats) + MATVEC + _ACTIVATE
        inputs = (*names, "bias0", "bias1")
        name = "_".join(f.name.lower() for f in formats)

        def kernel(what: str, operands: tuple[str, ...], source: str) -> Kernel:
            source = source.replace("@BIND", binds).replace("@MULTIPLY", multiply).replace("@OFFSET", offset)
            source = source.replace("@VALUE", value).replace("@UNPACK", unpack)
            return Kernel(f"quarrel_expert_{what}_{name}", (*operands, *inputs), ("y",), source, text)

        self._up = kernel("up", ("x", "ids"), _UP)
        self._down = kernel("down", ("x", "ids", "weights"), _DOWN)
        self._tiles = kernel("tiles", ("x", "order", "starts"), _TILES)

    def _template(self, x: mx.array) -> list[tuple[str, Any]]:
        return [*self._fixed, ("R", self._each), ("X", x.dtype), ("TAIL", self.k % 32 != 0)]

    def up(self, x: mx.array, ids: mx.array) -> mx.array:
        """`[T, used, n]`, a pair at a time."""
        groups = (cdiv(self.n, 4 * self._each), ids.size)
        template = [*self._template(x), *self._matrices, ("T", self._act)]
        shape = (ids.shape[0], self.used, self.n)
        return self._up([x, ids, *self._planes, *self._biases], [shape], [self._act], groups, (128,), template)[0]

    def down(self, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        """`[T, n]` float32, a token at a time."""
        groups = (cdiv(self.n, 4 * self._each), ids.shape[0])
        operands = [x, ids, weights, *self._planes, *self._biases]
        shape = (ids.shape[0], self.n)
        return self._down(operands, [shape], [mx.float32], groups, (128,), self._template(x))[0]

    def tiles(self, x: mx.array, ids: mx.array, per: int, out: mx.Dtype) -> mx.array:
        """`[T, used, n]`, 32 pairs of an expert at a time; a row of x serves `per` pairs."""
        pairs = ids.size
        order, starts = _GROUP(
            [ids.reshape(-1)],
            [(max(pairs, 8),), (max(self.experts + 1, 8),)],
            [mx.int32, mx.int32],
            (cdiv(self.experts, 4) if pairs else 0,),
            (128,),
            [("EXPERTS", self.experts)],
        )
        memory = mx.float16 if self._act == mx.float16 and x.dtype == mx.float16 else mx.float32
        template = [*self._fixed, *self._matrices, ("EXPERTS", self.experts), ("PER", per), ("M", memory), ("T", out)]
        groups = (cdiv(self.n, self._tile_rows), pairs // _PAIRS + self.experts if pairs else 0)
        shape = (ids.shape[0], self.used, self.n)
        return self._tiles([x, order, starts, *self._planes, *self._biases], [shape], [out], groups, (128,), template)[0]


def build_expert_up(site: Site, node: Node) -> Launch:
    """EXPERT_UP: x `[T, k]`, ids `[T, used]`, stacks of matrices, to y `[T, used, n]`."""
    spec: ExpertUpSpec = node.spec
    refs = node.inputs[2:]
    count = 1 + spec.gated
    stacks = [site.weight(r) for r in refs[:count]]  # type: ignore[arg-type]
    biases = [site.vector(r) for r in refs[count:]]  # type: ignore[arg-type]
    e = Experts(stacks, biases, spec.n_experts, spec.used, spec.n, _KINDS[spec.activation], site.act)

    def run(batch: Batch, x: mx.array, ids: mx.array) -> list[mx.array]:
        return batch.tokens.dispatch(
            lambda x, ids: [e.up(x, ids)], lambda x, ids: [e.tiles(x, ids, spec.used, site.act)], x, ids
        )

    return run


def build_expert_down(site: Site, node: Node) -> Launch:
    """EXPERT_DOWN: y `[T, used, k]`, ids and weights `[T, used]`, a stack of matrices, to out `[T, n]` float32."""
    spec: ExpertDownSpec = node.spec
    stack = site.weight(node.inputs[3])  # type: ignore[arg-type]
    biases = [site.vector(node.inputs[4])] if spec.bias else []  # type: ignore[arg-type]
    e = Experts([stack], biases, spec.n_experts, spec.used, spec.n, NO_KIND, site.act)
    template = [("N", spec.n), ("USED", spec.used)]

    def prefill(x: mx.array, ids: mx.array, weights: mx.array) -> list[mx.array]:
        rows = e.tiles(x, ids, 1, mx.float32)
        groups = (cdiv(spec.n, 128), ids.shape[0])
        return _MIX([rows, weights], [(ids.shape[0], spec.n)], [mx.float32], groups, (128,), template)

    def run(batch: Batch, y: mx.array, ids: mx.array, weights: mx.array) -> list[mx.array]:
        return batch.tokens.dispatch(lambda *rows: [e.down(*rows)], prefill, y, ids, weights)

    return run


def _accepts(spec: ExpertUpSpec) -> str | None:
    if spec.activation not in _KINDS or spec.gated != (spec.activation != "relu2"):
        return f"needs gated silu or oai, or plain relu2, got {'gated' if spec.gated else 'plain'} {spec.activation}"
    return None


IMPLEMENTATIONS = (
    Implementation(EXPERT_UP, "a pair at a time, or tiles of an expert's", build_expert_up, _accepts),
    Implementation(EXPERT_DOWN, "a token at a time, or tiles of an expert's", build_expert_down),
)
