"""Vector building blocks of the kernels: byte dot products per feature level, transposes, sums, conversions, functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm

from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import BF16, F16, F32, I8, I16, I32, I64, Kernel, Val, bits_of, element_of, vec
from quarrel.ops.activation import NORMAL_TAIL

I32x16 = vec(I32, 16)
F32x16 = vec(F32, 16)
I8x64 = vec(I8, 64)
_TO_WHOLE = 12582912.0  # 1.5 * 2^23: the low bits of a sum with it are the nearest integer, ties to even
_PAIRS = vec(BF16, 32) if llvm.llvm_version_info[0] > 15 else I32x16
"""What `dot_bf16` has LLVM multiply."""


def each(k: Kernel, n: Val, body: Callable[[Val, int], None], lanes: int = 16) -> None:
    """Calls `body(byte offset, lanes)` for `n` float32 values, vectors first and the rest one by one."""
    whole = n & -lanes
    with k.range(0, whole, lanes) as i:
        body(i << 2, lanes)
    with k.range(whole, n) as i:
        body(i << 2, 1)


def f32s(lanes: int) -> Any:
    """A vector type, or float32 itself for one lane."""
    return vec(F32, lanes)


def code_bias(level: Level, wide: bool) -> int:
    """What `dot4` subtracts from every code: 128 from `wide` ones (up to 255) where no instruction multiplies them."""
    return 128 if wide and level.dot in ("maddubs", "sdot") else 0


def dot4(k: Kernel, level: Level, acc: Val, w: Val, x: Val, wide: bool) -> Val:
    """acc[i] + sum over l = 0..3 of (w[4i + l] - code_bias) * x[4i + l], exactly; acc <16 x i32>, w unsigned, |x| < 128."""
    if code_bias(level, wide):
        w = w ^ 0x80
    if level.dot == "vnni512":
        return k.call("llvm.x86.avx512.vpdpbusd.512", I32x16, acc, w.bitcast(I32x16), x.bitcast(I32x16))
    if level.dot == "vnni256":
        return _by_parts(k, 2, acc, w, x, lambda a, u, s: _vnni256(k, a, u, s))
    if level.dot == "maddubs":
        return _by_parts(k, 2, acc, w, x, lambda a, u, s: a + widened(k, byte_pairs(k, u, s, wide)))
    if level.dot == "sdot":
        return _by_parts(
            k, 4, acc, w, x, lambda a, u, s: k.call("llvm.aarch64.neon.sdot.v4i32.v16i8", vec(I32, 4), a, u, s)
        )
    return acc + _plain_dot(w, x)


def dot8(k: Kernel, level: Level, w: Val, x: Val, largest: int) -> Val:
    """<8 x i32>: lane i is the sum of (w[j] - code_bias) * x[j] for j = 4i + l and 32 + 4i + l, l = 0..3, exactly."""
    wide = largest > 127
    if code_bias(level, wide):
        w = w ^ 0x80
    parts = [[v.shuffle(range(h, h + 32)) for v in (w, x)] for h in (0, 32)]
    if level.dot == "maddubs":
        words = [byte_pairs(k, u, s, wide) for u, s in parts]
        if not wide and 4 * 127 * largest <= 32767:
            return widened(k, words[0] + words[1])
        return widened(k, words[0]) + widened(k, words[1])
    acc = k.zero(vec(I32, 8))
    for u, s in parts:
        if level.dot == "sdot":
            acc = _by_parts(k, 2, acc, u, s, lambda a, p, q: k.call("llvm.aarch64.neon.sdot.v4i32.v16i8", a.type, a, p, q))
        else:
            acc = _vnni256(k, acc, u, s)
    return acc


class ByteSum:
    """A sum of `dot4`s. AVX2 adds the pairs' products in words, as many as surely fit, before it widens them."""

    def __init__(self, k: Kernel, level: Level, start: Val, largest: int) -> None:
        """largest: the largest code."""
        self._k, self._level, self._total, self._wide = k, level, start, largest > 127
        self._fit = 32767 // (2 * 127 * largest) if level.dot == "maddubs" and not self._wide else 0
        self._words: list[Val] = []
        self._count = 0

    def add(self, w: Val, x: Val) -> None:
        """Four codes and four activations for each lane."""
        if self._fit < 2:
            self._total = dot4(self._k, self._level, self._total, w, x, self._wide)
            return
        pairs = [byte_pairs(self._k, *(v.shuffle(range(h, h + 32)) for v in (w, x)), False) for h in (0, 32)]
        self._words = [a + b for a, b in zip(self._words, pairs, strict=True)] if self._words else pairs
        self._count += 1
        if self._count == self._fit:
            self._widen()

    def total(self) -> Val:
        """<16 x i32>."""
        if self._words:
            self._widen()
        return self._total

    def _widen(self) -> None:
        low, high = (widened(self._k, words) for words in self._words)
        self._total = self._total + low.concat(high)
        self._words, self._count = [], 0


