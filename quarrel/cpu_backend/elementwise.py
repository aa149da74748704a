"""Ops that look at one value at a time: gated activations, scaled additions, capping, gathering of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quarrel.cpu_backend.abi import Fields, KernelDef
from quarrel.cpu_backend.ir import F32, I32, I64, Kernel, Val, vec
from quarrel.cpu_backend.quantize import QuantRow, quantize_blocks
from quarrel.cpu_backend.vector import erf, sigmoid, tanh

COLUMNS = 1024
"""Columns of one chunk of `gated`: small enough that one row of a feed-forward occupies every thread."""


def each(k: Kernel, n: Val, body: Callable[[Val, int], None], lanes: int = 16) -> None:
    """Calls `body(byte offset, lanes)` for `n` float32 values, vectors first and the rest one by one."""
    whole = n & -lanes
    with k.range(0, whole, lanes) as i:
        body(i << 2, lanes)
    with k.range(whole, n) as i:
        body(i << 2, 1)


def f32s(lanes: int) -> Any:
    return vec(F32, lanes)


def silu(k: Kernel, x: Val) -> Val:
    """x * sigmoid(x)."""
    return x * sigmoid(k, x)


def gelu_tanh(k: Kernel, x: Val) -> Val:
    """x/2 * (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), written as x * sigmoid of twice the argument: no cancellation."""
    inner = k.fma(x * x * x, 0.044715, x) * 1.5957691216057308
    return x * sigmoid(k, inner)


ACTIVATIONS: dict[str, Callable[[Kernel, Val], Val]] = {"silu": silu, "gelu_tanh": gelu_tanh}


def gated(activation: str, quantised: bool) -> KernelDef:
    """y = f(gate) * up by chunks of COLUMNS columns, row after row; `quantised` also rounds the result to 8 bits."""
    f = ACTIVATIONS[activation]

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        row, column = chunk // a.per_row, chunk % a.per_row * COLUMNS
        n = k.minimum(k.i64(COLUMNS), a.n - column)
        at = (row * a.n + column) << 2
        gate, up = a.gate + at, a.up + at
        out = scratch if quantised else a.y + at

        def one(offset: Val, lanes: int) -> None:
            y = f(k, k.load(gate + offset, f32s(lanes))) * k.load(up + offset, f32s(lanes))
            k.store(y, out + offset)

        each(k, n, one)
        if quantised:
            p = (a.n + 255) & -256
            last = k.minimum(column + COLUMNS, p) >> 5
            quantize_blocks(k, QuantRow(a.q + row * a.q_stride, p), out, column >> 5, last, a.n)

    fields = ("gate", "up", "n", "per_row", *(("q", "q_stride") if quantised else ("y",)))
    return KernelDef(f"gated/{activation}{'/q' if quantised else ''}", fields, body, scratch=4 * COLUMNS + 64)


def relu2(k: Kernel, x: Val) -> Val:
    """max(x, 0)^2."""
    x = k.maximum(x, 0.0)
    return x * x


def gelu_erf(k: Kernel, x: Val) -> Val:
    """x/2 * (1 + erf(x / sqrt 2))."""
    return x * 0.5 * (erf(k, x * 0.7071067811865476) + 1.0)


PLAIN: dict[str, Callable[[Kernel, Val], Val]] = {"relu2": relu2, "gelu_erf": gelu_erf}


def plain(activation: str) -> KernelDef:
    """y = f(x) by chunks of COLUMNS columns, row after row."""

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        row, column = chunk // a.per_row, chunk % a.per_row * COLUMNS
        at = (row * a.n + column) << 2

        def one(offset: Val, lanes: int) -> None:
            k.store(PLAIN[activation](k, k.load(a.x + at + offset, f32s(lanes))), a.y + at + offset)

        each(k, k.minimum(k.i64(COLUMNS), a.n - column), one)

    return KernelDef(f"plain/{activation}", ("x", "y", "n", "per_row"), body)


def add_row() -> KernelDef:
    """Chunk t: y[t] = x[t] + row."""

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        at = chunk * (a.n << 2)

        def one(offset: Val, lanes: int) -> None:
            type = f32s(lanes)
            k.store(k.load(a.x + at + offset, type) + k.load(a.row + offset, type), a.y + at + offset)

        each(k, a.n, one)

    return KernelDef("add_row", ("x", "row", "y", "n"), body)


def add() -> KernelDef:
    """Chunk t: y = a + scale * b, row t."""

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        at = chunk * (a.n << 2)
        scale = a.f32("scale")

        def one(offset: Val, lanes: int) -> None:
            at_lanes = f32s(lanes)
            y = k.load(a.a + at + offset, at_lanes) + k.lift(scale, at_lanes) * k.load(a.b + at + offset, at_lanes)
            k.store(y, a.y + at + offset)

        each(k, a.n, one)

    return KernelDef("add", ("a", "b", "y", "n", "scale"), body)


def cap(limited: bool) -> KernelDef:
    """Chunk t: y = limit * tanh(scale * x / limit), or scale * x."""

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        at = chunk * (a.n << 2)
        scale, limit = a.f32("scale"), a.f32("limit")

        def one(offset: Val, lanes: int) -> None:
            type = f32s(lanes)
            x = k.load(a.x + at + offset, type) * k.lift(scale, type)
            y = tanh(k, x / k.lift(limit, type)) * k.lift(limit, type) if limited else x
            k.store(y, a.y + at + offset)

        each(k, a.n, one)

    return KernelDef(f"cap{'/limited' if limited else ''}", ("x", "y", "n", "scale", "limit"), body)


def mean_rows() -> KernelDef:
    """Chunk s: y[s] = the mean of rows starts[s] to starts[s + 1] of x."""

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        width, at = a.n << 2, a.starts + (chunk << 2)
        begin, end = k.load(at, I32).to(I64), k.load(at + 4, I32).to(I64)
        y = a.y + chunk * width
        each(k, a.n, lambda o, lanes: k.store(k.lift(0.0, f32s(lanes)), y + o))
        with k.range(begin, end) as row:
            x = a.x + row * width
            each(k, a.n, lambda o, lanes: k.store(k.load(y + o, f32s(lanes)) + k.load(x + o, f32s(lanes)), y + o))
        count = k.maximum(end - begin, 1).to(F32)
        each(k, a.n, lambda o, lanes: k.store(k.load(y + o, f32s(lanes)) / k.lift(count, f32s(lanes)), y + o))

    return KernelDef("mean_rows", ("x", "starts", "y", "n"), body)


def gather_rows() -> KernelDef:
    """Chunk r: y[r] = x[rows[r]]."""

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        width = a.n << 2
        source = a.x + k.load(a.rows + (chunk << 2), I32).to(I64) * width
        each(k, a.n, lambda o, lanes: k.store(k.load(source + o, f32s(lanes)), a.y + chunk * width + o))

    return KernelDef("gather_rows", ("x", "rows", "y", "n"), body)
