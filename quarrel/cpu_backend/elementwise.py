"""Ops that look at one value at a time: gated activations, scaled additions, capping, rows gathered and embedded."""

from __future__ import annotations

from collections.abc import Callable

from quarrel.cpu_backend.formats.dequantize import dequantize_row
from quarrel.cpu_backend.formats.table import BLOCKS
from quarrel.cpu_backend.linear.activations import QuantRow, padded, quantize_blocks, row_bytes
from quarrel.cpu_backend.lowering import Field, Lowering
from quarrel.cpu_backend.runtime.abi import Fields, KernelDef
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import F32, I32, I64, Kernel, Val
from quarrel.cpu_backend.runtime.vector import each, f32s, normal_tail, sigmoid, tanh
from quarrel.ops.activation import CAP, CLAMP, GATED, PLAIN, GatedSpec
from quarrel.ops.contract import Value
from quarrel.ops.embedding import EMBEDDING, GATHER_ROWS, PUT_ROWS
from quarrel.ops.encode import ADD_ROW, MEAN_ROWS
from quarrel.ops.linear import ADD
from quarrel.ops.position import BY_POSITION
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation

COLUMNS = 1024
"""Columns of one chunk of `gated`: small enough that one row of a feed-forward occupies every thread."""


def silu(k: Kernel, x: Val) -> Val:
    """x * sigmoid(x)."""
    return x * sigmoid(k, x)


def gelu_tanh(k: Kernel, x: Val) -> Val:
    """x/2 * (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), written as x * sigmoid of twice the argument: no cancellation."""
    argument = k.fma(x * x * x, 0.044715, x) * 1.5957691216057308
    return x * sigmoid(k, argument)


def identity(k: Kernel, x: Val) -> Val:
    """x."""
    return x


def gelu_erf(k: Kernel, x: Val) -> Val:
    """x/2 * (1 + erf(x / sqrt 2)), by the normal distribution's tail: no cancellation."""
    above = normal_tail(k, k.fabs(x))
    return x * k.select(x < 0.0, above, 1.0 - above)


ACTIVATIONS: dict[str, Callable[[Kernel, Val], Val]] = {
    "silu": silu,
    "gelu_tanh": gelu_tanh,
    "gelu_erf": gelu_erf,
    "sigmoid": sigmoid,
    "identity": identity,
}


def gated(activation: str, quantised: bool, one_gate: bool) -> KernelDef:
    """y = f(gate) * up by chunks of COLUMNS columns, row after row; `quantised` also rounds the result to 8 bits.

    one_gate: a gate for a whole row. Field `start`: column of up that is the first one here.
    """
    f = ACTIVATIONS[activation]

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        row, column = chunk // a.per_row, chunk % a.per_row * COLUMNS
        n = k.minimum(k.i64(COLUMNS), a.n - column)
        at = (row * a.n + column) << 2
        gate, up = a.gate + ((row << 2) if one_gate else at), a.up + (row * a.up_width + a.start + column << 2)
        rate = f(k, k.load(gate, F32)) if one_gate else None
        out = scratch if quantised else a.y + at

        def one(offset: Val, lanes: int) -> None:
            type = f32s(lanes)
            factor = f(k, k.load(gate + offset, type)) if rate is None else k.lift(rate, type)
            k.store(factor * k.load(up + offset, type), out + offset)

        each(k, n, one)
        if quantised:
            p = (a.n + 255) & -256
            last = k.minimum(column + COLUMNS, p) >> 5
            quantize_blocks(k, QuantRow(a.q + row * a.q_stride, p), out, column >> 5, last, a.n)

    fields = ("gate", "up", "up_width", "start", "n", "per_row", *(("q", "q_stride") if quantised else ("y",)))
    name = f"gated/{activation}{'/q' * quantised}{'/row' * one_gate}"
    return KernelDef(name, fields, body, scratch=4 * COLUMNS + 64)


def relu2(k: Kernel, x: Val) -> Val:
    """max(x, 0)^2; a NaN stays one, as in every activation."""
    x = k.maximum(k.lift(0.0, x.type), x)
    return x * x


def gelu_quick(k: Kernel, x: Val) -> Val:
    """x * sigmoid(1.702 x)."""
    return x * sigmoid(k, x * 1.702)


FUNCTIONS: dict[str, Callable[[Kernel, Val], Val]] = {
    "relu2": relu2,
    "gelu_erf": gelu_erf,
    "gelu_tanh": gelu_tanh,
    "gelu_quick": gelu_quick,
}


