"""Sums of the products of one group in a tile: sixteen weight rows, one to a lane, by a few activation rows.

    sum[i] = start + sum over values v of (code[i, v] - code_bias) * x[v]

exactly, in integers. Every function takes the addresses of vectors of weight rows and of activation rows, and gives
<16 x i32> for each activation row and each vector of weight rows.
"""

from __future__ import annotations

from quarrel.cpu_backend.formats.block import BlockFormat
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import I8, I16, I32, Kernel, Val, vec
from quarrel.cpu_backend.runtime.vector import ByteSum, I8x64, byte_pairs, product_pairs, widened

BODY = 2
"""Products of every row in the body of a loop: LLVM reorders long sums without branches so that they need more registers
than AVX2 has. Zen 3, 128 rows, ns a superblock and row: Q4_K 3.5 for 4.1, MXFP4 3.8 for 4.4; Q8_0, by words, 4.8 for 5.9.
Groups of 16 values gain nothing."""


def by_words(level: Level, fmt: BlockFormat) -> bool:
    """Wide codes and activations are multiplied as words: AVX2 has no product of signed bytes, and moving the signs of the
    codes to the activations takes longer."""
    return level.dot == "maddubs" and fmt.wide


def group_sums(
    k: Kernel, level: Level, fmt: BlockFormat, codes: list[Val], xs: list[Val], starts: list[Val]
) -> list[list[Val]]:
    """starts: <16 x i32> for each activation row; of a format with integer scales, codes are its products with scales."""
    if level.dot == "maddubs" and (fmt.wide or fmt.groups == 8):
        parts = [[start.shuffle(range(h, h + 8)) for h in (0, 8)] for start in starts]
        add = _word_sums if fmt.wide else _byte_sums
        sums = [add(k, fmt, at, xs, parts) for at in codes]
        return [[low.concat(high) for low, high in row] for row in zip(*sums, strict=True)]
    rows = [[ByteSum(k, level, start, fmt.product or fmt.largest) for _ in codes] for start in starts]
    for g in range(64 // fmt.groups):
        loaded = [k.load(at, I8x64, 64 * g) for at in codes]
        for x, row in zip(xs, rows, strict=True):
            four = k.splat(k.load(x, I32, 4 * g), 16).bitcast(I8x64)
            for sum, w in zip(row, loaded, strict=True):
                sum.add(w, four)
    return [[sum.total() for sum in row] for row in rows]


def _byte_sums(k: Kernel, fmt: BlockFormat, codes: Val, xs: list[Val], starts: list[list[Val]]) -> list[list[Val]]:
    """Pairs of products are added as words, those of a whole group or of a body of the loop, and then widened."""
    size = 256 // fmt.groups
    largest = fmt.product or fmt.largest
    whole = size // 2 * 127 * largest <= 32767
    assert BODY * 2 * 127 * largest <= 32767, fmt
    totals = [[k.var(v) for v in row] for row in starts]
    words = [[k.var(k.zero(vec(I16, 16))) for _ in row] for row in starts]

    def widen() -> None:
        for row, of_row in zip(totals, words, strict=True):
            for total, word in zip(row, of_row, strict=True):
                total.v = total.v + widened(k, word.v)

    with k.range(0, 16 * size, 64 * BODY) as o:
        for g in range(BODY):
            parts = [k.load(codes + o, vec(I8, 32), 64 * g + 32 * half) for half in range(2)]
            for x, row in zip(xs, words, strict=True):
                four = k.splat(k.load(x + (o >> 4), I32, 4 * g), 8).bitcast(vec(I8, 32))
                for word, w in zip(row, parts, strict=True):
                    products = byte_pairs(k, w, four, False)
                    word.v = word.v + products if whole or g else products
        if not whole:
            widen()
    if whole:
        widen()
    return [[v.v for v in row] for row in totals]


def _word_sums(k: Kernel, fmt: BlockFormat, codes: Val, xs: list[Val], starts: list[list[Val]]) -> list[list[Val]]:
    """Codes lie signed, two values of every weight row after another; pairs of products are added as they are made."""
    size = 256 // fmt.groups
    rows = [k.stack(2 * size) for _ in xs]
    for x, row in zip(xs, rows, strict=True):
        k.store(k.load(x, vec(I8, size)).to(I16), row)
    totals = [[k.var(v) for v in row] for row in starts]
    with k.range(0, 16 * size, 32 * BODY) as o:
        for g in range(BODY):
            parts = [k.load(codes + o, vec(I8, 16), 32 * g + 16 * half).to(I16) for half in range(2)]
            for row, total in zip(rows, totals, strict=True):
                two = k.splat(k.load(row + (o >> 3), I32, 4 * g), 8).bitcast(vec(I16, 16))
                for v, w in zip(total, parts, strict=True):
                    v.v = v.v + product_pairs(k, w, two)
    return [[v.v for v in row] for row in totals]
