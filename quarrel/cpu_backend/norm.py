"""Normalisation of rows, with the rounding to 8 bits of what follows fused on; and the largest values of rows."""

from __future__ import annotations

from collections.abc import Sequence

from quarrel.cpu_backend.elementwise import silu
from quarrel.cpu_backend.linear.activations import QuantRow, quantize_blocks, row_bytes
from quarrel.cpu_backend.lowering import Field, Lowering
from quarrel.cpu_backend.plan import Arg
from quarrel.cpu_backend.runtime.abi import Fields, KernelDef
from quarrel.cpu_backend.runtime.ir import F32, Kernel, Val, Var
from quarrel.cpu_backend.runtime.vector import F32x16, each, f32s, sum_lanes
from quarrel.ops.activation import LARGEST
from quarrel.ops.contract import Operand, Value
from quarrel.ops.norm import NORM, NormSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.ops.state import GATED_NORM


def sum_of(k: Kernel, x: Val, n: Val, minus: Val | None, square: bool) -> Val:
    """Sum over n values of (x - minus), squared or not."""
    wide, rest = k.var(k.zero(F32x16)), k.var(k.f32(0.0))

    def one(offset: Val, lanes: int) -> None:
        v = k.load(x + offset, f32s(lanes))
        if minus is not None:
            v = v - k.lift(minus, v.type)
        total: Var = wide if lanes > 1 else rest
        total.v = k.fma(v, v, total.v) if square else total.v + v

    each(k, n, one)
    return sum_lanes(wide.v) + rest.v


def norm(kind: str, quantised: bool) -> KernelDef:
    """Chunk t normalises the `groups` runs of `n` values in row t; see the contract for the formulas.

    `quantised` rounds the row to 8 bits at `q` as well as storing it at `y`.
    """

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        n = a.n
        width = n * a.groups
        row = chunk * (width << 2)
        with k.range(0, a.groups) as group:
            x = a.x + row + group * (n << 2)
            y = a.y + row + group * (n << 2)
            count = n.to(F32)
            mean = sum_of(k, x, n, None, square=False) / count if kind == "layer" else None
            power = sum_of(k, x, n, mean, square=True) / count
            inverse = 1.0 / k.sqrt(power + a.f32("eps"))

            def one(offset: Val, lanes: int) -> None:
                v = k.load(x + offset, f32s(lanes))
                if mean is not None:
                    v = v - k.lift(mean, v.type)
                v = v * k.lift(inverse, v.type) * k.load(a.gain + offset, v.type)
                if mean is not None:
                    v = v + k.load(a.bias + offset, v.type)
                k.store(v, y + offset)

            each(k, n, one)
        if quantised:
            p = (width + 255) & -256
            quantize_blocks(k, QuantRow(a.q + chunk * a.q_stride, p), a.y + row, k.i64(0), p >> 5, width)

    fields = ("x", "gain", "bias", "y", "n", "groups", "eps", *(("q", "q_stride") if quantised else ()))
    return KernelDef(f"norm/{kind}{'/q' if quantised else ''}", fields, body)


def gated_norm() -> KernelDef:
    """Chunk t: u = y * silu(z), each of `groups` runs of `n` values divided by sqrt(mean(u^2) + eps), times gain."""

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        n = a.n
        row = chunk * (n * a.groups << 2)
        with k.range(0, a.groups) as group:
            skip = group * (n << 2)
            y, z, out, gain = a.y + row + skip, a.z + row + skip, a.out + row + skip, a.gain + skip

            def gate(offset: Val, lanes: int) -> None:
                type = f32s(lanes)
                k.store(k.load(y + offset, type) * silu(k, k.load(z + offset, type)), out + offset)

            each(k, n, gate)
            power = sum_of(k, out, n, None, square=True) / n.to(F32)
            inverse = 1.0 / k.sqrt(power + a.f32("eps"))

            def divide(offset: Val, lanes: int) -> None:
                type = f32s(lanes)
                u = k.load(out + offset, type) * k.lift(inverse, type)
                k.store(u * k.load(gain + offset, type), out + offset)

            each(k, n, divide)

    return KernelDef("gated_norm", ("y", "z", "gain", "out", "n", "groups", "eps"), body)


def largest() -> KernelDef:
    """Chunk t: y = max(x - mean - deviations * std, 0), row t."""

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        at, count = chunk * (a.n << 2), a.n.to(F32)
        x, y = a.x + at, a.y + at
        mean = sum_of(k, x, a.n, None, square=False) / count
        bound = mean + a.f32("deviations") * k.sqrt(sum_of(k, x, a.n, mean, square=True) / count)

        def one(offset: Val, lanes: int) -> None:
            v = k.load(x + offset, f32s(lanes))
            k.store(k.maximum(k.lift(0.0, v.type), v - k.lift(bound, v.type)), y + offset)

        each(k, a.n, one)

    return KernelDef("largest", ("x", "y", "n", "deviations"), body)


def norm_stage(e: Lowering, x: Value, s: NormSpec, gains: Sequence[Operand], y: Arg, q: Arg | None) -> None:
    """Normalises x into y, and into q rounded to 8 bits."""
    gain, bias = (*gains, None)[:2]
    out: dict[str, Field] = {} if q is None else {"q": q, "q_stride": row_bytes(s.width)}
    kernel = norm(s.kind, q is not None)
    e.stage(kernel, x, x=x, gain=gain, bias=bias, y=y, n=s.k, groups=s.groups, eps=float(s.eps), **out)


def build_norm(e: Lowering, node: Node) -> None:
    x, *gains = node.inputs
    (y,) = node.outputs
    p = e.plan
    norm_stage(e, x, node.spec, gains, p.place(y), p.place(y, "q") if "q" in p.forms.get(y.id, ()) else None)


def build_gated_norm(e: Lowering, node: Node) -> None:
    s, (y, z, gain), (out,) = node.spec, node.inputs, node.outputs
    e.stage(gated_norm(), out, y=y, z=z, gain=gain, out=out, n=s.k, groups=s.groups, eps=float(s.eps))


def build_largest(e: Lowering, node: Node) -> None:
    s, (x,), (y,) = node.spec, node.inputs, node.outputs
    e.stage(largest(), y, x=x, y=y, n=s.n, deviations=float(s.deviations))


IMPLEMENTATIONS = (
    Implementation(NORM, "vector norm", build_norm),
    Implementation(GATED_NORM, "vector norm", build_gated_norm),
    Implementation(LARGEST, "vector sums", build_largest),
)
