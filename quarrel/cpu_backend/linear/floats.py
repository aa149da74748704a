"""Linear maps in float32 arithmetic: F32, F16 and BF16 weights, and any block format where exact results are requested.

For every (weight row, activation row) pair one vector of sixteen chains runs over k, lane i taking k = i mod 16, and the
lanes are added as a fixed tree: the same order in every tile, so that a row gives the same bits in any batch. Packed weight
rows are first dequantised, once for all activation rows of the chunk, into scratch memory.

Where the CPU sums pairs of bfloat16 (`Level.bfloat16`), a chain takes a pair of BF16 weights, and of activations rounded
alike, as if it were one value: rows of `k` values are rows of k / 2 PAIRS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from quarrel.cpu_backend.formats.dequantize import FLOATS, dequantize_row, load_float
from quarrel.cpu_backend.formats.table import BLOCKS
from quarrel.cpu_backend.linear.activations import padded
from quarrel.cpu_backend.linear.epilogue import OUTPUT_FIELDS, Output
from quarrel.cpu_backend.linear.matvec import Rows
from quarrel.cpu_backend.runtime.abi import Fields, KernelDef
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import F32, Kernel, Val, Var, vec
from quarrel.cpu_backend.runtime.vector import F32x16, dot_bf16, sum_each

ROWS = 16
"""Weight rows of a chunk when there are many activation rows, and at most when packed rows are dequantised first."""
T_BLOCK = 512
CHUNK_BYTES = 32768
"""Weight bytes of the shortest chunk of the decode path: about 3 us of one core's share of memory bandwidth."""
BLOCK = 24
"""Weight rows that meet a few activation rows together."""
PASS = 768
"""Values of a row that a block's tiles read one after another, each in two passes."""
STEP = 32
"""Values of a row in the body of a loop. Two rows of F16 on Zen 3, ns a superblock and row: 5.9, with 16 values 7.4."""
AHEAD = 8192
"""Bytes, at least, that the weights of a tile are prefetched ahead of their use, by whole tiles."""
SHORT = 1024
"""Rows of fewer values follow one another fast enough to be read one at a time, which is one run of memory. One thread of a
Zen 3 that reads 15 GB/s read F16 rows of 576, 1536, 2880 and 4096 values at 9.7, 10.1, 11.5 and 13.1 GB/s in twos without
prefetches; with them at 13.4, 13.0, 12.4 and 12.5 one at a time, and 10.9, 14.0, 13.0 and 14.8 in fours."""


PAIRS = "BF16x2"
VALUE_BYTES = {**FLOATS, PAIRS: 4}
"""Bytes of a value of a `FloatMatrix`."""


FITTING = 2048
"""Pairs of a row, six of which fit a first-level cache of 48 KB. Zen 4 (32 KB), ns a superblock and row in stretches /
without, six and 128 rows of 2048 values: 2.7 / 2.1, 3.3 / 2.4 to 2.7; of 4096 2.7 / 2.1, 3.0 to 3.4 / 2.2."""


def is_short(kind: str, k: int) -> bool:
    """Whether rows of `k` values are read one at a time, and never in stretches."""
    return k <= FITTING if kind == PAIRS else k < SHORT


def load_weights(k: Kernel, level: Level, kind: str, row: Val, offset: Val, lanes: int) -> Val:
    """`load_float`, of pairs as they are."""
    return load_float(k, level, "F32" if kind == PAIRS else kind, row, offset, lanes)


@dataclass(frozen=True)
class FloatMatrix:
    """Unpacked weight rows of `kind`, F32, F16, BF16 or PAIRS: row i at base + i * size, of `k` values."""

    base: Val
    size: Val
    kind: str
    k: Val
    short: bool
    """See `is_short`."""

    def single(self, level: Level) -> int:
        """Rows that are computed side by side for a single activation row. With AVX-512 one of halves is fast enough for
        memory, as short ones are: two threads of a Zen 5 read 34 to 40 GB/s of F16 so, in fours 30 to 34."""
        return 1 if self.short or (level.registers >= 32 and self.kind != "F32") else 4


