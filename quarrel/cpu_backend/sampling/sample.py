"""Drawing tokens, row by row, in float64: the thresholds are found by radix selection, without sorting.

A small top_k of a large vocabulary looks at few tokens: the k-th largest of the maxima of GROUPS disjoint groups is at most
the k-th largest of all, so what is below it cannot be kept. Of 151,936 normal logits 42 at most are left where 40 are
wanted, 304 of 256. Thresholds and draws are by ratios of probabilities, so their sum over all tokens is not needed.
"""

from __future__ import annotations

import math

from quarrel.cpu_backend.lowering import Lowering
from quarrel.cpu_backend.runtime.abi import Fields, KernelDef
from quarrel.cpu_backend.runtime.ir import F32, F64, I16, I32, I64, Kernel, Val, Var, vec
from quarrel.cpu_backend.runtime.vector import each, exp64, sum_lanes
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.ops.sample import SAMPLE

_BUCKETS = 1024
_COARSE_SHIFT = 48  # sign, exponent and four bits of mantissa: 16 buckets an octave, 64 octaves below 1
_ONE = 0x3FF0
GROUPS = 1024
BLOCK = 64
"""Probabilities that are added at once before one of them is drawn."""
MOST = 256
"""The largest top_k that is found so: with more, most groups' maxima are among the largest, and most tokens above them."""


def best_of(k: Kernel, logits: Val, n: Val) -> tuple[Val, Val]:
    """The highest finite logit and its lowest id; the id is -1 if there is none or one of the logits is NaN."""
    top, broken, loose = k.var(k.f32(-math.inf, 16)), k.var(k.zero(vec(F32, 16))), k.var(k.zero(F32))
    where = k.var(k.lift(-1, vec(I32, 16)))
    best, id = k.var(k.f32(-math.inf)), k.var(k.lift(-1, I32))

    def one(offset: Val, lanes: int) -> None:
        x = k.load(logits + offset, vec(F32, lanes))
        index = k.lift((offset >> 2).to(I32), vec(I32, lanes))
        if lanes > 1:
            index = index + k.lane_constants(I32, range(lanes))
        value, place = (top, where) if lanes > 1 else (best, id)
        mark = broken if lanes > 1 else loose
        mark.v = k.select(x.eq(x), mark.v, 1.0)
        better = k.both(x > value.v, x < math.inf)
        place.v = k.select(better, index, place.v)
        value.v = k.select(better, x, value.v)

    # The loose end is visited last but holds the highest ids, so it must lose a tie against the vectors.
    each(k, n, one)
    for lane in range(16):
        x, index = top.v[lane], where.v[lane]
        earlier = k.either_of(x > best.v, k.both(x.eq(best.v), k.both(index < id.v, index >= 0)))
        best.v, id.v = k.select(earlier, x, best.v), k.select(earlier, index, id.v)
    return best.v, k.select(sum_lanes(broken.v) + loose.v > 0.0, k.lift(-1, I32), id.v)


def _weights(k: Kernel, logits: Val, n: Val, best: Val, temperature: Val, p: Val) -> Val:
    """e^((logit - best) / temperature) as float64 at p, and their sum; logits that are not finite get 0."""
    wide, rest = k.var(k.zero(vec(F64, 8))), k.var(k.zero(F64))

    def one(offset: Val, lanes: int) -> None:
        x = k.load(logits + offset, vec(F32, lanes))
        y = (x.to(F64) - k.lift(best, vec(F64, lanes))) / k.lift(temperature, vec(F64, lanes))
        e = k.select(k.fabs(x) < math.inf, exp64(k, y), 0.0)
        total: Var = wide if lanes > 1 else rest
        total.v = total.v + e
        k.store(e, p + (offset << 1))

    each(k, n, one, lanes=8)
    return sum_lanes(wide.v) + rest.v


def _group_maxima(k: Kernel, logits: Val, n: Val, out: Val) -> None:
    """The largest finite logit of each of GROUPS groups, float32 at out: lanes of runs of vectors. A few logits behind the
    last whole vector of a run are in no group."""
    runs, together = GROUPS // 16, 4
    size = n.udiv(16 * runs) << 6
    with k.range(0, runs, together) as run:
        tops = [k.var(k.f32(-math.inf, 16)) for _ in range(together)]
        with k.range(0, size, 64) as at:
            for i, top in enumerate(tops):
                x = k.load(logits + (run + i) * size + at, vec(F32, 16))
                top.v = k.select(k.both(x > top.v, x < math.inf), x, top.v)
        for i, top in enumerate(tops):
            k.store(top.v, out + (run + i << 6))