def plain(activation: str) -> KernelDef:
    """y = f(x) by chunks of COLUMNS columns, row after row."""

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        row, column = chunk // a.per_row, chunk % a.per_row * COLUMNS
        at = (row * a.n + column) << 2

        def one(offset: Val, lanes: int) -> None:
            k.store(FUNCTIONS[activation](k, k.load(a.x + at + offset, f32s(lanes))), a.y + at + offset)

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
            type = f32s(lanes)
            y = k.load(a.a + at + offset, type) + k.lift(scale, type) * k.load(a.b + at + offset, type)
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


def clamp() -> KernelDef:
    """Chunk t: y = min(max(x, low), high), row t."""

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        at = chunk * (a.n << 2)
        low, high = a.f32("low"), a.f32("high")

        def one(offset: Val, lanes: int) -> None:
            type = f32s(lanes)
            x = k.maximum(k.lift(low, type), k.load(a.x + at + offset, type))
            k.store(k.minimum(k.lift(high, type), x), a.y + at + offset)

        each(k, a.n, one)

    return KernelDef("clamp", ("x", "y", "n", "low", "high"), body)


def by_position() -> KernelDef:
    """Chunk t: y[t] = factors[min((positions[t] + shift) / size, n - 1)]."""

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        at = chunk << 2
        part = (k.load(a.positions + at, I32).to(I64) + a.shift).udiv(a.size)
        k.store(k.load(a.factors + (k.minimum(part, a.n - 1) << 2), F32), a.y + at)

    return KernelDef("by_position", ("positions", "factors", "y", "n", "size", "shift"), body)


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
    """Chunk r: y[r] = x[rows[r]], `width` values of rows of n."""

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        source, y = a.x + k.load(a.rows + (chunk << 2), I32).to(I64) * (a.n << 2), a.y + chunk * (a.width << 2)
        each(k, a.width, lambda o, lanes: k.store(k.load(source + o, f32s(lanes)), y + o))

    return KernelDef("gather_rows", ("x", "rows", "y", "n", "width"), body)


def gather_means(count: int) -> KernelDef:
    """Chunk r: y[r] = the mean of so many rows from x[rows[r]] on."""

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        source, y = a.x + k.load(a.rows + (chunk << 2), I32).to(I64) * (a.n << 2), a.y + chunk * (a.n << 2)

        def one(offset: Val, lanes: int) -> None:
            total = k.var(k.lift(0.0, f32s(lanes)))
            with k.range(0, count) as row:
                total.v = total.v + k.load(source + row * (a.n << 2) + offset, f32s(lanes))
            k.store(total.v * k.lift(1.0 / count, f32s(lanes)), y + offset)

        each(k, a.n, one)

    return KernelDef(f"gather_means/{count}", ("x", "rows", "y", "n"), body)


def put_rows(added: bool) -> KernelDef:
    """Chunk t: y[t] = x[t], with the source's row rows[t] in its place or on top of it where that is not below 0."""

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        row, at = k.load(a.rows + (chunk << 2), I32).to(I64), chunk * (a.n << 2)
        put = row >= 0
        source = a.source + (k.maximum(row, 0) * a.width + a.first << 2)

        def one(offset: Val, lanes: int) -> None:
            x, new = (k.load(p + offset, f32s(lanes)) for p in (a.x + at, source))
            k.store(k.select(put, x + new if added else new, x), a.y + at + offset)

        each(k, a.n, one)

    return KernelDef(f"put_rows{'/add' * added}", ("x", "rows", "source", "y", "n", "width", "first"), body)


def embedding(name: str, level: Level, n: int) -> KernelDef:
    """Chunk t: y[t] = scale * W[ids[t]]."""
    tail = name in BLOCKS and n % 256 != 0

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        row = a.w + k.load(a.ids + (chunk << 2), I32).to(I64) * a.row_bytes
        dequantize_row(k, level, name, row, scratch, a.n, tail)
        y, scale = a.y + chunk * (a.n << 2), a.f32("scale")
        each(k, a.n, lambda o, lanes: k.store(k.load(scratch + o, f32s(lanes)) * k.lift(scale, f32s(lanes)), y + o))

    fields = ("ids", "w", "y", "n", "row_bytes", "scale")
    return KernelDef(f"embedding/{name}{'/tail' if tail else ''}", fields, body, scratch=4 * (n + 256))


