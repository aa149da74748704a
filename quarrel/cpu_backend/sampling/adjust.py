"""Logits with biases and penalties: a row is copied, then the tokens of its list are changed, each once, then masked.

A list is some 64 entries long, so that what is listed twice is found by looking at all pairs.
"""

from __future__ import annotations

import math

from quarrel.cpu_backend.lowering import Lowering
from quarrel.cpu_backend.runtime.abi import Fields, KernelDef
from quarrel.cpu_backend.runtime.ir import F32, I32, I64, Kernel, Val
from quarrel.cpu_backend.runtime.vector import each, f32s
from quarrel.ops.adjust import ADJUST, MOST
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation


def adjust() -> KernelDef:
    """Chunk r is row r. Its list has one entry more, at the end: the token that the row continues, counted once."""

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        at = chunk << 2
        logits, out = a.logits + chunk * (a.n << 2), a.adjusted + chunk * (a.n << 2)
        repetition, presence, frequency = (k.load(field + at, F32) for field in (a.repetition, a.presence, a.frequency))
        before = k.load(a.list_end + (k.maximum(chunk - 1, 0) << 2), I32).to(I64)
        first, end = k.select(chunk > 0, before, 0), k.load(a.list_end + at, I32).to(I64)
        own = k.load(a.ids + (k.load(a.rows + at, I32).to(I64) << 2), I32)

        def copy(offset: Val, lanes: int) -> None:
            x = k.load(logits + offset, f32s(lanes))
            k.store(k.select(k.fabs(x).eq(math.inf), k.f32(-math.inf, lanes), x), out + offset)

        def id_of(entry: Val) -> Val:
            return k.select(entry < end, k.load(a.list_ids + (entry << 2), I32), own)

        each(k, a.n, copy)
        with k.range(first, end + 1) as entry:
            id = id_of(entry)
            times, bias, listed = k.var(k.f32(0.0)), k.var(k.f32(0.0)), k.var(k.lift(0, I32))
            with k.range(first, entry) as other:
                listed.v = k.select(id_of(other).eq(id), k.lift(1, I32), listed.v)
            with k.when(listed.v.eq(0)):
                with k.range(entry, end + 1) as other:
                    with k.when(id_of(other).eq(id)):
                        inside, there = other < end, other << 2
                        times.v = times.v + k.select(inside, k.load(a.list_counts + there, F32), 1.0)
                        bias.v = bias.v + k.select(inside, k.load(a.list_biases + there, F32), 0.0)
                place = out + (id.to(I64) << 2)
                x = k.load(place, F32) + bias.v
                scaled = k.select(x > 0.0, x / repetition, x * repetition)
                less = k.select(scaled > MOST, MOST, scaled) - times.v * frequency - presence
                k.store(k.select(times.v > 0.0, less, x), place)
        chosen = k.load(a.mask_row + at, I32).to(I64)
        with k.when(chosen >= 0):
            mask = a.masks + chosen * (a.words << 2)
            with k.range(0, a.n) as id:
                bits, place = k.load(mask + ((id >> 5) << 2), I32).to(I64), out + (id << 2)
                x = k.load(place, F32)
                forbidden = k.both(((bits >> (id & 31)) & 1).eq(0), x.eq(x))  # a NaN stays one
                k.store(k.select(forbidden, k.f32(-math.inf), x), place)

    lists = ("ids", "rows", "list_end", "list_ids", "list_counts", "list_biases", "repetition", "presence", "frequency")
    return KernelDef("adjust", ("logits", "n", *lists, "mask_row", "masks", "words", "adjusted"), body)


def build_adjust(e: Lowering, node: Node) -> None:
    given = zip((p.name for p in ADJUST.params(node.spec)), node.inputs, strict=True)
    (adjusted,) = node.outputs
    e.stage(adjust(), adjusted, **dict(given), n=node.spec.n, words=node.spec.words, adjusted=adjusted)


IMPLEMENTATIONS = (Implementation(ADJUST, "all pairs of a list", build_adjust),)
