"""Drawing tokens, row by row, in float64: the thresholds are found by radix selection, without sorting."""

from __future__ import annotations

import math

from quarrel.cpu_backend.lowering import Lowering
from quarrel.cpu_backend.runtime.abi import Fields, KernelDef
from quarrel.cpu_backend.runtime.ir import F32, F64, I32, I64, Kernel, Val, Var, vec
from quarrel.cpu_backend.runtime.vector import each, exp64, sum_lanes
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.ops.sample import SAMPLE

_BUCKETS = 1024
_COARSE_SHIFT = 48  # sign, exponent and four bits of mantissa: 16 buckets an octave, 64 octaves below 1
_ONE = 0x3FF0


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


def _probabilities(k: Kernel, logits: Val, n: Val, best: Val, temperature: Val, p: Val) -> None:
    """softmax(logits / temperature) as float64 at p; logits that are not finite get 0."""
    wide, rest = k.var(k.zero(vec(F64, 8))), k.var(k.zero(F64))

    def one(offset: Val, lanes: int) -> None:
        x = k.load(logits + offset, vec(F32, lanes))
        y = (x.to(F64) - k.lift(best, vec(F64, lanes))) / k.lift(temperature, vec(F64, lanes))
        e = k.select(k.fabs(x) < math.inf, exp64(k, y), 0.0)
        total: Var = wide if lanes > 1 else rest
        total.v = total.v + e
        k.store(e, p + (offset << 1))

    each(k, n, one, lanes=8)
    total = sum_lanes(wide.v) + rest.v

    def normalise(offset: Val, lanes: int) -> None:
        at = p + (offset << 1)
        k.store(k.load(at, vec(F64, lanes)) / k.lift(total, vec(F64, lanes)), at)

    each(k, n, normalise, lanes=8)


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
    total = k.var(k.zero(F64))
    with k.range(0, n) as i:
        x = k.load(p + (i << 3), F64)
        total.v = k.select(x >= floor, total.v + x, total.v)
    return total.v


def _draw(k: Kernel, p: Val, n: Val, floor: Val, uniform: Val) -> Val:
    """Inverse CDF over the kept tokens in order of id."""
    target = uniform * _sum_from(k, p, n, floor)
    running, chosen, i = k.var(k.zero(F64)), k.var(k.i64(0)), k.var(k.i64(0))
    with k.loop_while(lambda: i.v < n):
        x = k.load(p + (i.v << 3), F64)
        with k.when(k.both(x >= floor, x > 0.0)):
            running.v = running.v + x
            chosen.v = i.v
            i.v = k.select(running.v > target, n, i.v)
        i.v = i.v + 1
    return chosen.v.to(I32)


def sample(n: int) -> KernelDef:
    """Chunk r draws tokens[r]."""

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
            p, work = scratch, scratch + (n << 3)
            _probabilities(k, logits, n, best.to(F64), temperature, p)
            floor = k.var(min_p * k.load(p + (id.to(I64) << 3), F64))
            with k.when(k.both(top_k > 0, top_k < n)):
                kth = _select(k, p, n, k.zero(F64), top_k.to(F64), False, work)
                floor.v = k.maximum(floor.v, kth)
            with k.when(top_p < 1.0):
                limited = top_k > 0
                least = k.select(limited, floor.v, 0.0)
                total = k.var(k.lift(1.0, F64))
                with k.when(limited):
                    total.v = _sum_from(k, p, n, least)
                edge = _select(k, p, n, least, top_p * total.v, True, work)
                floor.v = k.maximum(floor.v, edge)
            token.v = _draw(k, p, n, floor.v, uniform)
        k.store(token.v, a.tokens + row)

    fields = ("logits", "n", "temperature", "top_k", "top_p", "min_p", "uniform", "tokens")
    return KernelDef("sample", fields, body, scratch=16 * n + 8 * _BUCKETS)


def build_sample(e: Lowering, node: Node) -> None:
    names = ("logits", "temperature", "top_k", "top_p", "min_p", "uniform")
    (tokens,) = node.outputs
    e.stage(sample(node.spec.n), tokens, **dict(zip(names, node.inputs, strict=True)), n=node.spec.n, tokens=tokens)


IMPLEMENTATIONS = (Implementation(SAMPLE, "radix select", build_sample),)
