"""Long prompts where the GPU has matrix units that 8x8 products do not reach (M5): weights as floats, and MLX's own matmul.

A launch writes the weight's values in the step's arithmetic, `mx.matmul` multiplies and its result is finished by MLX
operations. That moves 4 bytes a weight more, which pays from `LEAST_ROWS` rows on; fewer take the tiles of `matmul.py`. How
many rows a step has chooses, and MLX splits K by it too: here a row's last bits depend on how many are beside it.

    bytes         W once, its values twice; X and Y as MLX tiles them
    registers     40 a thread of the first launch, which decodes 16 values
    arithmetic    MLX's matrix units: three to four times the rate of 8x8 products, as MLX measures its own kernels
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from quarrel.mlx_backend.formats.layout import Packed
from quarrel.mlx_backend.formats.table import header
from quarrel.mlx_backend.linear.matmul import matmul
from quarrel.mlx_backend.linear.product import Product
from quarrel.mlx_backend.runtime.kernel import Kernel
from quarrel.mlx_backend.runtime.launch import cdiv

LEAST_ROWS = 256
_THREADS = 64

_SOURCE = """
  const int part = int(thread_position_in_grid.x), block = part / 2, h = part % 2;
  const int row = int(threadgroup_position_in_grid.y);
  if (block * 32 >= K) return;
  typename decltype(w)::Q q[16];
  w.part(row, block, h, q);
  const float4 by = w.scales(row, block);
  UNROLL for (int i = 0; i < 16; i++) {
    const int column = block * 32 + h * 8 + (i & 7) + (i & 8) * 2;
    if (column < K) y[ulong(row) * K + column] = A(fma(i < 8 ? by.x : by.y, float(q[i]), i < 8 ? -by.z : -by.w));
  }
"""


def values_of(weight: Packed, act: mx.Dtype) -> mx.array:
    """`[rows, k]` of type `act`."""
    name = f"quarrel_values_{weight.format.name.lower()}" + ("_tail" if weight.k % 32 else "")
    kernel = Kernel(name, weight.inputs(), ("y",), weight.bind("K") + _SOURCE, header(weight.format))
    groups = (cdiv(cdiv(weight.k, 32) * 2, _THREADS), weight.rows)
    template = [("K", weight.k), ("A", act)]
    return kernel(list(weight.planes), [(weight.rows, weight.k)], [act], groups, (_THREADS,), template)[0]


def dense(product: Product) -> Callable[..., list[mx.array]]:
    """`(x, residual=None) -> results` for many rows of x, `[T, k]` of any float type; one map, or a gated pair."""
    tiles = matmul(product)

    def run(x: mx.array, residual: mx.array | None = None) -> list[mx.array]:
        if x.shape[0] < LEAST_ROWS:
            return tiles(x, residual)
        x = x.astype(product.act)
        results = [mx.matmul(x, values_of(m.weight, product.act).T).astype(mx.float32) for m in product.maps]
        return product.finish_arrays(results, residual)

    return run
