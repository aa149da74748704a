"""Recurrent mixers: causal convolution and the selective scans, their state in one slot per sequence.

A chunk is one sequence and one part of the channels; it walks through the sequence's tokens with the state at hand. A
sequence whose tokens are all new starts from zero, whatever its slot holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from quarrel.cpu_backend.elementwise import ACTIVATIONS
from quarrel.cpu_backend.lowering import Field, Lowering
from quarrel.cpu_backend.plan import Header
from quarrel.cpu_backend.runtime.abi import Fields, KernelDef
from quarrel.cpu_backend.runtime.ir import F32, I32, I64, Kernel, Val
from quarrel.cpu_backend.runtime.vector import exp, f32s, sigmoid, softplus, sum_lanes
from quarrel.ops.contract import Operand
from quarrel.ops.delta import DELTA, DeltaSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.ops.state import CONV, SCAN1, SCAN2

SEQUENCE_FIELDS = ("query_start", "kv_len", "state_slots", "state")
CHANNELS = 64
"""Channels of one chunk of the convolution and of the Mamba-1 scan."""


@dataclass(frozen=True)
class Sequence:
    """Rows start .. end - 1 of the step; `fresh` says that nothing came before them; `slot` is its state's number."""

    start: Val
    end: Val
    fresh: Val
    slot: Val

    @classmethod
    def of(cls, k: Kernel, a: Fields, s: Val) -> Sequence:
        at = s << 2
        start, end = (k.load(a.query_start + at, I32, 4 * i).to(I64) for i in range(2))
        known = k.load(a.kv_len + at, I32).to(I64)
        return cls(start, end, known <= end - start, k.load(a.state_slots + at, I32).to(I64))


def _column_parts(k: Kernel, first: Val, last: Val, body, lanes: int = 16) -> None:
    """Calls body(column, lanes) so that columns first .. last - 1 are covered, in vectors and then one by one."""
    c = k.var(first)
    for width in (lanes, 1):
        with k.loop_while(lambda: c.v + width <= last):  # noqa: B023
            body(c.v, width)
            c.v = c.v + width


def conv(width: int, activation: str) -> KernelDef:
    """Chunk (s, part) is sequence s, channels [CHANNELS * part, ...). `taps` is `[width, channels]`."""

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        parts, row = a.parts, a.channels << 2
        seq = Sequence.of(k, a, chunk.udiv(parts))
        first = (chunk - chunk.udiv(parts) * parts) * CHANNELS
        state = a.state + seq.slot * (row * (width - 1))

        def columns(c: Val, lanes: int) -> None:
            type, at = f32s(lanes), c << 2
            taps = [k.load(a.taps + row * j + at, type) for j in range(width)]
            offset = k.load(a.bias + at, type)
            seen = [k.var(k.select(seq.fresh, k.zero(type), k.load(state + row * j + at, type))) for j in range(width - 1)]
            with k.range(seq.start, seq.end) as t:
                x = k.load(a.x + t * row + at, type)
                y = offset
                for past, tap in zip([*(v.v for v in seen), x], taps, strict=True):
                    y = k.fma(past, tap, y)
                k.store(ACTIVATIONS[activation](k, y), a.y + t * row + at)
                for older, newer in zip(seen, [*(v.v for v in seen[1:]), x], strict=True):
                    older.v = newer
            for j, v in enumerate(seen):
                k.store(v.v, state + row * j + at)

        _column_parts(k, first, k.minimum(first + CHANNELS, a.channels), columns)

    fields = ("x", "y", "taps", "bias", "channels", "parts", *SEQUENCE_FIELDS)
    return KernelDef(f"conv/{width}/{activation}", fields, body)


def _state_parts(n_state: int) -> list[tuple[int, int]]:
    """(first state, lanes) of the pieces of one channel's states."""
    whole = n_state & -16
    return [(n, 16) for n in range(0, whole, 16)] + [(n, 1) for n in range(whole, n_state)]


def _total(k: Kernel, parts: list[Val]) -> Val:
    """Sum over all lanes of all pieces, in order."""
    wide = [p for p in parts if p.lanes > 1]
    total = k.f32(0.0)
    if wide:
        together = wide[0]
        for p in wide[1:]:
            together = together + p
        total = sum_lanes(together)
    for p in parts:
        if p.lanes == 1:
            total = total + p
    return total


def _reset_state(k: Kernel, seq: Sequence, state: Val, size: Val) -> None:
    """Zeroes the state of a sequence that starts here."""
    with k.when(seq.fresh), k.range(0, size) as i:
        k.store(k.f32(0.0), state + (i << 2))


