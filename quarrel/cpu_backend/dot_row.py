"""One activation row against packed weight rows: the decode path, bound by memory.

For weight row n, over superblocks b and groups j:
    y[n] = tree_j( sum_b scale[b, j] * d[b, j] * (codes . q - offset * sum q) ) - tree_j( sum_b minimum[b, j] * d sum q )
The byte products of a group are summed exactly in integers; each lane j is then one chain of fused multiply-adds over b, and
the lanes are added as a fixed tree. `tile` computes the very same chains, so one row gives the same bits in any batch.
"""

from __future__ import annotations

from quarrel.cpu_backend.abi import Fields, KernelDef
from quarrel.cpu_backend.epilogue import EPILOGUE_FIELDS, finish_one
from quarrel.cpu_backend.features import Level
from quarrel.cpu_backend.formats import BlockFormat
from quarrel.cpu_backend.ir import F32, I8, I32, Kernel, Val, Var, vec
from quarrel.cpu_backend.quantize import QuantRow
from quarrel.cpu_backend.vector import I8x64, I32x16, dot4, fold4, sum_lanes

PREFETCH_BYTES = 1536
"""How far ahead of the block in use weights are asked for."""


def load_codes(k: Kernel, at: Val, halves: tuple[int, int]) -> Val:
    """The activations that belong to one vector of weight codes."""
    first, second = halves
    if second == first + 1:
        return k.load(at, I8x64, 32 * first)
    return k.load(at, vec(I8, 32), 32 * first).concat(k.load(at, vec(I8, 32), 32 * second))


def superblock_dot(
    k: Kernel, level: Level, fmt: BlockFormat, at: Val, x: QuantRow, b: Val, acc: Var, low: Var | None
) -> None:
    """Adds superblock `b` of the row, whose bytes are at `at`, to the chains `acc` and, of minima, `low`."""
    block = fmt.decode(k, level, at)
    q = x.codes + (b << 8)
    dots = [dot4(k, level, k.zero(I32x16), u, load_codes(k, q, h), fmt.wide) for u, h in zip(block.codes, fmt.halves)]
    sums = fold4(dots)
    lanes = fmt.lane_groups
    by32 = [j // (fmt.groups // 8) for j in lanes]
    if fmt.groups == 8:
        sums = sums.shuffle([0, 1, 2, 3, 8, 9, 10, 11]) + sums.shuffle([4, 5, 6, 7, 12, 13, 14, 15])
    if fmt.offset:
        at_sum, count = (x.sum32 + (b << 5), 8) if fmt.groups == 8 else (x.sum16 + (b << 6), 16)
        sums = sums - k.load(at_sum, vec(I32, count)).shuffle(lanes) * fmt.offset
    d = k.load(x.d + (b << 5), vec(F32, 8)).shuffle(by32)
    acc.v = k.fma(sums.to(F32), block.scales * d, acc.v)
    if block.minima is not None and low is not None:
        if fmt.groups == 8:
            d_sum = k.load(x.d_sum + (b << 5), vec(F32, 8)).shuffle(lanes)
        else:
            d_sum = k.load(x.sum16 + (b << 6), vec(I32, 16)).shuffle(lanes).to(F32) * d
        low.v = k.fma(block.minima, d_sum, low.v)


def padded_tail(k: Kernel, fmt: BlockFormat, at: Val, blocks: Val) -> Val:
    """A copy of the last, incomplete superblock, zeros for the blocks that the row does not have."""
    buffer = k.stack(fmt.superblock_bytes)
    size = blocks * fmt.nbytes
    with k.range(0, size) as i:
        k.store(k.load(at + i, I8), buffer + i)
    with k.range(size, fmt.superblock_bytes) as i:
        k.store(k.zero(I8), buffer + i)
    return buffer


def dot_row(fmt: BlockFormat, level: Level, tail: bool) -> KernelDef:
    """Chunk c computes rows [c * chunk_rows, ...) of y = W x for the single row x. `blocks` counts whole superblocks."""

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        start = chunk * a.chunk_rows
        stop = k.minimum(start + a.chunk_rows, a.n)
        blocks, row_bytes = a.blocks, a.row_bytes
        x = QuantRow(a.x, a.p)
        with k.range(start, stop) as n:
            row = a.w + n * row_bytes
            acc = k.var(k.zero(vec(F32, fmt.groups)))
            low = k.var(k.zero(vec(F32, fmt.groups))) if fmt.has_minima else None
            with k.range(0, blocks) as b:
                at = row + b * fmt.superblock_bytes
                for line in range(0, fmt.superblock_bytes, 64):
                    k.prefetch(at, PREFETCH_BYTES + line)
                superblock_dot(k, level, fmt, at, x, b, acc, low)
            if tail:
                rest = padded_tail(k, fmt, row + blocks * fmt.superblock_bytes, a.tail)
                superblock_dot(k, level, fmt, rest, x, blocks, acc, low)
            y = sum_lanes(acc.v)
            if low is not None:
                y = y - sum_lanes(low.v)
            finish_one(k, a, y, n, k.i64(0))

    fields = ("x", "w", "n", "p", "blocks", "tail", "row_bytes", "chunk_rows", *EPILOGUE_FIELDS)
    return KernelDef(f"dot_row/{fmt.name}{'/tail' if tail else ''}", fields, body)