def gated_stage(e: Lowering, s: GatedSpec, gate: Field, up: Field, y: Value) -> None:
    """y = f(gate) * up, in the form that y's readers want."""
    p = e.plan
    quantized = p.forms.get(y.id, {"f32"}) == {"q"}
    # Padding columns belong to the last chunk, so the chunks cover the padded width.
    per_row = -(-(padded(s.n) if quantized else s.n) // COLUMNS)
    out: dict[str, Field] = {"q": p.place(y, "q"), "q_stride": row_bytes(s.n)} if quantized else {"y": y}
    sizes = {"n": s.n, "per_row": per_row, "up_width": s.up_width, "start": s.start}
    kernel = gated(s.activation, quantized, s.per_row)
    e.stage(kernel, y, times=per_row, gate=gate, up=up, **sizes, **out)


def build_gated(e: Lowering, node: Node) -> None:
    gate, up = node.inputs
    gated_stage(e, node.spec, gate, up, node.outputs[0])


def build_plain(e: Lowering, node: Node) -> None:
    s, (x,), (y,) = node.spec, node.inputs, node.outputs
    per_row = -(-s.n // COLUMNS)
    e.stage(plain(s.activation), y, times=per_row, x=x, y=y, n=s.n, per_row=per_row)


def build_add(e: Lowering, node: Node) -> None:
    s, (a, b), (y,) = node.spec, node.inputs, node.outputs
    e.stage(add(), y, a=a, b=b, y=y, n=s.n, scale=float(s.scale))


def build_add_row(e: Lowering, node: Node) -> None:
    (x, row), (y,) = node.inputs, node.outputs
    e.stage(add_row(), y, x=x, row=row, y=y, n=node.spec.n)


def build_cap(e: Lowering, node: Node) -> None:
    s, (x,), (y,) = node.spec, node.inputs, node.outputs
    e.stage(cap(s.cap != 0.0), y, x=x, y=y, n=s.n, scale=float(s.scale), limit=float(s.cap))


def build_clamp(e: Lowering, node: Node) -> None:
    s, (x,), (y,) = node.spec, node.inputs, node.outputs
    e.stage(clamp(), y, x=x, y=y, n=s.n, low=float(s.low), high=float(s.high))


def build_mean_rows(e: Lowering, node: Node) -> None:
    (x, starts), (y,) = node.inputs, node.outputs
    e.stage(mean_rows(), y, x=x, starts=starts, y=y, n=node.spec.k)


def build_by_position(e: Lowering, node: Node) -> None:
    s, (positions, factors), (y,) = node.spec, node.inputs, node.outputs
    e.stage(by_position(), y, positions=positions, factors=factors, y=y, n=s.n, size=s.size, shift=s.shift)


def build_gather_rows(e: Lowering, node: Node) -> None:
    s, (x, rows), (y,) = node.spec, node.inputs, node.outputs
    if s.mean:
        e.stage(gather_means(s.n), y, x=x, rows=rows, y=y, n=s.k)
    else:
        e.stage(gather_rows(), y, x=x, rows=rows, y=y, n=s.k, width=s.width)


def build_put_rows(e: Lowering, node: Node) -> None:
    s, (x, rows, source), (y,) = node.spec, node.inputs, node.outputs
    e.stage(put_rows(s.add), y, x=x, rows=rows, source=source, y=y, n=s.k, width=s.width, first=s.start)


def build_embedding(e: Lowering, node: Node) -> None:
    (ids, weight), (y,) = node.inputs, node.outputs
    w = e.weights.matrix(weight)
    kernel = embedding(w.type, e.plan.level, w.k)
    e.stage(kernel, y, ids=ids, w=w.address, y=y, n=w.k, row_bytes=w.row_bytes, scale=float(node.spec.scale))


IMPLEMENTATIONS = (
    Implementation(EMBEDDING, "dequantize rows", build_embedding),
    Implementation(GATHER_ROWS, "copy rows", build_gather_rows),
    Implementation(PUT_ROWS, "copy rows", build_put_rows),
    Implementation(GATED, "vector gate", build_gated),
    Implementation(PLAIN, "vector function", build_plain),
    Implementation(ADD, "vector add", build_add),
    Implementation(ADD_ROW, "vector add", build_add_row),
    Implementation(CAP, "vector cap", build_cap),
    Implementation(CLAMP, "vector clamp", build_clamp),
    Implementation(MEAN_ROWS, "vector sums", build_mean_rows),
    Implementation(BY_POSITION, "table", build_by_position),
)