def scan2(head_dim: int, n_state: int, per_group: int) -> KernelDef:
    """Mamba-2: chunk (s, h) is sequence s, head h, whose state is `[head_dim, n_state]`."""
    parts = _state_parts(n_state)

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        heads = a.heads
        seq = Sequence.of(k, a, chunk.udiv(heads))
        h = chunk - chunk.udiv(heads) * heads
        state = a.state + (seq.slot * heads + h) * (4 * head_dim * n_state)
        _reset_state(k, seq, state, k.i64(head_dim * n_state))
        group = h.udiv(per_group)
        decay, skip, bias = (k.load(at + (h << 2), F32) for at in (a.a, a.d, a.dt_bias))
        with k.range(seq.start, seq.end) as t:
            row = a.xbc + t * (a.width << 2)
            x = row + h * (4 * head_dim)
            b = row + (a.inner << 2) + group * (4 * n_state)
            c = b + a.groups * (4 * n_state)
            step = softplus(k, k.load(a.dt + (t * heads + h << 2), F32) + bias)
            keep = exp(k, step * decay)
            bs = [k.load(b, f32s(lanes), 4 * n) for n, lanes in parts]
            cs = [k.load(c, f32s(lanes), 4 * n) for n, lanes in parts]
            y = a.y + (t * a.inner + h * head_dim << 2)
            with k.range(0, head_dim) as p:
                value = k.load(x + (p << 2), F32)
                scaled = step * value
                at = state + p * (4 * n_state)
                sums = []
                for (n, lanes), b_n, c_n in zip(parts, bs, cs, strict=True):
                    type = f32s(lanes)
                    s = k.fma(k.load(at, type, 4 * n), k.lift(keep, type), k.lift(scaled, type) * b_n)
                    k.store(s, at, 4 * n)
                    sums.append(s * c_n)
                k.store(k.fma(skip, value, _total(k, sums)), y + (p << 2))

    fields = ("xbc", "dt", "dt_bias", "a", "d", "y", "heads", "groups", "inner", "width", *SEQUENCE_FIELDS)
    return KernelDef(f"scan2/{head_dim}/{n_state}/{per_group}", fields, body)


def scan1(n_state: int) -> KernelDef:
    """Mamba-1: chunk (s, part) is sequence s, channels [CHANNELS * part, ...), each with `n_state` states."""
    parts = _state_parts(n_state)

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        channels = a.channels
        seq = Sequence.of(k, a, chunk.udiv(a.parts))
        first = (chunk - chunk.udiv(a.parts) * a.parts) * CHANNELS
        count = k.minimum(channels - first, CHANNELS)
        state = a.state + (seq.slot * channels + first) * (4 * n_state)
        _reset_state(k, seq, state, count * n_state)
        with k.range(seq.start, seq.end) as t:
            b, c = (at + t * (4 * n_state) for at in (a.b, a.c))
            bs = [k.load(b, f32s(lanes), 4 * n) for n, lanes in parts]
            cs = [k.load(c, f32s(lanes), 4 * n) for n, lanes in parts]
            row = (t * channels + first) << 2

            # All step sizes first, in vectors: one by one they would take longer than the states.
            def sizes(i: Val, lanes: int) -> None:
                k.store(softplus(k, k.load(a.dt + row + (i << 2), f32s(lanes))), scratch + (i << 2))

            _column_parts(k, k.i64(0), count, sizes)
            with k.range(0, count) as i:
                step = k.load(scratch + (i << 2), F32)
                value = k.load(a.x + row + (i << 2), F32)
                decay, at = a.a + (first + i) * (4 * n_state), state + i * (4 * n_state)
                sums = []
                for (n, lanes), b_n, c_n in zip(parts, bs, cs, strict=True):
                    type = f32s(lanes)
                    keep = exp(k, k.lift(step, type) * k.load(decay, type, 4 * n))
                    s = k.fma(k.load(at, type, 4 * n), keep, k.lift(step * value, type) * b_n)
                    k.store(s, at, 4 * n)
                    sums.append(s * c_n)
                skip = k.load(a.d + (first + i << 2), F32)
                k.store(k.fma(skip, value, _total(k, sums)), a.y + row + (i << 2))

    fields = ("x", "dt", "b", "c", "a", "d", "y", "channels", "parts", *SEQUENCE_FIELDS)
    return KernelDef(f"scan1/{n_state}", fields, body, scratch=4 * CHANNELS)


