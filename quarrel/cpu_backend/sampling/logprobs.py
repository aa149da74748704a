"""The log probabilities of a drawn token and of the best of its row: float64 sums, and a short list kept in order.

An entry of the list is one whole number, the rank of a logit above what its id lacks of the largest: the highest is the
best, and of equals the one of the lowest id. Sixteen logits at a time are compared with the last of the list before any is
looked at.
"""

from __future__ import annotations

import math

from quarrel.cpu_backend.lowering import Lowering
from quarrel.cpu_backend.runtime.abi import Fields, KernelDef
from quarrel.cpu_backend.runtime.ir import F32, F64, I32, I64, Kernel, Val, vec
from quarrel.cpu_backend.runtime.vector import each, exp64, log1p, sum_lanes
from quarrel.cpu_backend.sampling.sample import best_of
from quarrel.ops.logprobs import LOGPROBS
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation

_LAST_ID = (1 << 31) - 1


def _log(k: Kernel, x: Val) -> Val:
    """log x for a finite float64 of at least 1, to 1e-10."""
    bits = x.bitcast(I64)
    mantissa = (bits & (1 << 52) - 1 | 1023 << 52).bitcast(F64)
    return ((bits >> 52) - 1023).to(F64) * math.log(2.0) + log1p(k, mantissa - 1.0)


def _total(k: Kernel, logits: Val, n: Val, best: Val) -> Val:
    """log of the sum of exp(logit - best)."""
    wide, rest = k.var(k.zero(vec(F64, 8))), k.var(k.zero(F64))

    def one(offset: Val, lanes: int) -> None:
        x = k.load(logits + offset, vec(F32, lanes))
        e = exp64(k, x.to(F64) - k.lift(best, vec(F64, lanes)))
        total = wide if lanes > 1 else rest
        total.v = total.v + k.select(k.fabs(x) < math.inf, e, 0.0)

    each(k, n, one, lanes=8)
    return _log(k, sum_lanes(wide.v) + rest.v)


def _entry(k: Kernel, x: Val, id: Val) -> Val:
    """Of a logit that is no NaN; never 0, which stands for none."""
    x = k.select(x.eq(0.0), 0.0, k.select(x < math.inf, x, -math.inf))
    bits = x.bitcast(I32).to(I64, unsigned=True)
    rank = k.select(bits < 1 << 31, bits + (1 << 31), k.lift((1 << 32) - 1, I64) - bits)
    return (rank << 31) + _LAST_ID - id


def _id_of(entry: Val) -> Val:
    return entry & _LAST_ID ^ _LAST_ID


def _list_best(k: Kernel, logits: Val, n: Val, top: Val, entries: Val) -> None:
    """The `top` highest entries of a row without NaN, in order."""
    with k.range(0, top) as j:
        k.store(k.i64(0), entries + (j << 3))
    last = entries + (top - 1 << 3)
    edge = k.var(k.f32(-math.inf))

    def take(offset: Val) -> None:
        entry = _entry(k, k.load(logits + offset, F32), offset >> 2)
        with k.when(entry > k.load(last, I64)):
            at = k.var(last)
            with k.loop_while(lambda: k.both(at.v > entries, k.load(k.maximum(at.v - 8, entries), I64) < entry)):
                k.store(k.load(at.v - 8, I64), at.v)
                at.v = at.v - 8
            k.store(entry, at.v)
            lowest = k.load(last, I64)
            with k.when(lowest.ne(0)):
                x = k.load(logits + (_id_of(lowest) << 2), F32)
                edge.v = k.select(x < math.inf, x, -math.inf)

    def one(offset: Val, lanes: int) -> None:
        if lanes == 1:
            take(offset)
            return
        x = k.load(logits + offset, vec(F32, lanes))
        reach = sum_lanes(k.select(x >= k.lift(edge.v, x.type), k.f32(1.0, lanes), 0.0))
        with k.when(reach > 0.0):
            with k.range(0, lanes) as lane:
                take(offset + (lane << 2))

    each(k, n, one)


def logprobs(top: int) -> KernelDef:
    """Chunk r: the log probability of token r, and of the best ones of its row."""

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        n, top = a.n, a.top
        logits = a.logits + chunk * (n << 2)
        out, ids = a.logprobs + chunk * (top + 1 << 2), a.best + chunk * (top << 2)
        token = k.load(a.tokens + (chunk << 2), I32).to(I64)
        with k.either(token < 0) as (none, some):
            with none:
                k.store(k.f32(-math.inf), out)
                with k.range(0, top) as j:
                    k.store(k.lift(0, I32), ids + (j << 2))
                    k.store(k.f32(-math.inf), out + (j + 1 << 2))
            with some:
                highest = best_of(k, logits, n)[0].to(F64)
                total = _total(k, logits, n, highest)

                def store(id: Val, place: Val) -> None:
                    x = k.load(logits + (id << 2), F32)
                    x = k.select(x < math.inf, x, -math.inf)
                    k.store((x.to(F64) - highest - total).to(F32), out + (place << 2))

                store(token, k.i64(0))
                _list_best(k, logits, n, top, scratch)
                with k.range(0, top) as j:
                    id = _id_of(k.load(scratch + (j << 3), I64))
                    k.store(id.to(I32), ids + (j << 2))
                    store(id, j + 1)

    return KernelDef("logprobs", ("logits", "tokens", "n", "top", "logprobs", "best"), body, scratch=8 * top)


def build_logprobs(e: Lowering, node: Node) -> None:
    s, (logits, tokens), (values, best) = node.spec, node.inputs, node.outputs
    e.stage(logprobs(s.top), values, logits=logits, tokens=tokens, logprobs=values, best=best, n=s.n, top=s.top)


IMPLEMENTATIONS = (Implementation(LOGPROBS, "short list", build_logprobs),)