def vector_lanes(level: Level, rows: int) -> int:
    """Lanes of a vector. Where sixteen are two registers LLVM works on both at once, and with several activation rows it
    spills."""
    return 16 if level.registers >= 32 or rows == 1 else 8


def in_blocks(level: Level, m: FloatMatrix, weights: int, rows: int) -> bool:
    """Whether tiles are computed in stretches (`_Block`): half of the lanes after the other, where all of them would not
    fit the registers, or because x of long rows does not fit the first-level cache. Beside F32, whose weights take most of
    that, it gained nothing, and tiles of five rows are faster without (Zen 4, F16 of 2048 values 4.2 ns for 5.0)."""
    if level.registers < 32:
        return weights * rows > 6
    return weights * rows > 20 and not m.short and m.kind != "F32"


@dataclass(frozen=True)
class _Chains:
    """Lanes start .. start + lanes - 1 of the chains of all pairs of rows."""

    m: FloatMatrix
    row_at: list[Val]
    xs: list[Val]
    start: int
    lanes: int
    acc: list[list[Var]]

    @property
    def full(self) -> bool:
        """Whether the sums leave too few registers for LLVM to convert sixteen values while others are multiplied."""
        return self.m.kind != "F32" and self.lanes == 16 and len(self.row_at) * len(self.xs) > 16

    def sixteen(self, k: Kernel, level: Level, i: Val) -> None:
        """Adds the products of values i .. i + 15."""
        at, lanes = (i + self.start if self.start else i) << 2, self.lanes
        load_w = lambda row: load_weights(k, level, self.m.kind, row, at, lanes)  # noqa: E731
        self._add(k, load_w, lambda x: k.load(x + at, vec(F32, lanes)))

    def rest(self, k: Kernel, level: Level) -> None:
        """Adds the last, incomplete sixteen, with zeros behind them."""
        whole = self.m.k & -16

        def padded(load: Callable[[Val], Val]) -> Val:
            buffer = k.stack(64)
            k.store(k.zero(F32x16), buffer)
            with k.range(whole, self.m.k) as i:
                k.store(load(i << 2), buffer + (i - whole << 2))
            return k.load(buffer, vec(F32, self.lanes), 4 * self.start)

        self._add(
            k,
            lambda row: padded(lambda o: load_weights(k, level, self.m.kind, row, o, 1)),
            lambda x: padded(lambda o: k.load(x + o, F32)),
        )

    def _add(self, k: Kernel, load_w: Callable[[Val], Val], load_x: Callable[[Val], Val]) -> None:
        def add(chains: Var, w: Val, x: Val) -> None:
            chains.v = dot_bf16(k, chains.v, w, x) if self.m.kind == PAIRS else k.fma(w, x, chains.v)

        if 1 < len(self.xs) < len(self.row_at):  # the fewer stay in registers
            xs = [load_x(row) for row in self.xs]
            for row, sums in zip(self.row_at, self.acc, strict=True):
                w = load_w(row)
                for x, chains in zip(xs, sums, strict=True):
                    add(chains, w, x)
            return
        ws = [load_w(row) for row in self.row_at]
        for j, x_row in enumerate(self.xs):
            x = load_x(x_row)
            for w, sums in zip(ws, self.acc, strict=True):
                add(sums[j], w, x)