def delta(s: DeltaSpec) -> KernelDef:
    """Gated delta rule: chunk (s, h) is sequence s, value head h, whose state is `[v_dim, k_dim]`.

    A row of the state is read and written once a token: what it predicts for the key and what it gives the query are both
    taken of the decayed row, and the correction's share of the result is its product with q . k.
    """
    parts = _state_parts(s.k_dim)

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        seq = Sequence.of(k, a, chunk.udiv(s.n_v))
        h = chunk - chunk.udiv(s.n_v) * s.n_v
        key = h.udiv(s.n_v // s.n_k) if s.grouped else h - h.udiv(s.n_k) * s.n_k
        state = a.state + (seq.slot * s.n_v + h) * (4 * s.v_dim * s.k_dim)
        _reset_state(k, seq, state, k.i64(s.v_dim * s.k_dim))
        decay, bias = (k.load(at + (h << 2), F32) for at in (a.a, a.dt_bias))

        def loaded(at: Val) -> list[Val]:
            return [k.load(at, f32s(lanes), 4 * n) for n, lanes in parts]

        def product(x: list[Val], y: list[Val]) -> Val:
            return _total(k, [i * j for i, j in zip(x, y, strict=True)])

        def normalised(at: Val, to: Val, scale: float) -> list[Val]:
            x = loaded(at)
            by = k.f32(scale) / k.sqrt(product(x, x) + s.eps)
            x = [v * k.lift(by, v.type) for v in x]
            for v, (n, _) in zip(x, parts, strict=True):
                k.store(v, to, 4 * n)
            return x

        with k.range(seq.start, seq.end) as t:
            row = a.qkv + t * (4 * s.width)
            q = normalised(row + key * (4 * s.k_dim), scratch, s.k_dim**-0.5)
            again = normalised(row + (key + s.n_k) * (4 * s.k_dim), scratch + 4 * s.k_dim, 1.0)
            alike = product(q, again)
            v = row + h * (4 * s.v_dim) + 8 * s.n_k * s.k_dim
            at = t * s.n_v + h << 2
            keep = exp(k, softplus(k, k.load(a.alpha + at, F32) + bias) * decay)
            rate = sigmoid(k, k.load(a.beta + at, F32))
            y = a.y + (t * s.n_v + h) * (4 * s.v_dim)
            with k.range(0, s.v_dim) as p:
                m = state + p * (4 * s.k_dim)
                held = [x * k.lift(keep, x.type) for x in loaded(m)]
                q, again = loaded(scratch), loaded(scratch + 4 * s.k_dim)
                wrong = rate * (k.load(v + (p << 2), F32) - product(held, again))
                k.store(k.fma(wrong, alike, product(held, q)), y + (p << 2))
                for x, direction, (n, _) in zip(held, again, parts, strict=True):
                    k.store(k.fma(k.lift(wrong, x.type), direction, x), m, 4 * n)

    name = f"delta/{s.n_k}/{s.n_v}/{s.k_dim}/{s.v_dim}/{s.eps}{'/grouped' * s.grouped}"
    fields = ("qkv", "alpha", "beta", "dt_bias", "a", "y", *SEQUENCE_FIELDS)
    return KernelDef(name, fields, body, scratch=8 * s.k_dim)


def _sequence(operands: Iterable[Operand]) -> dict[str, Field]:
    """The fields that say which rows and which state belong to a sequence."""
    return dict(zip(SEQUENCE_FIELDS, operands, strict=True))


def build_conv(e: Lowering, node: Node) -> None:
    s, (x, weight, *bias, starts, keys, slots, state), (y,) = node.spec, node.inputs, node.outputs
    # The kernel reads whole vectors of channels, one row of them per tap.
    taps = np.zeros((s.width + 1, s.channels), np.float32)
    taps[: s.width] = e.weights.dense(weight).T
    parts = -(-s.channels // CHANNELS)
    offset = bias[0] if bias else np.zeros(s.channels + 16, np.float32)
    sequence = _sequence((starts, keys, slots, state))
    fields = {"taps": taps, "bias": offset, "channels": s.channels, "parts": parts, **sequence}
    e.stage(conv(s.width, s.activation), Header.axis("S"), times=parts, x=x, y=y, **fields)


def build_scan2(e: Lowering, node: Node) -> None:
    s, (xbc, dt, dt_bias, a, d, *rest), (y,) = node.spec, node.inputs, node.outputs
    kernel = scan2(s.head_dim, s.n_state, s.n_heads // s.n_groups)
    sizes = {"heads": s.n_heads, "groups": s.n_groups, "inner": s.d_inner, "width": s.width}
    fields = {"xbc": xbc, "dt": dt, "dt_bias": dt_bias, "a": a, "d": d, "y": y, **sizes, **_sequence(rest)}
    e.stage(kernel, Header.axis("S"), times=s.n_heads, **fields)


def build_scan1(e: Lowering, node: Node) -> None:
    s, (x, dt, b, c, a, d, *rest), (y,) = node.spec, node.inputs, node.outputs
    parts = -(-s.channels // CHANNELS)
    fields = {"x": x, "dt": dt, "b": b, "c": c, "a": a, "d": d, "y": y, "channels": s.channels, "parts": parts}
    e.stage(scan1(s.n_state), Header.axis("S"), times=parts, **fields, **_sequence(rest))


def build_delta(e: Lowering, node: Node) -> None:
    s, (qkv, alpha, beta, dt_bias, a, *rest), (y,) = node.spec, node.inputs, node.outputs
    fields = {"qkv": qkv, "alpha": alpha, "beta": beta, "dt_bias": dt_bias, "a": a, "y": y, **_sequence(rest)}
    e.stage(delta(s), Header.axis("S"), times=s.n_v, **fields)


IMPLEMENTATIONS = (
    Implementation(CONV, "vector convolution", build_conv),
    Implementation(SCAN2, "sequential scan", build_scan2),
    Implementation(SCAN1, "sequential scan", build_scan1),
    Implementation(DELTA, "sequential rule", build_delta),
)
