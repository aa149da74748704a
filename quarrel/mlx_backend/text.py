"""Metal text that several families share."""

from __future__ import annotations

WIDE = """
// N neighbours that are loaded or stored at once: a load of 2 to 16 bytes, as the type says.
template <class T, int N>
struct alignas(sizeof(T) * N) Wide {
  T v[N];
};
"""

EXACT_TANH = """
// tanh to a few ulp everywhere: an odd series near zero, where the exponential form cancels.
inline float exact_tanh(float x) {
    float e = precise::exp(-2.0f * metal::abs(x));
    float far = (1.0f - e) / (1.0f + e);
    float s = x * x;
    float odd = -17.0f / 315 + s * (62.0f / 2835 - s * (1382.0f / 155925));
    float near = x * (1.0f + s * (-1.0f / 3 + s * (2.0f / 15 + s * odd)));
    return s < 0.09f ? near : (x < 0 ? -far : far);
}
"""

RANK_OF = """
// A number in the order of finite floats; that of -inf is below all of them, and -0 is 0. Never 0.
inline uint rank_of(float x) {
  const uint bits = as_type<uint>(x == 0.0f ? 0.0f : x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
"""


def unrolled(text: str) -> str:
    """Metal text whose loops marked UNROLL are unrolled: else arrays that they index lie in memory, not in registers."""
    return text.replace("UNROLL ", '_Pragma("clang loop unroll(full)") ')


def vector_width(n: int, most: int = 4) -> int:
    """The widest of 4, 2 and 1 values that runs of `n` divide into."""
    return next(width for width in (4, 2, 1) if width <= most and n % width == 0)
