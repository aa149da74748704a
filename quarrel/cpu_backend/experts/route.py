"""Choosing experts: scores, the best ones per token in float64, and tokens gathered by expert."""

from __future__ import annotations

import math

from quarrel.cpu_backend.runtime.abi import Fields, KernelDef
from quarrel.cpu_backend.runtime.ir import F32, F64, I32, I64, Kernel, Val
from quarrel.cpu_backend.runtime.vector import each, exp64, f32s

SMALLEST_SUM = 2.0**-14


def _softmax(k: Kernel, z: Val, p: Val, n: Val) -> None:
    """float64 softmax of n float64 values, from z to p (which may be the same)."""
    top = k.var(k.lift(-math.inf, F64))
    with k.range(0, n) as i:
        top.v = k.maximum(k.load(z + (i << 3), F64), top.v)
    total = k.var(k.lift(0.0, F64))
    with k.range(0, n) as i:
        e = exp64(k, k.load(z + (i << 3), F64) - top.v)
        k.store(e, p + (i << 3))
        total.v = total.v + e
    with k.range(0, n) as i:
        k.store(k.load(p + (i << 3), F64) / total.v, p + (i << 3))


def _sigmoid(k: Kernel, z: Val) -> Val:
    """1 / (1 + e^-z) in float64, through e^-|z|."""
    e = exp64(k, -k.fabs(z))
    return k.select(z >= 0.0, 1.0, e) / (e + 1.0)


def _take_best(k: Kernel, score: Val, n: Val) -> Val:
    """Index of the highest score, the lowest among equals; marks it as chosen."""
    best, at = k.var(k.lift(-math.inf, F64)), k.var(k.i64(-1))
    spare = k.var(k.i64(0))
    with k.range(0, n) as i:
        x = k.load(score + (i << 3), F64)
        better = x > best.v
        at.v = k.select(better, i, at.v)
        best.v = k.select(better, x, best.v)
        # A NaN of its own marks what is chosen: a row of NaN scores still gives different, valid ids.
        spare.v = k.select(k.load(score + (i << 3), I64).ne(_CHOSEN), i, spare.v)
    chosen = k.select(at.v < 0, spare.v, at.v)
    k.store(k.i64(_CHOSEN), score + (chosen << 3))
    return chosen


_CHOSEN = 0x7FF8DEAD00000000


def _drop_groups(k: Kernel, a: Fields, score: Val, work: Val) -> None:
    """Takes the experts of all but the `groups_used` best groups out; a group scores the sum of its two best."""
    size = a.n.udiv(a.groups)
    with k.range(0, a.groups) as g:
        first, second = k.var(k.lift(-math.inf, F64)), k.var(k.lift(-math.inf, F64))
        with k.range(0, size) as i:
            x = k.load(score + (g * size + i << 3), F64)
            beaten = k.minimum(x, first.v)
            first.v = k.maximum(x, first.v)
            second.v = k.maximum(beaten, second.v)
        k.store(first.v + second.v, work + (g << 3))
    kept = work + (a.groups << 3)
    with k.range(0, a.groups) as g:
        k.store(k.i64(0), kept + (g << 3))
    with k.range(0, a.groups_used):
        k.store(k.i64(1), kept + (_take_best(k, work, a.groups) << 3))
    with k.range(0, a.n) as i:
        with k.when(k.load(kept + (i.udiv(size) << 3), I64).eq(0)):
            k.store(k.lift(-math.inf, F64), score + (i << 3))


