"""Attention to int8 codes in whole numbers, where one instruction sums four products of bytes.

    q' = round(q 32639 / max |q|) = 256 h + l     q . k = (256 (h . k) + l . k) max |q| / 32639     h, l signed bytes
    w' = round(w 65535 / max w)   = 256 h + l     sum w v likewise                                  h, l unsigned bytes

max |q| is of one query row, max w of its weights (with the values' scales) of one step of KEYS keys. Sums of products of
bytes are exact: a query's result has the same bits in any block of queries.

The codes of four dimensions of a key, or of four keys in a dimension, lie side by side in a tile of one step, which all
rows of a chunk read.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from quarrel.cpu_backend.attention.direct import by_rows, by_vectors
from quarrel.cpu_backend.attention.shape import KEYS, SPLIT, Shape
from quarrel.cpu_backend.attention.source import Keys, Source
from quarrel.cpu_backend.attention.split import scale_weights
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import F32, I8, I32, I64, Kernel, Val, Var, vec
from quarrel.cpu_backend.runtime.vector import F32x16, I8x64, I32x16, dot4, max_lanes, nearest, sum_lanes, unpack
from quarrel.ops.kv import LEAST

QUERY_TOP, WEIGHT_TOP = 127 * 256 + 127, 255 * 256 + 255
ROWS_AT_ONCE = (4, 2, 1)
VECTORS = 8
"""Rows times vectors of sixteen keys or dimensions, of one pass: with two sums each they take sixteen registers."""
WEIGHTS = 2 * KEYS + 64
"""Bytes of a row's weights of one step: the high bytes, the low ones, and their float32 factor."""
I8x16 = vec(I8, 16)


def in_integers(s: Shape, level: Level) -> Shape:
    """The shape, in whole numbers if the level has the instruction and the cache whole vectors of int8."""
    fits = s.kind == "int8" and s.causal and not s.latent and s.dim % 16 == 0
    return replace(s, integers=fits and level.dot == "vnni512")


def query_bytes(s: Shape) -> int:
    """Bytes of a query row: the high bytes, the low ones, two i32 that their sums begin at, and their float32 factor."""
    return 2 * s.dim + 64


def tile_bytes(s: Shape) -> int:
    """Bytes of a step's keys or values."""
    return KEYS * s.dim


def store_query(k: Kernel, s: Shape, source: Val, to: Val) -> None:
    """A row of float32 as two signed bytes a value."""
    top, bad = (k.var(k.zero(F32x16)) for _ in range(2))
    for d in range(0, s.dim, 16):
        x = k.load(source, F32x16, 4 * d)
        top.v, bad.v = k.maximum(k.fabs(x), top.v), bad.v + x * 0.0
    most = max_lanes(k, top.v)
    inverse = k.splat(k.select(most > LEAST, QUERY_TOP / most, 0.0), 16)
    sums = [k.var(k.zero(I32x16)) for _ in range(2)]
    for d in range(0, s.dim, 16):
        x = nearest(k.load(source, F32x16, 4 * d) * inverse)
        high = (x + 128).ashr(8)
        for part, (byte, sum) in enumerate(zip((high, x - (high << 8)), sums, strict=True)):
            k.store(byte.to(I8), to, s.dim * part + d)
            sum.v = sum.v + byte
    for part, sum in enumerate(sums):
        # The tile's codes have 128 added, since one of the factors has to be unsigned.
        k.store(sum_lanes(sum.v) * -128, to, 2 * s.dim + 4 * part)
    # What is not finite makes the factor NaN, so it shows in every score.
    k.store(most * (s.scale / QUERY_TOP) + sum_lanes(bad.v), to, 2 * s.dim + 8)


def _store_weights(k: Kernel, p: Val, to: Val, step: Val, first: Val, stop: Val) -> None:
    """A row's weights of a step's keys first .. stop - 1, in whole vectors, as two unsigned bytes each."""
    top, bad = (k.var(k.zero(F32x16)) for _ in range(2))
    with k.range(first, stop, 16) as j:
        w = k.load(p + (j << 2), F32x16)
        top.v, bad.v = k.maximum(w, top.v), bad.v + w * 0.0
    most = max_lanes(k, top.v)
    inverse = k.splat(k.select(most > LEAST, WEIGHT_TOP / most, 0.0), 16)
    with k.range(first, stop, 16) as j:
        w = nearest(k.load(p + (j << 2), F32x16) * inverse)
        for part in (0, 1):
            k.store((w >> 8 - 8 * part).to(I8), to + (j - step), KEYS * part)
    k.store(most * (1.0 / WEIGHT_TOP) + sum_lanes(bad.v), to, 2 * KEYS)


