"""Routing and experts as stages: choose, gather tokens by expert, multiply, combine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quarrel.cpu_backend import experts as kernels
from quarrel.cpu_backend import route as route_kernels
from quarrel.cpu_backend.float_linear import ROWS
from quarrel.cpu_backend.formats import BLOCKS
from quarrel.cpu_backend.lowering import Lowering, guided_bounds
from quarrel.cpu_backend.plan import Arg, Header, Job, Live
from quarrel.cpu_backend.quantize import padded, row_bytes
from quarrel.cpu_backend.tile import LANES, shapes
from quarrel.cpu_backend.weights import Packed
from quarrel.ops.contract import Value, WeightRef
from quarrel.ops.moe import ExpertDownSpec, ExpertUpSpec
from quarrel.ops.program import Node


def route(e: Lowering, node: Node) -> None:
    p, s = e.plan, node.spec
    logits, *bias = node.inputs
    ids, weights = node.outputs
    args: dict[str, Arg] = {
        "logits": p.place(logits),
        "bias": e.weights.vector(bias[0]) if bias else 0,
        "ids": p.place(ids),
        "weights": p.place(weights),
        "log": e.choices.begin(node.path),
        "log_used": e.choices.used,
        "n": s.n_experts,
        "used": s.used,
        "groups": s.n_groups,
        "groups_used": s.groups_used,
        "scale": float(s.scale),
    }
    kernel = route_kernels.route(s.gate, s.renormalise, s.bias, s.n_groups > 1, s.n_experts)
    p.stage(Job(kernel, args, Header.axis(p.rows(ids))))


def _gathered(e: Lowering, ids: Value, s: ExpertUpSpec | ExpertDownSpec, rows: int) -> tuple[Mapping[str, Arg], int]:
    """The entries by expert: fields that a product reads, and the header word that counts active experts.

    `rows` is the header word that says how many tokens take part.
    """
    p = e.plan
    known = e.gathered.get((ids.id, rows))
    if known is None:
        lists = {
            "first": np.zeros(s.n_experts + 1, np.int64),
            "entries": np.zeros(p.sizes["T"] * s.used, np.int64),
            "active": np.zeros(s.n_experts, np.int64),
        }
        p.keep.append(lists)
        addresses: dict[str, Arg] = {name: int(array.ctypes.data) for name, array in lists.items()}
        word = p.header.new()
        args = {
            **addresses,
            "ids": p.place(ids),
            "live_rows": Live(rows),
            "used": s.used,
            "experts": s.n_experts,
            "count": p.header.address(word),
        }
        p.shared_stage(ids, Job(route_kernels.gather(), args, Header.ONE))
        known = e.gathered[ids.id, rows] = (addresses, word)
    return known


def _products(
    e: Lowering,
    x: Value,
    ids: Value,
    s: Any,
    weight: WeightRef,
    bias: WeightRef | None,
    y: Arg,
    shared: int,
    residual: Arg = 0,
) -> list[Job]:
    """y[entry] = the entry's expert's rows times its x; `shared` entries of a token read one row of x."""
    p, w = e.plan, e.weights.matrix(weight)
    common: dict[str, Arg] = {
        "w": w.address,
        "n": s.n,
        "row_bytes": w.row_bytes,
        "y": y,
        "y_stride": 4 * s.n,
        "bias": e.weights.vector(bias) if bias else 0,
        "residual": residual,
        "scale": 1.0,
    }
    if e.packs(s):
        return _packed_products(e, x, ids, s, w, common, shared)
    lists, word = _gathered(e, ids, s, Header.axis(p.rows(ids)))
    n_tiles = -(-s.n // ROWS)
    own = {"x": p.place(x), "x_stride": 4 * s.k, "k": s.k, "chunk_rows": ROWS, "n_tiles": n_tiles}
    kernel = kernels.float_experts(w.type, p.level, s.k, shared)
    return [Job(kernel, {**lists, **common, **own}, word, times=n_tiles)]


def _packed_products(
    e: Lowering, x: Value, ids: Value, s: Any, w: Packed, common: Mapping[str, Arg], shared: int
) -> list[Job]:
    """One job for a single token, and one for many, of which each has work when the other has none."""
    p, fmt = e.plan, BLOCKS[w.type]
    axis, tail = p.rows(ids), s.k % 256 // fmt.elements
    own: dict[str, Arg] = {
        **common,
        "x": e.quantised(x),
        "x_stride": row_bytes(s.k),
        "p": padded(s.k),
        "blocks": s.k // 256,
        "tail": tail,
    }
    bounds = guided_bounds(s.n, w.row_bytes, p.threads)
    p.keep.append(bounds)
    chunks = len(bounds) - 1
    single = {"ids": p.place(ids), "experts": s.n_experts, "bounds": int(bounds.ctypes.data), "n_tiles": chunks}
    one = kernels.single_token_experts(fmt, p.level, tail > 0, shared == s.used)
    lists, word = _gathered(e, ids, s, Header.many(axis))
    n_tiles = -(-s.n // (LANES * shapes(p.level)[0].vectors))
    many = kernels.packed_experts(fmt, p.level, tail > 0, padded(s.k), shared)
    return [
        Job(one, {**own, **single}, Header.single(axis), times=s.used * chunks),
        Job(many, {**own, **lists, "n_tiles": n_tiles}, word, times=n_tiles),
    ]


def expert_up(e: Lowering, node: Node) -> None:
    p, s = e.plan, node.spec
    x, ids, *weights = node.inputs
    (y,) = node.outputs
    count = 1 + s.gated
    biases: Sequence[WeightRef | None] = weights[count:] or [None] * count
    size = 4 * s.n * s.used * p.sizes[p.rows(x)]
    parts = [p.temporary(size) for _ in range(count)]
    if e.packs(s):
        e.quantised(x)
    maps = zip(weights, biases, parts)
    p.stage(*(job for w, b, part in maps for job in _products(e, x, ids, s, w, b, part, s.used)))
    args: dict[str, Arg] = {"gate": parts[0], "up": parts[-1], "y": p.place(y), "n": s.n}
    p.stage(Job(kernels.activate(s.activation), args, Header.axis(p.rows(x)), times=s.used))


def chosen_linear(e: Lowering, node: Node) -> None:
    """One of some matrices for each row: as an expert that was chosen alone, for good."""
    p, s = e.plan, node.spec
    x, ids, weight, *base = node.inputs
    alone = ExpertDownSpec(s.type, s.count, 1, s.n, s.k)
    residual: Arg = p.place(base[0]) if base else 0
    p.stage(*_products(e, x, ids, alone, weight, None, p.place(node.outputs[0]), 1, residual))


def expert_down(e: Lowering, node: Node) -> None:
    p, s = e.plan, node.spec
    y, ids, weights, down, *bias = node.inputs
    (out,) = node.outputs
    each = p.temporary(4 * s.n * s.used * p.sizes[p.rows(y)])
    p.stage(*_products(e, y, ids, s, down, None, each, 1))
    args: dict[str, Arg] = {
        "y": each,
        "ids": p.place(ids),
        "weights": p.place(weights),
        "bias": e.weights.vector(bias[0]) if bias else 0,
        "out": p.place(out),
        "n": s.n,
        "used": s.used,
        "experts": s.n_experts,
    }
    p.stage(Job(route_kernels.combine(bool(bias)), args, Header.axis(p.rows(out))))
