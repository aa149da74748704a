"""A few query rows and the keys of one split, read as the cache has them: what decoding is.

`split.py` works on keys and values that were unpacked to float32, for many query rows; for a few of them the unpacking
takes longer than the products, and what it writes does not fit the first-level cache. Here both are converted as they are
multiplied, sixteen keys and 64 values at a time.

The sums are those of `split.py` in the same order, so that a query's result has the same bits in any block of queries.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from quarrel.cpu_backend.attention.cache import decoded, raw_type, value_bytes
from quarrel.cpu_backend.attention.shape import KEYS, SPLIT, Shape
from quarrel.cpu_backend.attention.source import Keys, Source
from quarrel.cpu_backend.attention.split import scale_weights
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import F32, I64, Kernel, Val, vec
from quarrel.cpu_backend.runtime.vector import F32x16

MOST_ROWS = 8
"""Query rows (positions times heads of the group), at most, that are computed here."""


def takes(s: Shape) -> bool:
    """Whether a layer's queries are computed here where they are few."""
    return s.causal and s.dim % 16 == 0 and not s.latent and s.group <= MOST_ROWS and s.kind != "float32"


def widths(group: int, level: Level) -> tuple[int, ...]:
    """How many of the query rows, whole groups, share one conversion of a key."""
    if group == 8 and level.registers >= 32:
        return (8,)
    return (4,) if group % 4 == 0 else (4, 2) if group % 2 == 0 else (4, 2, 1)


