"""Two correct kernels and their calls: the ground on which bugs are planted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tools.metal_emulator import Call, metal_kernel

BLOCK_HEADER = """
struct block_q8 { half scale; char quants[32]; };
static_assert(sizeof(block_q8) == 34, "two bytes of scale, a byte a weight");
METAL_FUNC float4 four_weights(const device char* q) {
  return float4(float(q[0]), float(q[1]), float(q[2]), float(q[3]));
}
"""

# y = W x over Q8_0 blocks of 34 bytes: a SIMD-group takes ROWS rows, eight lanes take a block.
MATVEC = """
  const uint lane = thread_index_in_simdgroup;
  const int rows = w_shape[0];
  const int blocks = w_shape[1] / 34;
  const int first = int(threadgroup_position_in_grid.x * GROUPS + simdgroup_index_in_threadgroup) * ROWS;
  if (first >= rows) return;
  const int part = int(lane % 8) * 4;
  float sums[ROWS];
  for (int r = 0; r < ROWS; r++) sums[r] = 0;
  for (int b = int(lane / 8); b < blocks; b += 4) {
    const device T* xs = x + b * 32 + part;
    float4 inputs = float4(float(xs[0]), float(xs[1]), float(xs[2]), float(xs[3]));
    for (int r = 0; r < ROWS; r++) {
      if (first + r >= rows) break;
      const device block_q8* block = (const device block_q8*)(w + ulong(first + r) * blocks * 34) + b;
      float4 weights = four_weights(block->quants + part);
      sums[r] += float(block->scale) * dot(weights, inputs);
    }
  }
  for (int r = 0; r < ROWS; r++) {
    float total = simd_sum(sums[r]);
    if (lane == 0 && first + r < rows) y[first + r] = static_cast<T>(total);
  }
"""

# One query head a threadgroup; keys are dealt out to GROUPS SIMD-groups, whose partial softmaxes meet at the end.
ATTENTION = """
  const uint lane = thread_index_in_simdgroup, group = simdgroup_index_in_threadgroup;
  const uint head = threadgroup_position_in_grid.y, kv_head = head / QUERIES;
  constexpr int E = D / 32;
  threadgroup float tops[GROUPS];
  threadgroup float sums[GROUPS];
  threadgroup float parts[GROUPS][D];
  float query[E], part[E];
  for (int i = 0; i < E; i++) {
    query[i] = float(q[head * D + lane * E + i]) * scale;
    part[i] = 0;
  }
  float top = -INFINITY, sum = 0;
  const int keys = used[0];
  for (int t = int(group); t < keys; t += GROUPS) {
    const ulong at = (ulong(kv_head) * k_shape[1] + t) * D + lane * E;
    float score = 0;
    for (int i = 0; i < E; i++) score += query[i] * float(k[at + i]);
    score = simd_sum(score);
    float new_top = max(top, score);
    float old_weight = fast::exp(top - new_top), weight = fast::exp(score - new_top);
    sum = sum * old_weight + weight;
    for (int i = 0; i < E; i++) part[i] = part[i] * old_weight + weight * float(v[at + i]);
    top = new_top;
  }
  if (lane == 0) {
    tops[group] = top;
    sums[group] = sum;
  }
  for (int i = 0; i < E; i++) parts[group][lane * E + i] = part[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float all_top = -INFINITY, all_sum = 0;
  for (int g = 0; g < GROUPS; g++) all_top = max(all_top, tops[g]);
  for (int g = 0; g < GROUPS; g++) all_sum += sums[g] * fast::exp(tops[g] - all_top);
  for (uint j = thread_index_in_threadgroup; j < D; j += GROUPS * 32) {
    float total = 0;
    for (int g = 0; g < GROUPS; g++) total += parts[g][j] * fast::exp(tops[g] - all_top);
    out[head * D + j] = static_cast<T>(total / all_sum);
  }
"""


def matvec(source: str = MATVEC, header: str = BLOCK_HEADER) -> metal_kernel:
    return metal_kernel("matvec", ["w", "x"], ["y"], source, header)


def quantised(rows: int, columns: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float64]]:
    """Q8_0 blocks as they lie in a file, and the numbers that they stand for."""
    rng = np.random.default_rng(rows * 1000 + columns)
    blocks = np.zeros((rows, columns // 32), np.dtype([("scale", np.float16), ("quants", np.int8, 32)]))
    blocks["scale"] = rng.uniform(0.5, 1.5, blocks.shape) / 127
    blocks["quants"] = rng.integers(-127, 128, (*blocks.shape, 32))
    values = blocks["scale"].astype(np.float64)[..., None] * blocks["quants"]
    return blocks.view(np.uint8).reshape(rows, -1), values.reshape(rows, columns)


def matvec_call(rows: int = 11, columns: int = 256, dtype: type = np.float32) -> Call:
    weights, _ = quantised(rows, columns)
    x: npt.NDArray[Any] = np.random.default_rng(1).standard_normal(columns).astype(dtype)
    groups = -(-rows // 4)
    template = (("T", dtype), ("ROWS", 2), ("GROUPS", 2))
    return Call([weights, x], [(rows,)], [dtype], (groups * 64, 1, 1), (64, 1, 1), template)


def attention(source: str = ATTENTION) -> metal_kernel:
    return metal_kernel("attention", ["q", "k", "v", "scale", "used"], ["out"], source)


def attention_call(keys: int = 50, capacity: int = 64, groups: int = 4) -> Call:
    rng = np.random.default_rng(2)
    heads, kv_heads, width = 4, 2, 64
    q = rng.standard_normal((heads, width)).astype(np.float16)
    k = rng.standard_normal((kv_heads, capacity, width)).astype(np.float16)
    v = rng.standard_normal((kv_heads, capacity, width)).astype(np.float16)
    inputs = [q, k, v, np.float32(width**-0.5), np.array([keys], np.int32)]
    template = (("T", np.float16), ("D", width), ("QUERIES", heads // kv_heads), ("GROUPS", groups))
    return Call(inputs, [(heads, width)], [np.float16], (groups * 32, heads, 1), (groups * 32, 1, 1), template)


def with_keys(call: Call, keys: int) -> Call:
    return replace(call, inputs=[*call.inputs[:4], np.array([keys], np.int32)])


def elementwise(
    body: str,
    threads: int = 64,
    threadgroup: int = 64,
    header: str = "",
    atomic_outputs: bool = False,
    init_value: float | None = None,
) -> tuple[metal_kernel, Call]:
    """A kernel `x -> y` of one number a thread; the body knows `i`, its place in the grid, and `lane`."""
    first = "uint i = thread_position_in_grid.x, lane = thread_index_in_simdgroup; "
    kernel = metal_kernel("body", ["x"], ["y"], first + body, header, atomic_outputs=atomic_outputs)
    x = np.arange(256, dtype=np.float32)
    call = Call([x], [(threads,)], [np.float32], (threads, 1, 1), (threadgroup, 1, 1), (), init_value)
    return kernel, call
