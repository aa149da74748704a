"""Rows of several residual streams (`ops/streams.py`): a chunk is a row."""

from __future__ import annotations

from functools import partial

from quarrel.cpu_backend.lowering import Lowering
from quarrel.cpu_backend.norm import sum_of
from quarrel.cpu_backend.runtime.abi import Fields, KernelDef
from quarrel.cpu_backend.runtime.ir import F32, Kernel, Val
from quarrel.cpu_backend.runtime.vector import each, f32s
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.ops.streams import MATCH_STREAMS, MIX_STREAMS, PICK_STREAMS, MatchSpec, MixSpec, PickSpec


def pick(s: PickSpec) -> KernelDef:
    """y[j] = x[first + j] * gain."""

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        x, y = a.x + chunk * (4 * s.width) + 4 * s.n * s.first, a.y + chunk * (4 * s.out_width)
        with k.range(0, s.count) as stream:
            at = stream * (4 * s.n)

            def one(offset: Val, lanes: int) -> None:
                v = k.load(x + at + offset, f32s(lanes))
                k.store(v * k.load(a.gain + offset, v.type), y + at + offset)

            each(k, k.i64(s.n), one)

    return KernelDef(f"pick_streams/{s}", ("x", "gain", "y"), body)


def mix(s: MixSpec) -> KernelDef:
    """y[j] = base[j] + sum over i of (coefs[j, i] + offset) * x[i]; base[j] for j < first."""

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        base, y = (array + chunk * (4 * s.width) for array in (a.base, a.y))
        x = a.x + chunk * (4 * s.in_width)

        def one(j: int, by: list[Val], offset: Val, lanes: int) -> None:
            v = k.load(base + 4 * s.n * j + offset, f32s(lanes))
            for i, factor in enumerate(by):
                v = k.fma(k.lift(factor, v.type), k.load(x + 4 * s.n * i + offset, v.type), v)
            k.store(v, y + 4 * s.n * j + offset)

        for j in range(s.streams):
            by = [k.f32(s.offset)] * s.inputs
            if s.coefs:
                row = a.coefs + chunk * (4 * s.pairs) + 4 * s.inputs * j
                by = [factor + k.load(row, F32, 4 * i) for i, factor in enumerate(by)]
            each(k, k.i64(s.n), partial(one, j, by if j >= s.first else []))

    return KernelDef(f"mix_streams/{s}", ("base", "x", "y", *(("coefs",) if s.coefs else ())), body)


def match(s: MatchSpec) -> KernelDef:
    """Each stream of x times rms(ref) / rms of itself, behind ref or averaged with it."""

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        n, count = k.i64(s.n), k.f32(s.n)
        ref, x = a.ref + chunk * (4 * s.n), a.x + chunk * (4 * s.rest)
        power = sum_of(k, ref, n, None, square=True) / count
        by = []
        for j in range(s.streams - 1):
            own = sum_of(k, x + 4 * s.n * j, n, None, square=True) / count
            by.append(k.sqrt(power / k.maximum(k.f32(s.least), own)))
        y = a.y + chunk * (4 * s.out_width)

        def one(offset: Val, lanes: int) -> None:
            total = k.load(ref + offset, f32s(lanes))
            if not s.mean:
                k.store(total, y + offset)
            for j, factor in enumerate(by):
                v = k.load(x + 4 * s.n * j + offset, total.type) * k.lift(factor, total.type)
                if s.mean:
                    total = total + v
                else:
                    k.store(v, y + 4 * s.n * (j + 1) + offset)
            if s.mean:
                k.store(total * (1.0 / s.streams), y + offset)

        each(k, n, one)

    return KernelDef(f"match_streams/{s}", ("ref", "x", "y"), body)


def build_pick(e: Lowering, node: Node) -> None:
    (x, gain), (y,) = node.inputs, node.outputs
    e.stage(pick(node.spec), y, x=x, gain=gain, y=y)


def build_mix(e: Lowering, node: Node) -> None:
    (base, x, *coefs), (y,) = node.inputs, node.outputs
    e.stage(mix(node.spec), y, base=base, x=x, y=y, **dict(zip(("coefs",), coefs)))


def build_match(e: Lowering, node: Node) -> None:
    (ref, x), (y,) = node.inputs, node.outputs
    e.stage(match(node.spec), y, ref=ref, x=x, y=y)


IMPLEMENTATIONS = (
    Implementation(PICK_STREAMS, "vector copy", build_pick),
    Implementation(MIX_STREAMS, "vector sums", build_mix),
    Implementation(MATCH_STREAMS, "vector norms", build_match),
)