def key_vectors(rows: int) -> int:
    """How many vectors of sixteen keys so many rows are multiplied by at once: four chains of multiply-adds. One row and
    int8 on a Zen 4, whose multiply-adds take four clocks and start one a clock: 10.8 ns a key of 64 values, with one vector
    12.4. Four rows with two vectors lose 6 %."""
    return max(1, 4 // rows)


def by_rows(k: Kernel, count: Val, at_once: tuple[int, ...], work: Callable[[Val, int], None]) -> None:
    """Calls work(first row, rows) so that all rows are covered, as many at a time as there are."""
    r = k.var(k.i64(0))
    for rows in at_once:
        with k.loop_while(lambda: r.v + rows <= count):  # noqa: B023
            work(r.v, rows)
            r.v = r.v + rows


def by_vectors(k: Kernel, first: Val, stop: Val, most: int, work: Callable[[Val, int], None]) -> None:
    """Calls work(first key, vectors of sixteen) up to `stop`, with `most` vectors while there are so many, then one."""
    j = k.var(first)
    for vectors in sorted({most, 1}, reverse=True):
        with k.loop_while(lambda: j.v + 16 * vectors <= stop):  # noqa: B023
            work(j.v, vectors)
            j.v = j.v + 16 * vectors


def scores(
    k: Kernel, level: Level, s: Shape, q: Val, keys: Keys, p: Val, rows: Val, start: Val, span: tuple[Val, Val], end: Val
) -> None:
    """p[r, j] = q[r] . k[j] for the split's keys span[0] .. span[1] - 1, span[0] being a multiple of KEYS; asks for later
    keys, up to position `end`."""
    first, count = span

    def score_keys(r: Val, n: int, j: Val, vectors: int) -> None:
        columns, row = [keys.columns(k, start + j + 16 * v) for v in range(vectors)], q + r * (4 * s.padded)
        acc = [[k.var(k.zero(F32x16)) for _ in range(vectors)] for _ in range(n)]
        # An eighth is asked for at a time: all at once would fill the queue of misses, and wait there.
        with k.range(0, 8) as part:
            for v in range(vectors):
                keys.prefetch_part(k, start + j + 16 * v, end - 1, part, 8, locality=2)
            with k.range(part * (s.dim // 8), (part + 1) * (s.dim // 8), 2) as d:
                for odd in range(2):
                    decoded = [keys.column(k, level, at, d + odd) for at in columns]
                    for i, of_row in enumerate(acc):
                        x = k.splat(k.load(row + (d << 2), F32, 4 * s.padded * i + 4 * odd), 16)
                        for column, sum in zip(decoded, of_row, strict=True):
                            sum.v = k.fma(column, x, sum.v)
        for i, of_row in enumerate(acc):
            for v, sum in enumerate(of_row):
                k.store(sum.v, p + r * (4 * SPLIT) + (j << 2), 4 * SPLIT * i + 64 * v)

    with k.range(first, count, KEYS) as step:
        stop = k.minimum(step + KEYS, count + 15 & -16)

        def score(r: Val, n: int) -> None:
            by_vectors(k, step, stop, key_vectors(n), partial(score_keys, r, n))

        by_rows(k, rows, widths(s.group, level), score)


def weigh_values(
    k: Kernel,
    level: Level,
    s: Shape,
    p: Val,
    values: Source,
    sums: Val,
    rows: Val,
    start: Val,
    span: tuple[Val, Val],
    end: Val,
) -> None:
    """sums[r] = sum_j p[r, j] v[j] over the split's keys span[0] .. span[1] - 1; asks for later ones, up to
    position `end`."""
    low, count = span
    here, later = k.stack(8 * KEYS), k.stack(8 * KEYS)
    with k.range(0, rows * (s.dim // 16)) as i:
        k.store(k.zero(F32x16), sums + (i << 6))
    with k.range(low & -KEYS, count, KEYS) as step:
        first, stop = k.maximum(step, low), k.minimum(step + KEYS, count)
        if s.folds:
            scale_weights(k, s, p, values, rows, start, first & -16, stop)
        with k.range(first & -16, stop, 16) as g:
            used, needed_later = values.at(k, start + g), values.at(k, k.minimum(start + g + KEYS, end - 1 & -16))
            k.prefetch(needed_later, 16 * values.row_bytes - 1, locality=2)  # a block may end in a line of its own
            for i in range(16):
                for address, places in ((used, here), (needed_later, later)):
                    k.store(address + i * values.row_bytes, places + (g - step << 3), 8 * i)

        def weigh(r: Val, n: int) -> None:
            wide = 16 * max(1, (16 if level.registers >= 32 else 4) // n)
            whole = s.dim // wide * wide
            with k.range(0, whole, wide) as d:
                dimensions(r, n, d, wide)
            if whole < s.dim:
                dimensions(r, n, k.i64(whole), s.dim - whole)

        def dimensions(r: Val, n: int, d: Val, count: int) -> None:
            """As many as registers hold sums of n rows."""
            at, places, skipped = sums + r * (4 * s.dim) + (d << 2), range(0, count, 16), d * value_bytes(s.kind)
            acc = [[k.var(k.load(at, F32x16, 4 * (s.dim * i + o))) for o in places] for i in range(n)]
            with k.range(first, stop) as j:
                row, soon = (k.load(x + (j - step << 3), I64) for x in (here, later))
                weight = p + r * (4 * SPLIT) + (j << 2)
                for o in range(0, count * value_bytes(s.kind), 64):
                    k.prefetch(soon + skipped, o, locality=2)
                factors = [k.splat(k.load(weight, F32, 4 * SPLIT * i), 16) for i in range(n)]
                for c, o in enumerate(places):
                    raw = k.load(row + skipped, vec(raw_type(s.kind), 16), o * value_bytes(s.kind))
                    value = decoded(k, level, s.kind, raw)
                    for of_row, factor in zip(acc, factors, strict=True):
                        of_row[c].v = k.fma(value, factor, of_row[c].v)
            for i, of_row in enumerate(acc):
                for v, o in zip(of_row, places, strict=True):
                    k.store(v.v, at, 4 * (s.dim * i + o))

        by_rows(k, rows, widths(s.group, level), weigh)


def add_values(k: Kernel, s: Shape, sums: Val, o: Val, a: Val, b: Val, rows: Val) -> None:
    """O = O a + sums b, a and b by row."""
    with k.range(0, rows) as r:
        old, new = (k.splat(k.load(x + (r << 2), F32), 16) for x in (a, b))
        for d in range(0, s.dim, 16):
            at = r * (4 * s.dim)
            k.store(k.load(o + at, F32x16, 4 * d) * old + k.load(sums + at, F32x16, 4 * d) * new, o + at, 4 * d)