def _add_span(
    k: Kernel, level: Level, parts: list[_Chains], start: Val, stop: Val, ahead: Val | None = None, near: bool = True
) -> None:
    """Adds the products of values start .. stop - 1, whole sixteens, to chains of the same rows; asks for the weights that
    lie `ahead` bytes behind them: into the first-level cache (`near`) or, where x is to stay there, the second."""
    rows, value = parts[0].row_at, VALUE_BYTES[parts[0].m.kind]
    step = 16 if parts[0].full else STEP
    body = start + (stop - start & -step)
    with k.range(start, body, step) as i:
        for value_at in range(0, step, 16):
            if ahead is not None and value_at * value % 64 == 0:
                for row in rows:
                    k.prefetch(row + i * value + ahead, value_at * value, locality=3 if near else 2)
            for chains in parts:
                chains.sixteen(k, level, i + value_at)
    with k.range(body, stop, 16) as i:
        for chains in parts:
            chains.sixteen(k, level, i)


def _whole(parts: list[_Chains]) -> list[list[Val]]:
    """Every pair's sixteen chains."""
    low, *high = ([[chains.v for chains in row] for row in part.acc] for part in parts)
    for other in high:
        low = [[a.concat(b) for a, b in zip(*rows, strict=True)] for rows in zip(low, other, strict=True)]
    return low


def _tile(k: Kernel, level: Level, m: FloatMatrix, ns: list[Val], xs: list[Val], tail: bool) -> list[list[Val]]:
    """The chains of every weight row in ns and activation row address in xs, all of them in registers."""
    row_at, lanes = [m.base + n * m.size for n in ns], vector_lanes(level, len(xs))
    parts = [
        _Chains(m, row_at, xs, start, lanes, [[k.var(k.zero(vec(F32, lanes))) for _ in xs] for _ in row_at])
        for start in range(0, 16, lanes)
    ]
    # Rows of float32 are long enough for the processor's own prefetches. With more of them one and two rows of x took 21.4
    # and 13.9 ns a superblock and row from the third-level cache of a Zen 3, for 14.0 and 8.9; memory is read as fast.
    ahead = None if m.kind == "F32" else _later(k, m, len(row_at), AHEAD)
    _add_span(k, level, parts, k.i64(0), m.k & -16, ahead, near=len(xs) == 1)
    if tail:
        for chains in parts:
            chains.rest(k, level)
    return _whole(parts)


@dataclass(frozen=True)
class _Block:
    """Chains of up to BLOCK weight rows, from `first` on, and a few activation rows. Their sums lie in memory; for each
    stretch of PASS values those of `height` weight rows come into registers, `lanes` of them at a time. So x is in the
    first-level cache for the whole block."""

    m: FloatMatrix
    first: Val
    xs: list[Val]
    height: int
    lanes: int
    sums: Val

    def add(self, k: Kernel, level: Level, size: Val, cold: Val) -> None:
        """The products of whole sixteens of values of `size` weight rows, which nobody has read yet if they are cold: the
        next stretch of these rows, and after the last the first of the next block's, is asked for."""
        whole, value = self.m.k & -16, VALUE_BYTES[self.m.kind]
        with k.range(0, size * len(self.xs)) as i:
            k.store(k.zero(F32x16), self.sums + (i << 6))
        with k.range(0, whole, PASS) as start:
            stop = k.minimum(start + PASS, whole)
            ahead = k.select(stop < whole, k.i64(PASS * value), self.m.size * BLOCK - start * value)
            with k.range(0, size, self.height) as n:
                for lane in self._starts:
                    chains = self._chains(k, n, lane)
                    if chains.full:  # prefetches between its products would have LLVM move registers about
                        with k.when(cold):
                            self._prefetch(k, chains.row_at, start * value + ahead, (stop - start) * value)
                    if chains.full or lane != self._starts[-1]:
                        _add_span(k, level, [chains], start, stop)
                    else:
                        with k.either(cold) as (yes, no):
                            with yes:
                                _add_span(k, level, [chains], start, stop, ahead, near=False)
                            with no:
                                _add_span(k, level, [chains], start, stop)
                    for o, v in zip(self._offsets(lane), chain.from_iterable(chains.acc), strict=True):
                        k.store(v.v, self.sums + n * (64 * len(self.xs)), o)

    @staticmethod
    def _prefetch(k: Kernel, rows: list[Val], at: Val, size: Val) -> None:
        with k.range(0, size, 64) as line:
            for row in rows:
                k.prefetch(row + at + line, locality=2)

    def results(self, k: Kernel, level: Level, n: Val, tail: bool) -> list[list[Val]]:
        """The chains of weight rows n .. n + height - 1 and every row of x."""
        parts = [self._chains(k, n, lane) for lane in self._starts]
        if tail:
            for chains in parts:
                chains.rest(k, level)
        return _whole(parts)

    @property
    def _starts(self) -> range:
        return range(0, 16, self.lanes)

    def _chains(self, k: Kernel, n: Val, lane: int) -> _Chains:
        """Lanes from `lane` on of weight rows n .. n + height - 1, as they stand."""
        width, start = len(self.xs), self.sums + n * (64 * len(self.xs))
        acc = [k.var(k.load(start, vec(F32, self.lanes), o)) for o in self._offsets(lane)]
        rows = [self.m.base + (self.first + n + i) * self.m.size for i in range(self.height)]
        by_row = [acc[i * width : (i + 1) * width] for i in range(self.height)]
        return _Chains(self.m, rows, self.xs, lane, self.lanes, by_row)

    def _offsets(self, lane: int) -> list[int]:
        """Where these lanes of a tile's sums lie."""
        return [64 * pair + 4 * lane for pair in range(self.height * len(self.xs))]