def _by_parts(k: Kernel, parts: int, acc: Val, w: Val, x: Val, one: object) -> Val:
    """Splits the operands, works on each part, joins the results."""
    lanes, size = acc.lanes // parts, 4 * acc.lanes // parts
    done = [
        one(
            acc.shuffle(range(lanes * p, lanes * p + lanes)), *(v.shuffle(range(size * p, size * p + size)) for v in (w, x))
        )  # type: ignore[operator]
        for p in range(parts)
    ]
    while len(done) > 1:
        done = [a.concat(b) for a, b in zip(done[::2], done[1::2], strict=True)]
    return done[0]


def _vnni256(k: Kernel, acc: Val, w: Val, x: Val) -> Val:
    words = vec(I32, 8)
    return k.call("llvm.x86.avx512.vpdpbusd.256", words, acc, w.bitcast(words), x.bitcast(words))


def byte_pairs(k: Kernel, w: Val, x: Val, signed: bool) -> Val:
    """Sums of two products as words. vpmaddubsw multiplies unsigned by signed bytes and saturates at 32767, which no pair
    reaches: with w <= 127, or with the magnitude of a signed w, whose sign is moved to x: 2 * 128 * 127 at most."""
    if signed:
        x = k.call("llvm.x86.avx2.psign.b", vec(I8, 32), x, w)
        w = k.select(w < 0, -w, w)
    return k.call("llvm.x86.avx2.pmadd.ub.sw", vec(I16, 16), w, x)


def product_pairs(k: Kernel, a: Val, b: Val) -> Val:
    """Sums of the products of two neighbouring words."""
    return k.call("llvm.x86.avx2.pmadd.wd", vec(I32, 8), a, b)


def widened(k: Kernel, words: Val) -> Val:
    """Sums of neighbouring words."""
    return product_pairs(k, words, k.lane_constants(I16, [1] * 16))


def dot2(k: Kernel, level: Level, pairs: Val, factors: Val) -> Val:
    """<n x i32>: of each pair of words, the sum of the products with a pair of factors."""
    n = pairs.lanes // 2
    if level.dot == "vnni512" and n == 16:
        return k.call("llvm.x86.avx512.pmaddw.d.512", vec(I32, n), pairs, factors)
    if level.dot in ("vnni512", "vnni256", "maddubs"):
        spans = [range(h, h + 16) for h in range(0, 2 * n, 16)]
        parts = [product_pairs(k, pairs.shuffle(span), factors.shuffle(span)) for span in spans]
        return parts[0] if len(parts) == 1 else parts[0].concat(parts[1])
    products = [v.shuffle(range(part, 2 * n, 2)).to(I32) for v in (pairs, factors) for part in (0, 1)]
    return products[0] * products[2] + products[1] * products[3]


def group_value(k: Kernel, total: Val, d: Val, low: Val, minus: Val) -> Val:
    """What the sums of 32 values are worth before x's own factor: total * d + low * minus."""
    return k.fma(low.to(F32), minus, total.to(F32) * d)


def _plain_dot(w: Val, x: Val) -> Val:
    """Products in 16 bits, sums in 32; LLVM finds the multiply-add of pairs where there is one."""
    u, s = w.to(I16, unsigned=True), x.to(I16)
    parts = [u.shuffle(range(l, 64, 4)).to(I32) * s.shuffle(range(l, 64, 4)).to(I32) for l in range(4)]
    return (parts[0] + parts[1]) + (parts[2] + parts[3])


