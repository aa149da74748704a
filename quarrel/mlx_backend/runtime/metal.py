"""Metal text that several families share."""

from __future__ import annotations

WIDE = """
// N neighbours that are loaded or stored at once: a load of 2 to 16 bytes, as the type says.
template <class T, int N>
struct alignas(sizeof(T) * N) Wide {
  T v[N];
};
"""

OLDEST = """
// The first key that a query at this position sees: WINDOW keys with its own, or with CHUNKED those of its own window.
template <int WINDOW, bool CHUNKED>
inline int oldest_key(int position) {
  constexpr int SIZE = WINDOW > 0 ? WINDOW : 1;
  if (CHUNKED) return position / SIZE * SIZE;
  return WINDOW > 0 ? metal::max(position + 1 - WINDOW, 0) : 0;
}
"""

RANK_OF = """
// A number in the order of finite floats; that of -inf is below all of them, and -0 is 0. Never 0.
inline uint rank_of(float x) {
  const uint bits = as_type<uint>(x == 0.0f ? 0.0f : x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
"""

FINITE = """
// x, or -inf in place of NaN and both infinities.
inline float finite_or_least(float x) {
  return metal::abs(x) < INFINITY ? x : -INFINITY;
}
"""

SOFTPLUS = """
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


def unrolled(text: str) -> str:
    """Metal text whose loops marked UNROLL are unrolled: else arrays that they index lie in memory, not in registers."""
    return text.replace("UNROLL ", '_Pragma("clang loop unroll(full)") ')


def vector_width(n: int, most: int = 4) -> int:
    """The widest of 4, 2 and 1 values that runs of `n` divide into."""
    return next(width for width in (4, 2, 1) if width <= most and n % width == 0)