def _later(k: Kernel, m: FloatMatrix, count: int, ahead: int) -> Val:
    """How far behind a tile of so many weight rows the first tile lies that is at least `ahead` bytes away."""
    tile = m.size * count
    return (k.i64(ahead - 1) // tile + 1) * tile


TOGETHER = {4: (4,), 3: (2, 1), 1: (1,)}
"""Of how many weight rows the chains are added together, by the height of a tile."""


def tiles(level: Level) -> tuple[tuple[int, int], ...]:
    """Weight rows by activation rows that are computed at once, where there are so many activation rows."""
    return ((4, 6), (4, 5), (4, 4), (4, 3), (4, 2)) if level.registers >= 32 else ((3, 4), (3, 2))


def skipped(level: Level, width: int) -> tuple[int, ...]:
    """Numbers of activation rows that are left to narrower tiles: 8 are twice 4, 7 are 4 and 3."""
    return (7, 8) if level.registers >= 32 and width > 4 else ()


def chunk_rows(level: Level, rows: int, row_bytes: int, threads: int) -> int:
    """Weight rows of a chunk of a matrix: whole tiles, eight chunks for each thread if they are CHUNK_BYTES long, and at
    most four times as long or 24 rows. On Zen 3 128 rows of F16 are multiplied at 72 to 77 GFLOP/s a core in chunks of 128
    KB, at 62 in those of 32 KB: each chunk reads x anew."""
    size = max(CHUNK_BYTES, min(max(4 * CHUNK_BYTES, 24 * row_bytes), rows * row_bytes // (8 * threads)))
    step = 4 if level.registers >= 32 else 6
    return max(step, min(256, size // row_bytes) // step * step)


def float_rows(k: Kernel, level: Level, m: FloatMatrix, span: tuple[Val, Val], rows: Rows, out: Output, tail: bool) -> None:
    """Stores the results of the weight rows in the span for the given activation rows."""
    t = k.var(rows.start)

    def store(n: Val, ts: list[Val], chains: list[list[Val]]) -> None:
        for t_j, column in zip(ts, zip(*chains, strict=True), strict=True):
            i = 0
            for count in TOGETHER[len(column)]:
                out.store(k, sum_each(column[i : i + count]), n + i, rows.target(t_j))
                i += count

    def tile(n: Val, count: int, ts: list[Val]) -> None:
        ns = [n + i for i in range(count)]
        store(n, ts, _tile(k, level, m, ns, [rows.source(t) for t in ts], tail))

    def block(n: Val, size: Val, height: int, ts: list[Val]) -> None:
        xs, lanes = [rows.source(t) for t in ts], vector_lanes(level, len(ts))
        chains = _Block(m, n, xs, height, lanes, k.stack(64 * BLOCK * len(ts)))
        chains.add(k, level, size, ts[0].eq(rows.start))
        with k.range(0, size, height) as i:
            store(n + i, ts, chains.results(k, level, i, tail))

    def fits(width: int) -> Val:
        left = rows.stop - t.v
        here = left >= width
        for count in skipped(level, width):
            here = here & left.ne(count)
        return here

    for height, width in (*tiles(level), (m.single(level), 1)):
        with k.loop_while(lambda: fits(width)):  # noqa: B023
            n, ts = k.var(span[0]), [t.v + i for i in range(width)]
            blocks = in_blocks(level, m, height, width)
            if blocks:
                with k.loop_while(lambda: n.v + height <= span[1]):  # noqa: B023
                    size = k.minimum(k.i64(BLOCK), (span[1] - n.v) // height * height)
                    block(n.v, size, height, ts)
                    n.v = n.v + size
            for count in (1,) if blocks else (height, 1):
                with k.loop_while(lambda: n.v + count <= span[1]):  # noqa: B023
                    tile(n.v, count, ts)
                    n.v = n.v + count
            t.v = t.v + width


def exact_rows(
    k: Kernel, level: Level, name: str, a: Fields, base: Val, span: tuple[Val, Val], k_in: int, scratch: Val
) -> FloatMatrix:
    """The weight rows in the span as something to compute with: as they are, or dequantised into scratch memory."""
    short = is_short(name, k_in)
    if name not in BLOCKS:
        return FloatMatrix(base, a.row_bytes, name, a.k, short)
    size = (a.k + 255 & -256) << 2
    with k.range(*span) as n:
        dequantize_row(k, level, name, base + n * a.row_bytes, scratch + (n - span[0]) * size, a.k, tail=k_in % 256 != 0)
    return FloatMatrix(scratch - span[0] * size, size, "F32", a.k, short)


def exact_scratch(name: str, k_in: int) -> int:
    """Scratch bytes that `exact_rows` needs for ROWS rows."""
    return ROWS * 4 * padded(k_in) + 1024 if name in BLOCKS else 0


def exact_marks(name: str, k_in: int) -> str:
    """What the code of a kernel with `exact_rows` and `float_rows` depends on, beside the format."""
    ragged = name in BLOCKS and k_in % 256 != 0
    return f"{'/tail' if k_in % 16 else ''}{'/ragged' if ragged else ''}{'/short' if is_short(name, k_in) else ''}"


def float_linear(name: str, level: Level, k_in: int) -> KernelDef:
    """Chunk c: weight rows [chunk_rows * (c % n_tiles), ...) for activation rows [T_BLOCK * (c // n_tiles), ...)."""
    tail = k_in % 16 != 0

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        first = chunk % a.n_tiles * a.chunk_rows
        span = (first, k.minimum(first + a.chunk_rows, a.n))
        matrix = exact_rows(k, level, name, a, a.w, span, k_in, scratch)
        start, x, size = chunk // a.n_tiles * T_BLOCK, a.x, a.k << 2
        rows = Rows(start, k.minimum(start + T_BLOCK, a.live_rows), lambda t: x + t * size, lambda t: t)
        float_rows(k, level, matrix, span, rows, Output.of(a, a.n), tail)

    fields = ("live_rows", "x", "w", "n", "k", "row_bytes", "n_tiles", "chunk_rows", *OUTPUT_FIELDS)
    return KernelDef(f"float_linear/{name}{exact_marks(name, k_in)}", fields, body, exact_scratch(name, k_in))
