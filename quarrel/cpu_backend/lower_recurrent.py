"""Recurrent mixers as stages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quarrel.cpu_backend import norm, recurrent
from quarrel.cpu_backend.lowering import Lowering
from quarrel.cpu_backend.plan import Arg, Header, Job
from quarrel.ops.contract import Operand, StateRef
from quarrel.ops.program import Node


def _sequence(e: Lowering, operands: Sequence[Operand]) -> dict[str, Arg]:
    """The fields that say which rows and which state belong to a sequence."""
    query_start, kv_len, slots, state = operands
    assert isinstance(state, StateRef)
    places = (e.plan.place(v) for v in (query_start, kv_len, slots))
    held = int(e.states[state.index].ctypes.data)
    return dict(zip(recurrent.SEQUENCE_FIELDS, (*places, held), strict=True))


def conv(e: Lowering, node: Node) -> None:
    p, s = e.plan, node.spec
    x, weight, bias, *rest = node.inputs
    (y,) = node.outputs
    # The kernel reads whole vectors of channels, one row of them per tap.
    taps = np.zeros((s.width + 1, s.channels), np.float32)
    taps[: s.width] = e.weights.dense(weight).T
    p.keep.append(taps)
    parts = -(-s.channels // recurrent.CHANNELS)
    args: dict[str, Arg] = {
        "x": p.place(x),
        "y": p.place(y),
        "taps": int(taps.ctypes.data),
        "bias": e.weights.vector(bias),
        "channels": s.channels,
        "parts": parts,
        **_sequence(e, rest),
    }
    p.stage(Job(recurrent.conv(s.width), args, Header.axis("S"), times=parts))


def scan2(e: Lowering, node: Node) -> None:
    p, s = e.plan, node.spec
    xbc, dt, dt_bias, a, d, *rest = node.inputs
    args: dict[str, Arg] = {
        "xbc": p.place(xbc),
        "dt": p.place(dt),
        **{name: e.weights.vector(ref) for name, ref in (("dt_bias", dt_bias), ("a", a), ("d", d))},
        "y": p.place(node.outputs[0]),
        "heads": s.n_heads,
        "groups": s.n_groups,
        "inner": s.inner,
        "width": s.width,
        **_sequence(e, rest),
    }
    kernel = recurrent.scan2(s.head_dim, s.n_state, s.n_heads // s.n_groups)
    p.stage(Job(kernel, args, Header.axis("S"), times=s.n_heads))


def scan1(e: Lowering, node: Node) -> None:
    p, s = e.plan, node.spec
    x, dt, b, c, a, d, *rest = node.inputs
    parts = -(-s.channels // recurrent.CHANNELS)
    args: dict[str, Arg] = {
        **{name: p.place(v) for name, v in (("x", x), ("dt", dt), ("b", b), ("c", c))},
        "a": e.weights.vector(a),
        "d": e.weights.vector(d),
        "y": p.place(node.outputs[0]),
        "channels": s.channels,
        "parts": parts,
        **_sequence(e, rest),
    }
    p.stage(Job(recurrent.scan1(s.n_state), args, Header.axis("S"), times=parts))


def gated_norm(e: Lowering, node: Node) -> None:
    p, s = e.plan, node.spec
    y, z, gain = node.inputs
    (out,) = node.outputs
    args: dict[str, Arg] = {
        "y": p.place(y),
        "z": p.place(z),
        "gain": e.weights.vector(gain),
        "out": p.place(out),
        "n": s.k,
        "groups": s.groups,
        "eps": float(s.eps),
    }
    p.stage(Job(norm.gated_norm(), args, Header.axis(p.rows(out))))
