"""Packed weights times many rows: Y = X W^T in tiles of 8x8 SIMD-group products, W decoded on its way to the tile.

A threadgroup of four SIMD-groups makes 64 columns of Y (rows of W) for BM rows of X: 64, or 32 where there are no more. Of
gate and up it takes 32 rows each, interleaved by 16, so that a SIMD-group has both of a row. Per 32 columns of K each
thread decodes one lane's share (16 values) of a row of W and loads 16 or 8 values of X into registers, before the barrier
behind which the last products are done with the tiles; so its loads run while others multiply. A SIMD-group multiplies
32 x BM / 2: 16 products for 8 tile loads. A sum's order is that of K, whatever tile it is in and whichever rows are beside.

    bytes         W once for every BM rows of X, X once for every 64 rows of W
    registers     float32 sums of 32 x BM / 2 over 32 lanes: 32, 16 decoded, 16 of X: about 110
    threadgroup   10 KiB for BM = 64 in half precision, 18 KiB in float32
    arithmetic    64 FMAs a weight for 64 rows of X; decoding and tiles add 7 to 12 cycles to them (docs/metal.md)
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from quarrel.mlx_backend.linear.product import Product
from quarrel.mlx_backend.runtime.kernel import Kernel
from quarrel.mlx_backend.runtime.launch import cdiv

_ROWS = 64  # of matrices, a threadgroup
_THREADS = 128

_HEADER = """
// Of results on their way out: 8 columns and 2 more, so that a matrix begins at an even place and lanes meet in pairs.
constant constexpr int LINE = 10;

template <typename A>
struct Tile {
  enum { PAD = 16 / sizeof(A), STRIDE = 32 + PAD };  // in elements: rows stay 16-byte aligned and spread over the banks
};

// 8 values into a row of a tile.
template <typename A, typename V>
inline void put(threadgroup A* to, thread const V* v) {
  Eight<A> wide;
  UNROLL for (int i = 0; i < 8; i++) wide.v[i] = A(float(v[i]));
  *(threadgroup Eight<A>*)to = wide;
}

// A lane's share of a row of W, decoded.
template <typename A, typename W>
inline void put_part(threadgroup A* row, int h, thread const typename W::Q* q, float4 s) {
  float v[16];
  UNROLL for (int i = 0; i < 8; i++) {
    v[i] = W::PLAIN ? float(q[i]) : fma(s.x, float(q[i]), -s.z);
    v[8 + i] = W::PLAIN ? float(q[8 + i]) : fma(s.y, float(q[8 + i]), -s.w);
  }
  put(row + h * 8, v);
  put(row + 16 + h * 8, v + 8);
}

// 32 rows of W times 8 * J rows of X over 32 columns.
template <int J, typename A>
inline void multiply_tiles(threadgroup const A* w, threadgroup const A* x, thread simdgroup_matrix<float, 8, 8>* sums) {
  constexpr int STRIDE = Tile<A>::STRIDE;
  for (int k = 0; k < 32; k += 8) {
    simdgroup_matrix<A, 8, 8> left[4], right[J];
    UNROLL for (int i = 0; i < 4; i++) simdgroup_load(left[i], w + i * 8 * STRIDE + k, STRIDE);
    UNROLL for (int j = 0; j < J; j++) simdgroup_load(right[j], x + j * 8 * STRIDE + k, STRIDE, ulong2(0, 0), true);
    UNROLL for (int i = 0; i < 4; i++) {
      UNROLL for (int j = 0; j < J; j++) simdgroup_multiply_accumulate(sums[i * J + j], left[i], right[j], sums[i * J + j]);
    }
  }
}

// Column j of the tiles, 32 rows of W by 8 of X, in an order that lanes can take a row of W from.
template <int J>
inline void lay_out(thread simdgroup_matrix<float, 8, 8>* sums, int j, threadgroup float* to) {
  UNROLL for (int i = 0; i < 4; i++) simdgroup_store(sums[i * J + j], to + i * 8 * LINE, LINE);
}
"""

_SOURCE = """
  constexpr int STRIDE = Tile<A>::STRIDE, J = BM / 16;
  const int K = sizes[0], N = sizes[1], T = int(x_shape[0]);
  const int thread_at = int(thread_index_in_threadgroup), lane = int(thread_index_in_simdgroup);
  const int place = int(simdgroup_index_in_threadgroup);
  const int token = int(threadgroup_position_in_grid.x) * BM, row = int(threadgroup_position_in_grid.y) * ROWS;
  constexpr int TILES = (64 + BM) * STRIDE * sizeof(A) / 4, RESULTS = 4 * 32 * LINE;
  constexpr int MEMORY = ((TILES > RESULTS ? TILES : RESULTS) + 3) / 4;
  threadgroup float4 memory[MEMORY];
  threadgroup A* xs = (threadgroup A*)memory;
  threadgroup A* ws = xs + BM * STRIDE;
