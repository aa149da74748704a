"""Packed weights times the rows of sequences that decode: y = W x, up to four rows of x in a threadgroup's registers.

A SIMD-group owns R rows of W and walks K, a lane taking 16 columns of each row at a time (8 bytes of 4-bit codes); x is
loaded once for all R rows and stays in registers. Sums are float32, over a lane's columns in their order and then over the
lanes by `simd_sum`; nothing of that depends on how many rows of x there are. Of flat matrices PARTS SIMD-groups share the
rows, so that the GPU is full; their sums meet in threadgroup memory. A norm before the map is a factor of the whole row:
x * gain goes into the products, the lanes add up x * x beside them, and 1 / rms comes last.

    bytes         the weight once; x from the cache; K = 4096 in Q4_K: 2304 a row
    threads       32 or 32 * PARTS for R = 4 rows (R = 2 for two matrices at once), 128 a threadgroup
    in flight     R loads of 8 bytes of codes and as many of 2 of scales a lane: 1.25 KiB a SIMD-group, twice that unrolled
    registers     16 of x for each of its rows (8 in half precision), 8 of codes, R * NT sums: 60 for one row, 110 for four
    threadgroup   none for PARTS = 1, else at most 0.4 KiB
    instructions  about 2.9 a weight of 4 bits for one row of x: see docs/metal.md for what that means on each chip
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import mlx.core as mx

from quarrel.mlx_backend.linear.product import Product
from quarrel.mlx_backend.runtime.kernel import Kernel
from quarrel.mlx_backend.runtime.launch import cdiv

_SIMD_GROUPS = 4

HEADER = """
// A lane's 16 columns of a row of x: 8h to 8h + 7 of a block, and those plus 16. The address space is the pointer's own.
template <bool TAIL>
struct Row {
  template <typename E, typename P>
  static inline void load(P x, ulong begin, int column, int K, thread E* v) {
    const Eight<E> low = *(device const Eight<E>*)(x + begin + ulong(column));
    const Eight<E> high = *(device const Eight<E>*)(x + begin + ulong(column + 16));
    UNROLL for (int i = 0; i < 8; i++) {
      v[i] = low.v[i];
      v[8 + i] = high.v[i];
    }
  }
};
template <>
struct Row<true> {
  template <typename E, typename P>
  static inline void load(P x, ulong begin, int column, int K, thread E* v) {
    UNROLL for (int i = 0; i < 8; i++) {
      v[i] = column + i < K ? x[begin + ulong(column + i)] : E(0);
      v[8 + i] = column + 16 + i < K ? x[begin + ulong(column + 16 + i)] : E(0);
    }
  }
};

// What the lanes of a SIMD-group keep of NT rows of x: their 16 columns, and the sums of either half.
template <typename V, int NT>
struct Columns {
  V v[NT][16];
  float low[NT], high[NT];
};

template <bool OFFSET, typename V, int NT>
inline void add_up(thread Columns<V, NT>& x) {
  if (!OFFSET) return;
  UNROLL for (int t = 0; t < NT; t++) {
    x.low[t] = float(x.v[t][0]);
    x.high[t] = float(x.v[t][8]);
    UNROLL for (int i = 1; i < 8; i++) {
      x.low[t] += float(x.v[t][i]);
      x.high[t] += float(x.v[t][8 + i]);
    }
  }
}

// Adds the products of R rows of W, from `row`, with those columns. A row past the last is the last one again.
template <int R, int NT, typename W, typename V>
inline void multiply(W w, int row, int last, int unit, thread const Columns<V, NT>& x, thread float* sums) {
  UNROLL for (int r = 0; r < R; r++) {
    typename W::Q q[16];
    const int from = metal::min(row + r, last);
    w.bare(from, unit >> 1, unit & 1, q);
    const float4 s = w.scales(from, unit >> 1);
    UNROLL for (int t = 0; t < NT; t++) {
      float low = 0.0f, high = 0.0f;
      if (W::ODD > 1) {
        UNROLL for (int i = 1; i < 8; i += 2) {
          low = fma(float(q[i]), float(x.v[t][i]), low);
          high = fma(float(q[8 + i]), float(x.v[t][8 + i]), high);
        }
        low *= 1.0f / W::ODD;
        high *= 1.0f / W::ODD;
      }
      UNROLL for (int i = 0; i < 8; i += W::ODD > 1 ? 2 : 1) {
        low = fma(float(q[i]), float(x.v[t][i]), low);
        high = fma(float(q[8 + i]), float(x.v[t][8 + i]), high);
      }
      if (W::UNIT > 1) {
        low *= W::UNIT;
        high *= W::UNIT;
      }
      float sum = fma(s.y, high, fma(s.x, low, sums[r * NT + t]));
      if (W::OFFSET) sum = fma(-s.w, x.high[t], fma(-s.z, x.low[t], sum));
      sums[r * NT + t] = sum;
    }
  }
}

