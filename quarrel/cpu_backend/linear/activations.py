"""Activations rounded to bfloat16, or to 8 bits: then one row becomes codes with a scale and sums per block of 32.

    d = max|x| / 127,  q = round(x / d)                      per block of 32, as Q8_0

A quantised row of `k` values (padded with zeros to a multiple of 256, `p`) is one run of bytes:
    codes i8 [p], d f32 [p/32], d * sum(q) f32 [p/32], sum(q) i32 [p/32], sum(q) per 16 i32 [p/16], codes again i8 [p],
    sum(q) per 16 once more i16 [p/16]

The codes stand there twice: as they follow one another, and in the order in which formats of eight groups are decoded
(`SPLIT` in `formats/block.py`). Sums per 16 stand in the order of `SIXTEEN`, in which those of formats of sixteen groups
come out; as words they follow one another.
"""

from __future__ import annotations

from dataclasses import dataclass

from quarrel.cpu_backend.runtime.abi import Fields, KernelDef
from quarrel.cpu_backend.runtime.ir import F32, I8, I16, Kernel, Val
from quarrel.cpu_backend.runtime.vector import F32x16, each, f32_to_bf16, f32s, max_lanes, nearest, sum_lanes


def padded(k: int) -> int:
    """`k` rounded up to whole superblocks."""
    return -(-k // 256) * 256


def row_bytes(k: int) -> int:
    """Bytes of a quantised row."""
    p = padded(k)
    return 2 * p + 4 * (3 * p // 32 + p // 16) + p // 8


@dataclass(frozen=True)
class QuantRow:
    """Addresses inside one quantised row of `p` padded values (both i64)."""

    base: Val
    p: Val

    @property
    def codes(self) -> Val:
        return self.base

    @property
    def d(self) -> Val:
        return self.base + self.p

    @property
    def d_sum(self) -> Val:
        return self.base + self.p + (self.p >> 3)

    @property
    def sum32(self) -> Val:
        return self.base + self.p + (self.p >> 2)

    @property
    def sum16(self) -> Val:
        return self.base + self.p + (self.p >> 2) + (self.p >> 3)

    @property
    def split(self) -> Val:
        """The codes in the order of `SPLIT`."""
        return self.sum16 + (self.p >> 2)

    @property
    def words16(self) -> Val:
        """The sums per 16 as words."""
        return self.split + self.p


def quantize_block(k: Kernel, row: QuantRow, block: Val, low: Val, high: Val) -> None:
    """Rounds the 32 values of block number `block`, as two <16 x f32>."""
    most = max_lanes(k, k.maximum(k.fabs(low), k.fabs(high)))
    d = most * (1.0 / 127.0)
    inverse = k.select(most > 0.0, 127.0 / most, 0.0 * most)
    split = row.split + ((block & -8) << 5) + ((block & 3) << 6) + ((block & 4) << 2)
    sum16 = row.sum16 + ((block & -8) << 3) + ((block & 1) << 5) + ((block & 6) << 1)
    sums = []
    for part, x in enumerate((low, high)):
        # The product is at most 127 in magnitude, give or take one rounding, so no clamp is needed.
        q = nearest(x * k.splat(inverse, 16))
        k.store(q.to(I8), row.codes + (block << 5), 16 * part)
        k.store(q.to(I8), split, 32 * part)
        sums.append(sum_lanes(q))
        k.store(sums[part], sum16, 16 * part)
        k.store(sums[part].to(I16), row.words16 + (block << 2), 2 * part)
    total = sums[0] + sums[1]
    k.store(d, row.d + (block << 2))
    k.store(d * total.to(F32), row.d_sum + (block << 2))
    k.store(total, row.sum32 + (block << 2))


def quantize_blocks(k: Kernel, row: QuantRow, x: Val, first: Val, last: Val, n: Val) -> None:
    """Quantises blocks [first, last) of a row of `n` values, zeros after them; the first block's values are at `x`."""
    whole = k.minimum(last, n >> 5)
    with k.range(first, whole) as b:
        at = x + (b - first << 7)
        quantize_block(k, row, b, k.load(at, F32x16), k.load(at, F32x16, 64))
    with k.range(k.maximum(first, whole), last) as b:
        buffer = k.stack(128)
        at = x + (b - first << 7)
        with k.range(0, 32) as i:
            inside = (b << 5) + i < n
            with k.either(inside) as (yes, no):
                with yes:
                    k.store(k.load(at + (i << 2), F32), buffer + (i << 2))
                with no:
                    k.store(k.f32(0.0), buffer + (i << 2))
        quantize_block(k, row, b, k.load(buffer, F32x16), k.load(buffer, F32x16, 64))


def quantize() -> KernelDef:
    """Chunk t quantises row t of x, `[T, k]` float32."""

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        p = (a.k + 255) & -256
        row = QuantRow(a.out + chunk * a.out_stride, p)
        quantize_blocks(k, row, a.x + chunk * (a.k << 2), k.i64(0), p >> 5, a.k)

    return KernelDef("quantize", ("x", "out", "k", "out_stride"), body)


def to_bfloat16() -> KernelDef:
    """Chunk t rounds row t of x, `[T, k]` float32, to bfloat16."""

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        x, out = a.x + chunk * (a.k << 2), a.out + chunk * (a.k << 1)
        each(k, a.k, lambda o, lanes: k.store(f32_to_bf16(k, k.load(x + o, f32s(lanes))), out + (o >> 1)))

    return KernelDef("to_bfloat16", ("x", "out", "k"), body)
