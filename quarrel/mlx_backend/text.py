"""Metal text that several families share."""

from __future__ import annotations

WIDE = """
// N neighbours that are loaded or stored at once: a load of 2 to 16 bytes, as the type says.
template <class T, int N>
struct alignas(sizeof(T) * N) Wide {
  T v[N];
};
"""


def vector_width(n: int, most: int = 4) -> int:
    """The widest of 4, 2 and 1 values that runs of `n` divide into."""
    return next(width for width in (4, 2, 1) if width <= most and n % width == 0)