// Lane i gets the i-th of COUNT sums over a SIMD-group.
template <int COUNT>
inline float gather(thread const float* sums, int lane) {
  float mine = 0.0f;
  UNROLL for (int i = 0; i < COUNT; i++) {
    const float total = simd_sum(sums[i]);
    if (lane == i) mine = total;
  }
  return mine;
}

// The same over PARTS neighbouring SIMD-groups of a threadgroup, which add in their order; all of them get the result.
template <int COUNT, int PARTS>
inline float gather_parts(thread const float* sums, int lane, int place, threadgroup float* shared) {
  float mine = gather<COUNT>(sums, lane);
  if (PARTS > 1) {
    if (lane < COUNT) shared[place * COUNT + lane] = mine;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (lane < COUNT) {
      mine = 0.0f;
      UNROLL for (int i = 0; i < PARTS; i++) mine += shared[(place / PARTS * PARTS + i) * COUNT + lane];
    }
  }
  return mine;
}
"""

_OPENING = """
  const int K = sizes[0], T = int(x_shape[0]);
  const int lane = int(thread_index_in_simdgroup), place = int(simdgroup_index_in_threadgroup);
  const int token = int(threadgroup_position_in_grid.x) * NT;
  int group = int(threadgroup_position_in_grid.y);
  const int units = (K + 31) / 32 * 2;
  constexpr int SHARED = PARTS > 1 ? @SIMD_GROUPS * @COUNT : 1;
  threadgroup float shared[SHARED];
"""

_LOAD = """
      Columns<@V, NT> columns;
      UNROLL for (int t = 0; t < NT; t++) {
        const ulong begin = ulong(metal::min(token + t, T - 1)) * ulong(K);
        const int column = (unit >> 1) * 32 + (unit & 1) * 8;
@TAKE
      }
"""
_LOAD_GAIN = """
      G gains[16];
      Row<@TAIL>::template load<G>(gain, 0, (unit >> 1) * 32 + (unit & 1) * 8, K, gains);
"""
_TAKE = "        Row<@TAIL>::template load<X>(x, begin, column, K, columns.v[t]);"
_TAKE_NORM = """
        X raw[16];
        Row<@TAIL>::template load<X>(x, begin, column, K, raw);
        UNROLL for (int i = 0; i < 16; i++) {
          squares[t] = fma(float(raw[i]), float(raw[i]), squares[t]);
          columns.v[t][i] = float(raw[i]) * float(gains[i]);
        }
