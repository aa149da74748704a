"""F32, F16 and BF16: one plane, the file's own values."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from quarrel.gguf import GGMLType
from quarrel.mlx_backend.formats.layout import Format, Plane

_STRUCT = """
template <typename E, typename P, bool TAIL>
struct Dense {
  device const E* codes;
  int K;
  typedef P Q;
  enum { OFFSET = 0, PLAIN = 1, ODD = 1, UNIT = 1 };
  inline void part(int row, int block, int h, thread P* q) const {
    const int column = block * 32 + h * 8;
    device const E* from = codes + ulong(row) * ulong(K) + ulong(column);
    if (TAIL) {
      UNROLL for (int i = 0; i < 8; i++) {
        q[i] = column + i < K ? P(from[i]) : P(0);
        q[8 + i] = column + 16 + i < K ? P(from[16 + i]) : P(0);
      }
    } else {
      const Eight<E> low = *(device const Eight<E>*)from, high = *(device const Eight<E>*)(from + 16);
      UNROLL for (int i = 0; i < 8; i++) {
        q[i] = P(low.v[i]);
        q[8 + i] = P(high.v[i]);
      }
    }
  }
  inline void bare(int row, int block, int h, thread P* q) const { part(row, block, h, q); }
  inline float4 scales(int, int) const { return float4(1.0f, 1.0f, 0.0f, 0.0f); }
};
"""


class Dense(Format):
    """Values as they are stored, with scale 1; rows may end within a block of 32."""

    def __init__(self, type: GGMLType, dtype: mx.Dtype, stored: str, value: str) -> None:
        def split(raw: mx.array) -> Sequence[mx.array]:
            return (raw.reshape(-1).view(dtype),)

        super().__init__(type, (Plane("codes", dtype, 1, 1, stored),), split)
        self._value = value

    def struct(self) -> str:
        return _STRUCT

    def bind(self, name: str, planes: Sequence[str], k: str, tail: bool) -> str:
        stored = self.planes[0].reads
        return f"const Dense<{stored}, {self._value}, {str(tail).lower()}> {name} = {{{planes[0]}, {k}}};\n"


F32 = Dense(GGMLType.F32, mx.float32, "float", "float")
F16 = Dense(GGMLType.F16, mx.float16, "half", "half")
BF16 = Dense(GGMLType.BF16, mx.bfloat16, "bfloat16_t", "float")