def route(gate: str, renormalise: bool, biased: bool, grouped: bool, gained: bool, n_experts: int) -> KernelDef:
    """Chunk t: ids and weights of the experts that token t uses."""

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        n, used = a.n, a.used
        p, score, work = scratch, scratch + (n << 3), scratch + (n << 4)
        with k.range(0, n) as i:
            z = k.load(a.logits + (chunk * n + i << 2), F32).to(F64)
            k.store(_sigmoid(k, z) if gate == "sigmoid" else z, p + (i << 3))
        if gate == "softmax":
            _softmax(k, p, p, n)
        with k.range(0, n) as i:
            x = k.load(p + (i << 3), F64)
            k.store(x + k.load(a.bias + (i << 2), F32).to(F64) if biased else x, score + (i << 3))
        if grouped:
            _drop_groups(k, a, score, work)
        ids, weights = (at + (chunk * used << 2) for at in (a.ids, a.weights))
        total = k.var(k.lift(0.0, F64))
        with k.range(0, used) as j:
            expert = _take_best(k, score, n)
            k.store(expert.to(I32), ids + (j << 2))
            k.store(expert.to(I32), a.log + (chunk * a.log_used + j << 2))
            weight = k.load(p + (expert << 3), F64)
            k.store(weight, work + (j << 3))
            total.v = total.v + weight
        if gate == "softmax_topk":
            _softmax(k, work, work, used)
        with k.range(0, used) as j:
            weight = k.load(work + (j << 3), F64)
            if renormalise and gate != "softmax_topk":
                weight = weight / k.maximum(total.v, SMALLEST_SUM)
            if gained:
                expert = k.load(ids + (j << 2), I32).to(I64)
                weight = weight * k.load(a.gains + (expert << 2), F32).to(F64)
            k.store((weight * a.f32("scale").to(F64)).to(F32), weights + (j << 2))

    fields = ("logits", "bias", "gains", "ids", "weights", "log", "log_used", "n", "used", "groups", "groups_used", "scale")
    flags = {"renormalise": renormalise, "bias": biased, "groups": grouped, "gains": gained}
    marks = "".join(f"/{name}" for name, on in flags.items() if on)
    return KernelDef(f"route/{gate}{marks}", fields, body, scratch=40 * n_experts + 64)


def gather() -> KernelDef:
    """One chunk: sorts the entries t * used + j by expert, ids clamped to the experts that there are.

    Writes `first` (of every expert, and the end), `entries`, the experts that have any, and their number.
    """

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        experts, total = a.experts, a.live_rows * a.used

        def expert(i: Val) -> Val:
            return k.minimum(k.maximum(k.load(a.ids + (i << 2), I32).to(I64), 0), experts - 1)

        def bump(at: Val, amount: Val | int) -> Val:
            before = k.load(at, I64)
            k.store(before + amount, at)
            return before

        with k.range(0, experts + 1) as e:
            k.store(k.i64(0), a.first + (e << 3))
        with k.range(0, total) as i:
            bump(a.first + (expert(i) << 3), 1)
        running, active = k.var(k.i64(0)), k.var(k.i64(0))
        with k.range(0, experts) as e:
            count = k.load(a.first + (e << 3), I64)
            k.store(running.v, a.first + (e << 3))
            k.store(running.v, scratch + (e << 3))
            running.v = running.v + count
            with k.when(count > 0):
                k.store(e, a.active + (active.v << 3))
                active.v = active.v + 1
        k.store(running.v, a.first + (experts << 3))
        with k.range(0, total) as i:
            k.store(i, a.entries + (bump(scratch + (expert(i) << 3), 1) << 3))
        k.store(active.v, a.count)

    fields = ("ids", "live_rows", "used", "experts", "first", "entries", "active", "count")
    return KernelDef("route/gather", fields, body, scratch=1 << 16)


def combine(biased: bool) -> KernelDef:
    """Chunk t: out[t] = sum over j of weight[t, j] * (y[t, j] + bias of its expert), in order of j."""

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:

        n, used = a.n, a.used

        def one(offset: Val, lanes: int) -> None:
            type = f32s(lanes)
            total = k.var(k.zero(type))
            with k.range(0, used) as j:
                entry = chunk * used + j
                y = k.load(a.y + entry * (n << 2) + offset, type)
                if biased:
                    expert = k.minimum(k.maximum(k.load(a.ids + (entry << 2), I32).to(I64), 0), a.experts - 1)
                    y = y + k.load(a.bias + expert * (n << 2) + offset, type)
                total.v = k.fma(y, k.lift(k.load(a.weights + (entry << 2), F32), type), total.v)
            k.store(total.v, a.out + chunk * (n << 2) + offset)

        each(k, n, one)

    fields = ("y", "ids", "weights", "bias", "out", "n", "used", "experts")
    return KernelDef(f"route/combine{'/bias' if biased else ''}", fields, body)