def sum_lanes(v: Val) -> Val:
    """All lanes added as a fixed tree: lane i with lane i + half, and so on."""
    lanes = v.lanes
    while lanes > 1:
        lanes //= 2
        v = v.shuffle(range(lanes)) + v.shuffle(range(lanes, 2 * lanes))
    return v[0]


def sum_each(vs: Sequence[Val]) -> Val:
    """Lane i: `sum_lanes` of vector i, with the same bits; one, two or four vectors are halved together."""
    lanes, rows = vs[0].lanes, 1
    while lanes > 1:
        lanes //= 2
        rows *= min(len(vs), 2)
        low, high = ([2 * lanes * row + start + i for row in range(rows) for i in range(lanes)] for start in (0, lanes))
        pairs = zip(vs[::2], vs[1::2] or (None,), strict=True)
        vs = [a.shuffle(low, b) + a.shuffle(high, b) for a, b in pairs]
    return vs[0] if rows > 1 else vs[0][0]


def max_lanes(k: Kernel, v: Val) -> Val:
    """The largest lane."""
    lanes = v.lanes
    while lanes > 1:
        lanes //= 2
        v = k.maximum(v.shuffle(range(lanes)), v.shuffle(range(lanes, 2 * lanes)))
    return v[0]


def unpack(a: Val, b: Val, width: int, high: bool) -> Val:
    """Interleaves runs of `width` values from the low or high half of every 128 bits, as punpck does."""
    lanes, each = a.lanes, 128 // bits_of(element_of(a.type))
    picks: list[int] = []
    for base in range(0, lanes, each):
        start = base + (each // 2 if high else 0)
        for run in range(0, each // 2, width):
            picks += [start + run + i for i in range(width)] + [lanes + start + run + i for i in range(width)]
    return a.shuffle(picks, b)


def nearest(x: Val) -> Val:
    """float32 values below 2^22 in magnitude as the nearest i32, ties to even."""
    return (x + _TO_WHOLE).bitcast(vec(I32, x.lanes)) - 0x4B400000


def fold4(k: Kernel, level: Level, vectors: Sequence[Val], largest: int, factors: Val | None = None) -> Val:
    """Four vectors to one: of each 128 bits, lane i is the sum of vector i. Integers of at most `largest` in magnitude.

    factors: words, each twice, that the results are multiplied by; sums of two lanes fit words.
    """
    a, b, c, d = vectors
    pairs = [_add_neighbours(k, level, *pair, largest) for pair in ((a, b), (c, d))]
    return _add_neighbours(k, level, *pairs, 2 * largest, factors)


def _add_neighbours(k: Kernel, level: Level, a: Val, b: Val, largest: int, factors: Val | None = None) -> Val:
    """Sums of neighbouring lanes; within every 128 bits those of a come before those of b.

    Where lanes fit words, packing two vectors and multiplying by ones takes two instructions instead of three.
    """
    lanes = a.lanes
    if level.dot not in ("vnni512", "vnni256", "maddubs") or largest > 32767:
        even, odd = (
            [base + of + i for base in range(0, lanes, 4) for of in (0, lanes) for i in (p, p + 2)] for p in (0, 1)
        )
        total = a.shuffle(even, b) + a.shuffle(odd, b)
        return total if factors is None else total * factors.shuffle(range(0, 2 * lanes, 2)).to(I32)
    whole = lanes == 16 and level.dot == "vnni512"
    pack, multiply = (
        ("llvm.x86.avx512.packssdw.512", "llvm.x86.avx512.pmaddw.d.512")
        if whole
        else ("llvm.x86.avx2.packssdw", "llvm.x86.avx2.pmadd.wd")
    )
    size = 16 if whole else 8
    out = []
    for start in range(0, lanes, size):
        span = range(start, start + size)
        words = k.call(pack, vec(I16, 2 * size), a.shuffle(span), b.shuffle(span))
        ones = k.lane_constants(I16, [1] * (2 * size))
        by = ones if factors is None else factors.shuffle(range(2 * start, 2 * (start + size)))
        out.append(k.call(multiply, vec(I32, size), words, by))
    return out[0] if len(out) == 1 else out[0].concat(out[1])


def transpose16(rows: Sequence[Val]) -> list[Val]:
    """Sixteen <16 x 32 bits> to their transpose."""
    assert len(rows) == 16
    pairs: list[Val] = []
    for i in range(0, 16, 2):
        pairs += [unpack(rows[i], rows[i + 1], 1, False), unpack(rows[i], rows[i + 1], 1, True)]
    quads: list[Val] = []
    for i in range(0, 16, 4):
        lo0, hi0, lo1, hi1 = pairs[i : i + 4]
        quads += [
            unpack(lo0, lo1, 2, False),
            unpack(lo0, lo1, 2, True),
            unpack(hi0, hi1, 2, False),
            unpack(hi0, hi1, 2, True),
        ]
    # quads[4 * g + c] holds, in its 128-bit part q, column 4 * q + c of rows 4g .. 4g + 3.
    out: list[Val] = [rows[0]] * 16
    even, odd = _parts(0, 2, 4, 6), _parts(1, 3, 5, 7)
    for c in range(4):
        q0, q1, q2, q3 = (quads[4 * g + c] for g in range(4))
        a, b, d, e = q0.shuffle(even, q1), q0.shuffle(odd, q1), q2.shuffle(even, q3), q2.shuffle(odd, q3)
        out[c], out[8 + c] = a.shuffle(even, d), a.shuffle(odd, d)
        out[4 + c], out[12 + c] = b.shuffle(even, e), b.shuffle(odd, e)
    return out


def _parts(*which: int) -> list[int]:
    """A shuffle of 128-bit parts of two <16 x 32 bits>."""
    return [4 * p + i for p in which for i in range(4)]


def f16_to_f32(k: Kernel, level: Level, bits: Val) -> Val:
    """float16, as <n x i16> or i16, to float32."""
    if level.float16:
        return bits.bitcast(vec(F16, bits.lanes)).to(F32)
    bits = bits.to(I32, unsigned=True)
    magnitude, top = bits & 0x7FFF, bits & 0x7C00
    # A subnormal float16 is its mantissa in units of 2^-24; read as a small float32 it would be flushed to zero.
    small = (magnitude.to(F32) * 2.0**-24).bitcast(bits.type)
    normal = (magnitude << 13) + (112 << 23)
    value = k.select(top.eq(0), small, k.select(top.eq(0x7C00), normal + (112 << 23), normal))
    return (value | (bits & 0x8000) << 16).bitcast(vec(F32, bits.lanes))


def f32_to_f16(k: Kernel, level: Level, x: Val) -> Val:
    """float32 to float16 as <n x i16>, rounded to nearest even."""
    if level.float16:
        return Val(k, k.b.fptrunc(x.v, vec(F16, x.lanes))).bitcast(vec(I16, x.lanes))
    bits = x.bitcast(vec(I32, x.lanes))
    sign, magnitude = bits >> 16 & 0x8000, bits & 0x7FFFFFFF
    normal = (magnitude + (0xFFF + (magnitude >> 13 & 1)) - (112 << 23)) >> 13
    # Adding 0.5 lets the float unit round a subnormal result into the low mantissa bits.
    small = (magnitude.bitcast(x.type) + 0.5).bitcast(bits.type) - (126 << 23)
    out = k.select(magnitude < 0x38800000, small, normal)
    out = k.select(magnitude >= 0x477FF000, 0x7C00, out)
    out = k.select(magnitude > 0x7F800000, k.lift(0x7E00, bits.type), out)
    return (out | sign).to(I16)


def bf16_to_f32(bits: Val) -> Val:
    """bfloat16, as <n x i16>, to float32."""
    return (bits.to(I32, unsigned=True) << 16).bitcast(vec(F32, bits.lanes))


def f32_to_bf16(k: Kernel, x: Val) -> Val:
    """float32 to bfloat16, as <n x i16>, to nearest even."""
    bits = x.bitcast(vec(I32, x.lanes))
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return (k.select(nan, bits | 0x400000, bits + (0x7FFF + (bits >> 16 & 1))) >> 16).to(I16)


def dot_bf16(k: Kernel, acc: Val, w: Val, x: Val) -> Val:
    """acc[i] + w[2i] * x[2i] + w[2i + 1] * x[2i + 1]; w and x 32 of bfloat16, as <16 x f32>. Needs `Level.bfloat16`."""
    return k.call("llvm.x86.avx512bf16.dpbf16ps.512", F32x16, acc, w.bitcast(_PAIRS), x.bitcast(_PAIRS))


_LOG2E = 1.0 / math.log(2.0)
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
# Cephes expf: minimax on [-ln2/2, ln2/2].
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def exp(k: Kernel, x: Val) -> Val:
    """e^x, within 2 ulp; 0 below -87.3, clamped above 88.4 (no infinity is ever made). A NaN stays one."""
    tiny = x < -87.3  # what is computed of these is dropped
    x = k.minimum(k.lift(88.3, x.type), x)
    shifted = k.fma(x, _LOG2E, _TO_WHOLE)
    n = shifted - _TO_WHOLE
    r = k.fma(n, -_LN2_LOW, k.fma(n, -_LN2_HIGH, x))
    p = k.lift(_EXP[0], x.type)
    for c in _EXP[1:]:
        p = k.fma(p, r, c)
    p = k.fma(p * r, r, r) + 1.0
    power = (shifted.bitcast(vec(I32, x.lanes)) << 23) + (127 << 23)
    return k.select(tiny, 0.0, p * power.bitcast(x.type))


def exp64(k: Kernel, x: Val) -> Val:
    """e^x for x <= 0 to about 1 ulp of float64; 0 below -708. A NaN stays one."""
    tiny = x < -708.0  # what is computed of these is dropped
    shifted = x * (1.0 / math.log(2.0)) + 6755399441055744.0
    n = shifted - 6755399441055744.0
    r = x - n * 0.6931471803691238 - n * 1.9082149292705877e-10
    p = k.lift(1.0 / math.factorial(13), x.type)
    for i in range(12, -1, -1):
        p = p * r + 1.0 / math.factorial(i)
    power = (shifted.bitcast(vec(I64, x.lanes)) + 1023) << 52
    return k.select(tiny, 0.0, p * power.bitcast(x.type))


def sigmoid(k: Kernel, x: Val) -> Val:
    """1 / (1 + e^-x)."""
    return 1.0 / (exp(k, -x) + 1.0)


def tanh(k: Kernel, x: Val) -> Val:
    """tanh x = 1 - 2 / (e^2x + 1), and its series near 0, where that would cancel."""
    far = 1.0 - 2.0 / (exp(k, x * 2.0) + 1.0)
    square = x * x
    p = k.lift(62.0 / 2835.0, x.type)
    for c in (-17.0 / 315.0, 2.0 / 15.0, -1.0 / 3.0):
        p = k.fma(p, square, c)
    near = k.fma(p * square, x, x)
    return k.select(square < 0.0625, near, far)


def log1p(k: Kernel, u: Val) -> Val:
    """log(1 + u) for u in [0, 1] as 2 atanh(u / (2 + u)), within a few ulp."""
    s = u / (u + 2.0)
    square = s * s
    p = k.lift(1.0 / 17.0, u.type)
    for n in range(15, 0, -2):
        p = k.fma(p, square, 1.0 / n)
    return s * p * 2.0


def softplus(k: Kernel, x: Val) -> Val:
    """log(1 + e^x), without overflow."""
    return k.maximum(x, 0.0) + log1p(k, exp(k, -k.fabs(x)))


def normal_tail(k: Kernel, x: Val) -> Val:
    """Q(x) for x >= 0; see NORMAL_TAIL in `ops/activation.py`."""
    t = 1.0 / k.fma(x, math.sqrt(0.125), 1.0)
    p = k.lift(NORMAL_TAIL[-1], x.type)
    for c in NORMAL_TAIL[-2::-1]:
        p = k.fma(p, t, c)
    return t * exp(k, k.fma(x * x, -0.5, p))