"""


def _text(product: Product) -> str:
    """One branch a map, or a single one for a gated pair; a threadgroup takes one of them."""
    text = _OPENING.replace("@SIMD_GROUPS", str(_SIMD_GROUPS)).replace("@COUNT", _count(product))
    branches = [(0, 1)] if product.activation else [(i,) for i in range(len(product.maps))]
    for members in branches:
        first, last = members[0], members is branches[-1]
        inside = ["group >= 0"] * (first > 0) + [f"group < groups{first}"] * (not last)
        text += f"  const int rows{first} = sizes[{1 + first}];\n"
        text += "" if last else f"  const int groups{first} = (rows{first} + ROWS - 1) / ROWS;\n"
        text += f"  if ({' && '.join(inside)}) " if inside else "  "
        text += f"{{\n{_branch(product, members)}  }}\n"
        text += "" if last else f"  group -= groups{first};\n"
    return text


def _count(product: Product) -> str:
    """Sums a SIMD-group makes."""
    products = f"{2 if product.activation else 1} * R * NT"
    return f"({products} + NT)" if product.gain is not None else f"({products})"


def _branch(product: Product, members: tuple[int, ...]) -> str:
    first, tail, norm = members[0], str(product.tail).lower(), product.gain is not None
    offset = " || ".join(f"decltype(w{i})::OFFSET" for i in members)
    load = _LOAD.replace("@TAKE", _TAKE_NORM if norm else _TAKE).replace("@TAIL", tail)
    load = load.replace("@V", "float" if norm else "X")
    if norm:
        load = _LOAD_GAIN.replace("@TAIL", tail) + load
    binds = "".join("    " + product.maps[i].weight.bind("K", f"w{i}") for i in members)
    products = "".join(
        f"      multiply<R, NT>(w{i}, row, rows{first} - 1, unit, columns, sums + {j} * R * NT);\n"
        for j, i in enumerate(members)
    )
    scale = ""
    if norm:
        squares = f"{len(members)} * R * NT"
        scale = f"""
    float factor = 1.0f;
    UNROLL for (int t = 0; t < NT; t++) {{
      const float square = simd_shuffle(mine, ushort({squares} + t));
      if (lane % NT == t) factor = precise::rsqrt(square / float(K) + scalars[1]);
    }}
    mine *= factor;"""
    row, at = "row + lane / NT % R", f"ulong(token + lane % NT) * ulong(rows{first}) + ulong(out)"
    if product.activation:
        scale += "\n    const float up = simd_shuffle(mine, ushort((lane + R * NT) % 32));"
        store = product.finish_gated("mine", "up", "at", "out")
    else:
        store = product.finish("mine", first, "at", "out")
    return f"""    const int row = (group * ({_SIMD_GROUPS} / PARTS) + place / PARTS) * R;
{binds}    float sums[{_count(product)}];
    UNROLL for (int i = 0; i < {_count(product)}; i++) sums[i] = 0.0f;
{"    thread float* squares = sums + " + str(len(members)) + " * R * NT;" if norm else ""}
    for (int unit = place % PARTS * 32 + lane; unit < units; unit += PARTS * 32) {{
{load}      add_up<bool({offset})>(columns);
{products}    }}
    float mine = gather_parts<{_count(product)}, PARTS>(sums, lane, place, shared);{scale}
    const int out = {row};
    if (place % PARTS == 0 && lane < R * NT && out < rows{first} && token + lane % NT < T) {{
      const ulong at = {at};
      {store}
    }}
"""


@cache
def _kernel(name: str, inputs: tuple[str, ...], outputs: int, source: str, header: str) -> Kernel:
    return Kernel(name, inputs, tuple(f"y{i}" for i in range(outputs)), source, header)


def parts_of(rows: int, k: int) -> int:
    """SIMD-groups to the rows of W: as many as keep 80 cores busy with a flat matrix, each with a full step of columns."""
    if rows <= 2048 and k >= 2048:
        return 4
    return 2 if rows <= 8192 and k >= 4096 else 1


def matvec(product: Product) -> Callable[..., list[mx.array]]:
    """`(x, residual=None) -> results` for rows that decode, x `[T, k]` of any float type."""
    kernel = _kernel(product.name("matvec"), product.inputs(), len(product.outs), _text(product), product.header() + HEADER)
    constants = product.constants()
    total = sum(m.weight.rows for m in product.maps)
    parts, rows_each = parts_of(total, product.k), 2 if product.activation else 4
    per_group = _SIMD_GROUPS // parts * rows_each
    groups = sum(cdiv(n, per_group) for n, _ in product.outs)
    fixed = [*product.template(), ("PARTS", parts), ("R", rows_each), ("ROWS", per_group)]

    def run(x: mx.array, residual: mx.array | None = None) -> list[mx.array]:
        count = x.shape[0]
        tokens = min(count, 2 if product.gain is not None else 4)
        tokens = 1 << max(0, tokens - 1).bit_length()
        template = [*fixed, ("NT", tokens), ("X", x.dtype)]
        if product.gain is not None:
            template.append(("G", product.gain.dtype))
        return kernel(
            product.arrays(x, constants, residual),
            [(count, n) for n, _ in product.outs],
            [out for _, out in product.outs],
            (cdiv(count, tokens), groups),
            (32 * _SIMD_GROUPS,),
            template,
        )

    return run