def _beside(four: list[Val]) -> Val:
    """Four <16 x i8>, byte i of each beside the others."""
    a, b, c, d = four
    return a.concat(b).concat(c.concat(d)).shuffle([16 * of + i for i in range(16) for of in range(4)])


def _beside_in_lanes(four: list[Val]) -> list[Val]:
    """Four <64 x i8> likewise, without a shuffle across lanes of sixteen bytes: vector q has bytes 4q .. 4q + 3 of each."""
    pairs = [[unpack(*four[i : i + 2], 1, high) for high in (False, True)] for i in (0, 2)]
    return [unpack(*half, 2, high) for half in zip(*pairs, strict=True) for high in (False, True)]


def store_result(k: Kernel, s: Shape, o: Val, to: Val, factor: Val) -> None:
    """A row of sums times a factor, its dimensions in order; whole vectors of 64 come as `_beside_in_lanes` has them."""
    for d in range(0, s.dim, 16):
        if d >= s.dim & -64:
            sums = k.load(o, F32x16, 4 * d)
        else:
            four = [k.load(o, vec(F32, 4), 4 * (d & -64) + 64 * q + (d & 63)) for q in range(4)]
            sums = four[0].concat(four[1]).concat(four[2].concat(four[3]))
        k.store(sums * k.splat(factor, 16), to, 4 * d)


