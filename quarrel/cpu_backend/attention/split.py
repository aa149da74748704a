"""Attention to the keys of one split, unpacked to float32: scores, their softmax, weighted values, as in `attention`."""

from __future__ import annotations

import math

from quarrel.cpu_backend.attention.cache import DECODED
from quarrel.cpu_backend.attention.shape import KEYS, SPLIT, Shape
from quarrel.cpu_backend.attention.source import Source
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import F32, I32, Kernel, Val
from quarrel.cpu_backend.runtime.vector import F32x16, exp, max_lanes, sum_lanes, tanh


def _vectors(level: Level, rows: int) -> int:
    """How many vectors of sums each of so many rows has in registers. Zen 3, 2048 float16 keys of 64 values, 8 heads of
    queries: two rows with four vectors, which are twice the registers, 168 us, with two 110."""
    return KEYS // 16 if level.registers >= 32 or rows == 1 else KEYS // 32


def scores(k: Kernel, level: Level, s: Shape, q: Val, keys: Val, p: Val, rows: int, first: Val, last: Val) -> None:
    """p[r, j] = q[r] . k[j] for `rows` rows and keys first .. last - 1, whole steps of KEYS."""
    vectors = _vectors(level, rows)
    with k.range(first, last, 16 * vectors) as j:
        acc = [[k.var(k.zero(F32x16)) for _ in range(vectors)] for _ in range(rows)]
        with k.range(0, s.query_dim) as d:
            at = keys + d * (4 * SPLIT) + (j << 2)
            columns = [k.load(at, F32x16, 64 * v) for v in range(vectors)]
            for r in range(rows):
                x = k.splat(k.load(q + (d << 2), F32, 4 * s.padded * r), 16)
                for v, column in enumerate(columns):
                    acc[r][v].v = k.fma(column, x, acc[r][v].v)
        for r in range(rows):
            for v in range(vectors):
                k.store(acc[r][v].v, p + (j << 2), 4 * SPLIT * r + 64 * v)


def softmax(k: Kernel, s: Shape, p: Val, scales: Val, first: Val, last: Val, low: Val, high: Val) -> tuple[Val, Val]:
    """Scores of one row to exp(s - m), 0 outside [low, high); returns m (-inf if nothing is visible) and the sum.

    scales: of the split's keys, which scores still lack where the shape folds them.
    """
    lanes = k.lane_constants(I32, range(16))
    top = k.var(k.f32(-math.inf, 16))
    low32, high32 = (k.splat(x.to(I32), 16) for x in (low, high))
    with k.range(first, last, 16) as j:
        x = k.load(p + (j << 2), F32x16)
        if s.folds:
            x = x * k.load(scales + (j << 2), F32x16)
        if s.cap:
            x = tanh(k, x * (1.0 / s.cap)) * s.cap
        index = k.splat(j.to(I32), 16) + lanes
        x = k.select(k.both(index >= low32, index < high32), x, -math.inf)
        top.v = k.maximum(top.v, x)
        k.store(x, p + (j << 2))
    m = max_lanes(k, top.v)
    base = k.splat(k.select(m > -math.inf, m, 0.0), 16)
    total = k.var(k.zero(F32x16))
    with k.range(first, last, 16) as j:
        e = exp(k, k.load(p + (j << 2), F32x16) - base)
        k.store(e, p + (j << 2))
        total.v = total.v + e
    return m, sum_lanes(total.v)


def scale_weights(k: Kernel, s: Shape, p: Val, values: Source, rows: Val, start: Val, first: Val, last: Val) -> None:
    """Weights of `rows` rows times the scales of the values of keys first .. last - 1, at most KEYS, in whole vectors."""
    with k.range(first, last, 16) as j:
        scales = values.row_scales(k, start + j) * DECODED[s.kind]
        with k.range(0, rows) as r:
            at = p + r * (4 * SPLIT) + (j << 2)
            weight = k.load(at, F32x16)
            # What a query does not see may have any scale.
            k.store(k.select(weight.ne(0.0), weight * scales, 0.0), at)


def merge(k: Kernel, at_m: Val, at_l: Val, at_a: Val, at_b: Val, m: Val, total: Val) -> None:
    """Takes a split's maximum and sum into the running ones; leaves the two factors for the outputs."""
    old = k.load(at_m, F32)
    new = k.maximum(old, m)
    base = k.select(new > -math.inf, new, 0.0)
    a, b = exp(k, old - base), exp(k, m - base)
    k.store(new, at_m)
    k.store(k.load(at_l, F32) * a + total * b, at_l)
    k.store(a, at_a)
    k.store(b, at_b)


def weigh_values(
    k: Kernel, level: Level, s: Shape, p: Val, v: Val, o: Val, a: Val, b: Val, rows: int, first: Val, last: Val
) -> None:
    """O = O a + (sum_j p[j] v[j]) b for `rows` rows, as many dimensions at a time as the registers hold."""
    step = 16 * _vectors(level, rows)
    for d0 in range(0, s.value_padded, step):
        width = min(step, s.value_padded - d0) // 16
        acc = [[k.var(k.zero(F32x16)) for _ in range(width)] for _ in range(rows)]
        with k.range(first, last) as j:
            at = v + j * (4 * s.value_padded)
            values = [k.load(at, F32x16, 4 * d0 + 64 * i) for i in range(width)]
            for r in range(rows):
                weight = k.splat(k.load(p + (j << 2), F32, 4 * SPLIT * r), 16)
                for i, value in enumerate(values):
                    acc[r][i].v = k.fma(value, weight, acc[r][i].v)
        for r in range(rows):
            old, new = (k.splat(k.load(x, F32, 4 * r), 16) for x in (a, b))
            for i in range(width):
                at_o = 4 * (s.value_padded * r + d0 + 16 * i)
                k.store(k.load(o, F32x16, at_o) * old + acc[r][i].v * new, o, at_o)
