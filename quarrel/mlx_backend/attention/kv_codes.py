"""Keys and values as 8-bit codes (`ops/kv.py`): a head's codes and then its float32 scale, `head_dim + 4` bytes.

bytes      a code a value and 4 bytes a head are read, half of what float16 is; an append writes as much
registers  a code becomes a float by one or two operations on its bits, and is multiplied with the scale of its row
threads    encoding: a SIMD-group a head and token, 2 shuffled sums; next to the projections it is nothing
"""

from __future__ import annotations

import mlx.core as mx

from quarrel.mlx_backend.runtime.kernel import Kernel
from quarrel.mlx_backend.runtime.launch import cdiv
from quarrel.ops.kv import KVType, scaled

KINDS: dict[KVType, int] = {"auto": 0, "float16": 0, "bfloat16": 0, "int8": 1, "fp8": 2, "fp8_e5m2": 3}
"""KIND of kernels: values as they are, or codes."""

CACHED = """
template <int KIND>
inline float value_of_code(uchar c) {
  if (KIND == 1) return float(as_type<char>(c));
  if (KIND == 2) return float(as_type<half>(ushort((c & 0x7F) << 7 | (c & 0x80) << 8))) * 256.0f;
  return float(as_type<half>(ushort(c << 8)));
}

// Values at to at + WIDTH - 1 of a row of D.
template <class T, int KIND, int D, int WIDTH, class Rows>
inline Wide<T, WIDTH> cached(Rows rows, ulong row, int at) {
  if (KIND == 0) return *(const device Wide<T, WIDTH>*)(rows + row * D + at);
  constexpr int STEP = WIDTH < 4 ? WIDTH : 4;
  const device uchar* codes = (const device uchar*)rows + row * (D + 4);
  const float scale = *(const device float*)(codes + D);
  Wide<T, WIDTH> value;
  UNROLL for (int i = 0; i < WIDTH; i += STEP) {
    const Wide<uchar, STEP> some = *(const device Wide<uchar, STEP>*)(codes + at + i);
    UNROLL for (int j = 0; j < STEP; j++) value.v[i + j] = T(value_of_code<KIND>(some.v[j]) * scale);
  }
  return value;
}
"""
"""Needs `WIDE`."""

_ENCODE = Kernel(
    "quarrel_encode_kv",
    ("x",),
    ("y",),
    """
  const int lane = int(thread_index_in_simdgroup);
  const ulong row = ulong(threadgroup_position_in_grid.x) * 4 + simdgroup_index_in_threadgroup;
  if (row >= ulong(x_shape[0])) return;
  float most = 0.0f, bad = 0.0f;
  for (int d = lane; d < D; d += 32) {
    const float value = float(x[row * D + d]);
    most = metal::max(most, metal::abs(value));
    bad += value * 0.0f;
  }
  most = simd_max(most);
  bad = simd_sum(bad);
  constexpr float top = KIND == 1 ? 127.0f : KIND == 2 ? 448.0f : 57344.0f;
  const float factor = most > 1e-30f ? top / most : 0.0f;
  device uchar* codes = y + row * (D + 4);
  for (int d = lane; d < D; d += 32) codes[d] = code_of<KIND>(float(x[row * D + d]) * factor);
  // What is not finite makes the scale NaN, so it shows in every result.
  if (lane == 0) *(device float*)(codes + D) = most * (1.0f / top) + bad;
""",
    """
template <int KIND>
inline uchar code_of(float y) {
  // 1.5 * 2^23 rounds to the nearest integer, ties to even, in the last bits.
  if (KIND == 1) return uchar((as_type<uint>(y + 12582912.0f) - 0x4B400000u) & 255u);
  // Of E4M3 and of E5M2: bits that a code lacks, what is too much of the exponent, the largest code, the smallest normal
  // number, and a float whose last bit is worth a subnormal code.
  constexpr uint SHIFT = KIND == 2 ? 20 : 21, BIAS = KIND == 2 ? 120 << 3 : 112 << 2, MOST = KIND == 2 ? 0x7E : 0x7B;
  constexpr uint NORMAL = KIND == 2 ? 0x3C800000 : 0x38800000, MAGIC = KIND == 2 ? 0x46800000 : 0x43000000;
  const uint bits = as_type<uint>(y), size = bits & 0x7FFFFFFFu;
  const uint code = size < NORMAL
      ? as_type<uint>(as_type<float>(size) + as_type<float>(MAGIC)) - MAGIC
      : ((size + ((1u << (SHIFT - 1)) - 1u + (size >> SHIFT & 1u))) >> SHIFT) - BIAS;
  return uchar(metal::min(code, MOST) | (bits >> 24 & 0x80u));
}
""",
)


def encoded(x: mx.array, type: KVType) -> mx.array:
    """`[.., head_dim]` of floats as rows of codes and scale, uint8 `[.., head_dim + 4]`; `x` where none are kept."""
    if not scaled(type):
        return x
    dim = x.shape[-1]
    rows = x.size // dim
    (y,) = _ENCODE(
        [x.reshape(rows, dim)],
        [(rows, dim + 4)],
        [mx.uint8],
        (cdiv(rows, 4),),
        (128,),
        [("D", dim), ("KIND", KINDS[type])],
    )
    return y.reshape(*x.shape[:-1], dim + 4)