def scores(
    k: Kernel,
    level: Level,
    s: Shape,
    q: Val,
    sources: tuple[Keys, Source],
    tile: Val,
    p: Val,
    rows: Val,
    start: Val,
    span: tuple[Val, Val],
) -> None:
    """p[r, j] = q[r] . k[j], without the scale of the key, for the split's keys span[0] .. span[1] - 1, span[0] being a
    multiple of KEYS; asks for the values of the same keys."""
    keys, values = sources
    first, count = span

    def store_keys(step: Val, stop: Val) -> None:
        with k.range(step, stop, 16) as j:
            columns, to = keys.columns(k, start + j), tile + (j - step) * s.dim
            k.prefetch(values.at(k, start + j), 16 * values.row_bytes - 1, locality=2)
            with k.range(0, s.dim, 16) as d:
                for o in range(0, 16, 4):
                    four = [keys.raw(k, columns, d + (o + i)) for i in range(4)]
                    k.store(_beside(four) ^ 0x80, to + (d << 4), 16 * o)

    def score_keys(r: Val, n: int, step: Val, j: Val, vectors: int) -> None:
        row, codes, size = q + r * query_bytes(s), tile + (j - step) * s.dim, query_bytes(s)
        soon = [values.at(k, start + j + 16 * v) for v in range(vectors)]
        begins = [[k.splat(k.load(row, I32, size * i + 2 * s.dim + 4 * h), 16) for h in (0, 1)] for i in range(n)]
        acc = [[[k.var(begin) for begin in of_row] for _ in range(vectors)] for of_row in begins]
        with k.range(0, s.dim, 4) as d:
            # Lines are asked for between products: filling a tile needs the queue of misses itself. A key of 4 x 128 from
            # memory on a Zen 4: 17 ns, with a quarter of the lines there 21.
            with k.when(r.eq(0)):
                for at in soon:
                    k.prefetch(at + (d << 4), locality=2)
            columns = [k.load(codes + (d << 4), I8x64, 16 * s.dim * v) for v in range(vectors)]
            for i, of_row in enumerate(acc):
                for part in (0, 1):
                    x = k.splat(k.load(row + d, I32, size * i + s.dim * part), 16).bitcast(I8x64)
                    for column, sums in zip(columns, of_row, strict=True):
                        sums[part].v = dot4(k, level, sums[part].v, column, x, True)
        for i, of_row in enumerate(acc):
            factor = k.splat(k.load(row, F32, size * i + 2 * s.dim + 8), 16)
            for v, sums in enumerate(of_row):
                k.store(_joined(k, sums) * factor, p + r * (4 * SPLIT) + (j << 2), 4 * SPLIT * i + 64 * v)

    with k.range(first, count, KEYS) as step:
        stop = k.minimum(step + KEYS, count + 15 & -16)
        store_keys(step, stop)

        def score(r: Val, n: int) -> None:
            by_vectors(k, step, stop, VECTORS // n, partial(score_keys, r, n, step))

        by_rows(k, rows, ROWS_AT_ONCE, score)


def weigh_values(
    k: Kernel,
    level: Level,
    s: Shape,
    p: Val,
    sources: tuple[Keys, Source],
    tile: Val,
    weights: Val,
    sums: Val,
    rows: Val,
    start: Val,
    span: tuple[Val, Val],
    end: Val,
) -> None:
    """sums[r] = sum_j p[r, j] v[j] over the split's keys span[0] .. span[1] - 1; asks for keys of the next split, up to
    position `end`."""
    keys, values = sources
    low, count = span
    later = k.stack(2 * KEYS)  # where the next split has as many keys as four values' bytes

    def store_values(step: Val, first: Val, stop: Val) -> None:
        with k.range(first, stop, 16) as g:
            here, soon = values.at(k, start + g), keys.at(k, k.minimum(start + g + SPLIT, end - 1 & -16))
            k.prefetch(soon, 16 * keys.head_bytes - 1, locality=2)
            with k.range(0, 16, 4) as j:
                row, to = here + j * values.row_bytes, tile + (g - step + j) * s.dim
                k.store(soon + j * keys.head_bytes, later + (g - step + j << 1))
                for d in range(0, s.dim & -64, 64):
                    wide = [k.load(row, I8x64, values.row_bytes * i + d) for i in range(4)]
                    for i, codes in enumerate(_beside_in_lanes(wide)):
                        k.store(codes, to, 4 * d + 64 * i)
                for d in range(s.dim & -64, s.dim, 16):
                    four = [k.load(row, I8x16, values.row_bytes * i + d) for i in range(4)]
                    k.store(_beside(four), to, 4 * d)

    with k.range(0, rows * (s.dim // 16)) as i:
        k.store(k.zero(F32x16), sums + (i << 6))
    with k.range(low & -KEYS, count, KEYS) as step:
        first, stop = k.maximum(step, low) & -16, k.minimum(step + KEYS, count)
        scale_weights(k, s, p, values, rows, start, first, stop)
        with k.range(0, rows) as r:
            _store_weights(k, p + r * (4 * SPLIT), weights + r * WEIGHTS, step, first, stop)
        store_values(step, first, stop)

        def weigh(r: Val, n: int) -> None:
            wide = 16 * (VECTORS // n)
            whole = s.dim // wide * wide
            with k.range(0, whole, wide) as d:
                dimensions(r, n, d, wide)
            if whole < s.dim:
                dimensions(r, n, k.i64(whole), s.dim - whole)

        def dimensions(r: Val, n: int, d: Val, width: int) -> None:
            """As many as registers hold sums of n rows."""
            at, places, row = sums + r * (4 * s.dim) + (d << 2), range(0, width, 16), weights + r * WEIGHTS
            acc = [[[k.var(k.zero(I32x16)) for _ in (0, 1)] for _ in places] for _ in range(n)]
            with k.range(first - step, stop - step, 4) as j:
                with k.when(r.eq(0)):
                    soon = k.load(later + (j << 1), I64) + (d << 2)
                    for o in range(0, 4 * width, 64):
                        k.prefetch(soon, o, locality=2)
                codes = [k.load(tile + j * s.dim + (d << 2), I8x64, 4 * o) for o in places]
                for i, of_row in enumerate(acc):
                    for part in (0, 1):
                        w = k.splat(k.load(row + j, I32, WEIGHTS * i + KEYS * part), 16).bitcast(I8x64)
                        for code, both in zip(codes, of_row, strict=True):
                            both[part].v = dot4(k, level, both[part].v, w, code, True)
            for i, of_row in enumerate(acc):
                factor = k.splat(k.load(row, F32, WEIGHTS * i + 2 * KEYS), 16)
                for o, both in zip(places, of_row, strict=True):
                    place = 4 * (s.dim * i + o)
                    k.store(k.fma(_joined(k, both), factor, k.load(at, F32x16, place)), at, place)

        by_rows(k, rows, ROWS_AT_ONCE, weigh)


def _joined(k: Kernel, sums: list[Var]) -> Val:
    """256 times the high bytes' sum and the low ones' as float32."""
    high, low = (sum.v.to(F32) for sum in sums)
    return k.fma(high, 256.0, low)