def _bound(k: Kernel, logits: Val, n: Val, best: Val, count: Val, temperature: Val, scratch: Val) -> Val:
    """A logit below which none of the `count` most probable tokens is, nor one that is as probable as the last of them."""
    maxima, nearness, work = scratch, scratch + 4 * GROUPS, scratch + 12 * GROUPS
    _group_maxima(k, logits, n, maxima)
    with k.range(0, GROUPS, 8) as i:
        below = k.lift(best, vec(F64, 8)) - k.load(maxima + (i << 2), vec(F32, 8)).to(F64)
        k.store(k.lift(1.0, below.type) / (below + 1.0), nearness + (i << 3))
    least = _select(k, nearness, k.i64(GROUPS), k.zero(F64), count.to(F64), False, work)
    bound = k.var(k.f32(math.inf))
    with k.range(0, GROUPS) as i:
        with k.when(k.load(nearness + (i << 3), F64) >= least):
            bound.v = k.minimum(k.load(maxima + (i << 2), F32), bound.v)
    # Logits this near to one another may be equally probable, at a high temperature all of them.
    return (bound.v.to(F64) - temperature * 1e-9).to(F32)


def _gather(k: Kernel, logits: Val, n: Val, bound: Val, ids: Val, out: Val) -> Val:
    """The finite logits from `bound` on, and their ids; how many there are."""
    count = k.var(k.i64(0))

    def take(i: Val) -> None:
        x = k.load(logits + (i << 2), F32)
        with k.when(k.both(x >= bound, k.fabs(x) < math.inf)):
            k.store(x, out + (count.v << 2))
            k.store(i.to(I32), ids + (count.v << 2))
            count.v = count.v + 1

    whole = n & -16
    with k.range(0, whole, 16) as i:
        some = (k.load(logits + (i << 2), vec(F32, 16)) >= k.splat(bound, 16)).bitcast(I16).ne(0)
        with k.when(some), k.range(i, i + 16) as at:
            take(at)
    with k.range(whole, n) as i:
        take(i)
    return count.v


def _coarse(k: Kernel, x: Val) -> Val:
    """Bucket of a probability: 0 for the largest values."""
    distance = _ONE - (x.bitcast(I64) >> _COARSE_SHIFT)
    return k.minimum(k.maximum(distance, 0), _BUCKETS - 1)


def _pick(k: Kernel, histogram: Val, buckets: int, descending_from: int, reached: Var, target: Val) -> Val:
    """The bucket in which the running total, `reached`, first comes to the target; the last one in use if it never does.

    `reached` is left at the total before that bucket. Buckets with nothing in them hold a negative number.
    """
    picked, going = k.var(k.i64(-1)), k.var(k.i64(1))
    before = k.var(reached.v)
    with k.range(0, buckets) as i:
        index = descending_from - i if descending_from else i
        amount = k.load(histogram + (index << 3), F64)
        with k.when(k.both(going.v.ne(0), amount >= 0.0)):
            picked.v = index
            before.v = reached.v
            reached.v = reached.v + amount
            with k.when(reached.v >= target):
                going.v = k.i64(0)
    reached.v = before.v
    return picked.v


def _tally(k: Kernel, histogram: Val, bucket: Val, amount: Val) -> None:
    at = histogram + (bucket << 3)
    k.store(k.maximum(k.load(at, F64), 0.0) + amount, at)


def _clear(k: Kernel, histogram: Val, buckets: int) -> None:
    with k.range(0, buckets, 8) as i:
        k.store(k.lift(-1.0, vec(F64, 8)), histogram + (i << 3))


def _select(k: Kernel, p: Val, n: Val, floor: Val, target: Val, by_mass: bool, scratch: Val) -> Val:
    """The largest value v such that the elements >= v (of those >= floor) number, or sum to, at least the target."""
    histogram, some = scratch, scratch + 8 * _BUCKETS
    reached = k.var(k.zero(F64))

    def amount(x: Val) -> Val:
        return x if by_mass else k.lift(1.0, F64)

    _clear(k, histogram, _BUCKETS)
    with k.range(0, n) as i:
        x = k.load(p + (i << 3), F64)
        with k.when(x >= floor):
            _tally(k, histogram, _coarse(k, x), amount(x))
    bucket = _pick(k, histogram, _BUCKETS, 0, reached, target)
    count = k.var(k.i64(0))
    with k.range(0, n) as i:
        x = k.load(p + (i << 3), F64)
        with k.when(k.both(x >= floor, _coarse(k, x).eq(bucket))):
            k.store(x, some + (count.v << 3))
            count.v = count.v + 1
    shift = k.var(k.i64(56))
    with k.loop_while(lambda: shift.v >= 0):
        _clear(k, histogram, 256)
        with k.range(0, count.v) as i:
            x = k.load(some + (i << 3), F64)
            _tally(k, histogram, x.bitcast(I64) >> shift.v & 255, amount(x))
        digit = _pick(k, histogram, 256, 255, reached, target)
        left = k.var(k.i64(0))
        with k.range(0, count.v) as i:
            x = k.load(some + (i << 3), F64)
            with k.when((x.bitcast(I64) >> shift.v & 255).eq(digit)):
                k.store(x, some + (left.v << 3))
                left.v = left.v + 1
        count.v = left.v
        shift.v = shift.v - 8
    return k.load(some, F64)