@BIND
  // This thread's share of the tiles: half a block of a row of W, and BM / 32 runs of 8 columns of X.
  const int w_row = metal::min(row + @W_ROW, N - 1), h = thread_at & 1;
  simdgroup_matrix<float, 8, 8> sums[4 * J];
  UNROLL for (int i = 0; i < 4 * J; i++) sums[i] = simdgroup_matrix<float, 8, 8>(0.0f);
  const int w_first = place % 2 * 32, x_first = place / 2 * (BM / 2);
  for (int column = 0; column < K; column += 32) {
@DECODE
    X values[BM / 32][8];
    UNROLL for (int i = 0; i < BM / 32; i++) {
      const int run = thread_at + i * 128;
      const ulong begin = ulong(metal::min(token + run / 4, T - 1)) * ulong(K);
      Run<@TAIL>::template load<X>(x, begin, column + run % 4 * 8, K, values[i]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
@PUT
    UNROLL for (int i = 0; i < BM / 32; i++) {
      const int run = thread_at + i * 128;
      put(xs + run / 4 * STRIDE + run % 4 * 8, values[i]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    multiply_tiles<J>(ws + w_first * STRIDE, xs + x_first * STRIDE, sums);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup float* results = (threadgroup float*)memory + place * (32 * LINE);
  UNROLL for (int j = 0; j < J; j++) {
    lay_out<J>(sums, j, results);
    simdgroup_barrier(mem_flags::mem_threadgroup);
@STORE
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
"""

_RUN = """
// 8 columns of a row of x; the address space is the pointer's own.
template <bool TAIL>
struct Run {
  template <typename E, typename P>
  static inline void load(P x, ulong begin, int column, int K, thread E* v) {
    const Eight<E> wide = *(device const Eight<E>*)(x + begin + ulong(column));
    UNROLL for (int i = 0; i < 8; i++) v[i] = wide.v[i];
  }
};
template <>
struct Run<true> {
  template <typename E, typename P>
  static inline void load(P x, ulong begin, int column, int K, thread E* v) {
    UNROLL for (int i = 0; i < 8; i++) v[i] = column + i < K ? x[begin + ulong(column + i)] : E(0);
  }
};
"""


_STORE = """    const int out = row + w_first + lane;
    UNROLL for (int t = 0; t < 8; t++) {
      const int to = token + x_first + j * 8 + t;
      if (out < N && to < T) {
        const ulong at = ulong(to) * ulong(N) + ulong(out);
        @FINISH
      }
    }"""

_STORE_GATED = """    // 16 rows of gate, and the same of up: a lane takes half of the 8 rows of X.
    const int out = row + w_first / 2 + lane % 16;
    UNROLL for (int i = 0; i < 4; i++) {
      const int t = lane / 16 * 4 + i, to = token + x_first + j * 8 + t;
      if (out < N && to < T) {
        const ulong at = ulong(to) * ulong(N) + ulong(out);
        @FINISH
      }
    }"""


def _text(product: Product) -> str:
    gated, formats = product.activation is not None, {m.weight.format for m in product.maps}
    bind = "".join("  " + m.weight.bind("K", f"w{i}") for i, m in enumerate(product.maps))
    # Threads of a SIMD-group decode rows of one matrix.
    if not gated:
        sources = [("", "w0")]
    elif len(formats) == 1:
        bind += "  const decltype(w0) w = place % 2 == 0 ? w0 : w1;\n"
        sources = [("", "w")]
    else:
        sources = [("if (place % 2 == 0) ", "w0"), ("if (place % 2 == 1) ", "w1")]
    value, more = "results[lane * LINE + t]", "results[(16 + lane % 16) * LINE + t]"
    pieces = {
        "@BIND": bind,
        "@W_ROW": "thread_at / 64 * 16 + thread_at / 2 % 16" if gated else "thread_at / 2",
        "@DECODE": "".join(
            f"    typename decltype({w})::Q q_{w}[16];\n    float4 s_{w};\n"
            f"    {when}{{\n      {w}.part(w_row, column >> 5, h, q_{w});\n"
            f"      s_{w} = {w}.scales(w_row, column >> 5);\n    }}\n"
            for when, w in sources
        ),
        "@PUT": "".join(
            f"    {when}put_part<A, decltype({w})>(ws + thread_at / 2 * STRIDE, h, q_{w}, s_{w});\n" for when, w in sources
        ),
        "@STORE": _STORE_GATED.replace("@FINISH", product.finish_gated("results[lane % 16 * LINE + t]", more, "at", "out"))
        if gated
        else _STORE.replace("@FINISH", product.finish(value, 0, "at", "out")),
        "@TAIL": str(product.tail).lower(),
    }
    text = _SOURCE
    for mark, piece in pieces.items():
        text = text.replace(mark, piece)
    return text


def matmul(product: Product) -> Callable[..., list[mx.array]]:
    """`(x, residual=None) -> results` for many rows of x, `[T, k]` of any float type; one map, or a gated pair."""
    assert product.gain is None, "a norm goes before"
    assert len(product.maps) == (2 if product.activation else 1), product
    header = product.header() + _RUN + _HEADER
    kernel = Kernel(product.name("matmul"), product.inputs(), ("y0",), _text(product), header)
    constants = product.constants()
    (n, out), *_ = product.outs
    rows = _ROWS // len(product.maps)

    def run(x: mx.array, residual: mx.array | None = None) -> list[mx.array]:
        count = x.shape[0]
        tile = 32 if count <= 32 else 64
        template = [*product.template(), ("ROWS", rows), ("BM", tile), ("A", product.act), ("X", x.dtype)]
        groups = (cdiv(count, tile), cdiv(n, rows))
        return kernel(product.arrays(x, constants, residual), [(count, n)], [out], groups, (_THREADS,), template)

    return run