def _sum_from(k: Kernel, p: Val, n: Val, floor: Val) -> Val:
    """Sum of the values that are at least `floor`."""
    wide, rest = k.var(k.zero(vec(F64, 8))), k.var(k.zero(F64))
    whole = n & -8
    with k.range(0, whole, 8) as i:
        x = k.load(p + (i << 3), vec(F64, 8))
        wide.v = wide.v + k.select(x >= k.splat(floor, 8), x, 0.0)
    with k.range(whole, n) as i:
        x = k.load(p + (i << 3), F64)
        rest.v = rest.v + k.select(x >= floor, x, 0.0)
    return sum_lanes(wide.v) + rest.v


def _draw(k: Kernel, p: Val, n: Val, floor: Val, uniform: Val) -> Val:
    """Inverse CDF over the kept tokens in order of id."""
    target = uniform * _sum_from(k, p, n, floor)
    running, chosen, i = k.var(k.zero(F64)), k.var(k.i64(-1)), k.var(k.i64(0))
    here = k.var(k.i64(0))
    with k.loop_while(lambda: k.both(i.v + BLOCK <= n, here.v.eq(0))):
        reached = running.v + _sum_from(k, p + (i.v << 3), k.i64(BLOCK), floor)
        here.v = k.select(reached > target, k.i64(1), k.i64(0))
        running.v = k.select(reached > target, running.v, reached)
        i.v = k.select(reached > target, i.v, i.v + BLOCK)
    with k.loop_while(lambda: i.v < n):
        x = k.load(p + (i.v << 3), F64)
        with k.when(k.both(x >= floor, x > 0.0)):
            running.v = running.v + x
            chosen.v = i.v
            i.v = k.select(running.v > target, n, i.v)
        i.v = i.v + 1
    with k.when(chosen.v < 0):  # sums in another order came to less than the target: the last one that may be drawn
        with k.range(0, n) as at:
            x = k.load(p + (at << 3), F64)
            chosen.v = k.select(k.both(x >= floor, x > 0.0), at, chosen.v)
    return chosen.v.to(I32)


def sample(size: int) -> KernelDef:
    """Chunk r draws tokens[r] from `size` logits."""

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        n = a.n
        logits = a.logits + chunk * (n << 2)
        row = chunk << 2
        temperature, top_p, min_p, uniform = (
            k.load(at + row, F32).to(F64) for at in (a.temperature, a.top_p, a.min_p, a.uniform)
        )
        top_k = k.load(a.top_k + row, I32).to(I64)
        best, id = best_of(k, logits, n)
        token = k.var(id)
        with k.when(k.both(id >= 0, temperature > 0.0)):
            ids, values, p = scratch, scratch + (n << 2), scratch + (n << 3)
            work = p + (n << 3)
            source, count = k.var(logits), k.var(n)
            with k.when(k.both(n >= 4 * GROUPS, k.both(top_k > 0, top_k <= MOST))):
                bound = _bound(k, logits, n, best.to(F64), top_k, temperature, scratch)
                count.v = _gather(k, logits, n, bound, ids, values)
                source.v = values
            total = _weights(k, source.v, count.v, best.to(F64), temperature, p)
            floor = k.var(min_p)  # of the most probable's weight, 1
            with k.when(k.both(top_k > 0, top_k < n)):
                kth = _select(k, p, count.v, k.zero(F64), top_k.to(F64), False, work)
                floor.v = k.maximum(floor.v, kth)
            with k.when(top_p < 1.0):
                limited = top_k > 0
                least = k.select(limited, floor.v, 0.0)
                whole = k.var(total)
                with k.when(limited):
                    whole.v = _sum_from(k, p, count.v, least)
                edge = _select(k, p, count.v, least, top_p * whole.v, True, work)
                floor.v = k.maximum(floor.v, edge)
            token.v = _draw(k, p, count.v, floor.v, uniform)
            with k.when(source.v.ne(logits)):
                token.v = k.load(ids + (token.v.to(I64) << 2), I32)
        k.store(token.v, a.tokens + row)

    fields = ("logits", "n", "temperature", "top_k", "top_p", "min_p", "uniform", "tokens")
    return KernelDef("sample", fields, body, scratch=24 * size + 8 * _BUCKETS)


def build_sample(e: Lowering, node: Node) -> None:
    names = ("logits", "temperature", "top_k", "top_p", "min_p", "uniform")
    (tokens,) = node.outputs
    e.stage(sample(node.spec.n), tokens, **dict(zip(names, node.inputs, strict=True)), n=node.spec.n, tokens=tokens)


IMPLEMENTATIONS = (Implementation(SAMPLE, "radix select", build_sample),)
