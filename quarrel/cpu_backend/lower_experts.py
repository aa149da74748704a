"""Routing and experts as stages: choose, gather tokens by expert, multiply, combine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quarrel.cpu_backend import experts as kernels
from quarrel.cpu_backend import route as route_kernels
from quarrel.cpu_backend.float_linear import ROWS
from quarrel.cpu_backend.formats import BLOCKS
from quarrel.cpu_backend.lowering import Lowering, guided_bounds
from quarrel.cpu_backend.pack import pack_entries, tile_bytes, tile_slots
from quarrel.cpu_backend.plan import Arg, Header, Job, Live
from quarrel.cpu_backend.quantize import padded, row_bytes
from quarrel.cpu_backend.tile import tile_rows
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
        "n": s.n_experts,
        "used": s.used,
        "groups": s.n_groups,
        "groups_used": s.groups_used,
        "scale": float(s.scale),
    }
    kernel = route_kernels.route(s.gate, s.renormalise, s.bias, s.n_groups > 1, s.n_experts)
    p.stage(Job(kernel, args, Header.axis(p.rows(ids))))


@dataclass(frozen=True)
class Gathered:
    """The entries by expert: addresses of the lists, and the header words that count active experts and tiles."""

    lists: Mapping[str, Arg]
    experts: int
    tiles: int


def _gathered(e: Lowering, ids: Value, s: ExpertUpSpec | ExpertDownSpec, rows: int) -> Gathered:
    """Gathers once for all products of a choice; `rows` is the header word that says how many tokens take part."""
    p = e.plan
    known = e.gathered.get((ids.id, rows))
    if known is None:
        most = p.sizes["T"] * s.used
        lists = {
            "first": np.zeros(s.n_experts + 1, np.int64),
            "entries": np.zeros(most, np.int64),
            "active": np.zeros(s.n_experts, np.int64),
            "first_tile": np.zeros(s.n_experts, np.int64),
            "tiles": np.zeros(2 * _most_tiles(e, s), np.int64),
        }
        p.keep.append(lists)
        known = Gathered({name: int(a.ctypes.data) for name, a in lists.items()}, p.header.new(), p.header.new())
        args: dict[str, Arg] = {
            **known.lists,
            "ids": p.place(ids),
            "live_rows": Live(rows),
            "used": s.used,
            "experts": s.n_experts,
            "count": p.header.address(known.experts),
            "n_tiles": p.header.address(known.tiles),
        }
        p.shared_stage(ids, Job(route_kernels.gather(tile_slots(p.level)), args, Header.ONE))
        e.gathered[ids.id, rows] = known
    return known


def _most_tiles(e: Lowering, s: ExpertUpSpec | ExpertDownSpec) -> int:
    """Every expert may end in a tile that is not full."""
    most = e.plan.sizes["T"] * s.used
    return most // tile_slots(e.plan.level) + min(most, s.n_experts)


def _lists(g: Gathered, *names: str) -> dict[str, Arg]:
    return {name: g.lists[name] for name in names}


def _packed_entries(e: Lowering, x: Value, q: Arg, s: Any, g: Gathered, shared: int) -> Arg:
    """The entries' rows of x packed into tiles, expert by expert."""
    p = e.plan
    tiles = p.temporary(_most_tiles(e, s) * tile_bytes(p.level, s.k))
    args: dict[str, Arg] = {
        **_lists(g, "entries", "tiles"),
        "x": q,
        "x_stride": row_bytes(s.k),
        "p": padded(s.k),
        "out": tiles,
    }
    p.stage(Job(pack_entries(p.level, shared), args, g.tiles))
    return tiles


@dataclass(frozen=True)
class Inputs:
    """What a product reads beside its weights: x as it is or rounded, and packed; `shared` entries read one row of it."""

    x: Value
    ids: Value
    shared: int
    tiles: Arg = 0


def _inputs(e: Lowering, x: Value, ids: Value, s: Any, shared: int) -> Inputs:
    """Rounds and packs x once for all products that read it."""
    if not e.packs(s):
        return Inputs(x, ids, shared)
    gathered = _gathered(e, ids, s, Header.many(e.plan.rows(ids)))
    return Inputs(x, ids, shared, _packed_entries(e, x, e.quantised(x), s, gathered, shared))


def _products(e: Lowering, given: Inputs, s: Any, weight: WeightRef, bias: WeightRef | None, y: Arg) -> list[Job]:
    """y[entry] = the entry's expert's rows times its x."""
    p, w = e.plan, e.weights.matrix(weight)
    common: dict[str, Arg] = {
        "w": w.address,
        "n": s.n,
        "row_bytes": w.row_bytes,
        "y": y,
        "y_stride": 4 * s.n,
        "bias": e.weights.vector(bias) if bias else 0,
        "residual": 0,
        "scale": 1.0,
    }
    if e.packs(s):
        return _packed_products(e, given, s, w, common)
    g = _gathered(e, given.ids, s, Header.axis(p.rows(given.ids)))
    n_tiles = -(-s.n // ROWS)
    own = {"x": p.place(given.x), "x_stride": 4 * s.k, "k": s.k, "chunk_rows": ROWS, "n_tiles": n_tiles}
    kernel = kernels.float_experts(w.type, p.level, s.k, given.shared)
    args = {**_lists(g, "first", "entries", "active"), **common, **own}
    return [Job(kernel, args, g.experts, times=n_tiles)]


def _packed_products(e: Lowering, given: Inputs, s: Any, w: Packed, common: Mapping[str, Arg]) -> list[Job]:
    """One job for a single token, and one for many, of which each has work when the other has none."""
    p, fmt = e.plan, BLOCKS[w.type]
    axis, tail = p.rows(given.ids), s.k % 256 // fmt.elements
    matrix: dict[str, Arg] = {**common, "p": padded(s.k), "blocks": s.k // 256, "tail": tail}
    q, stride = e.quantised(given.x), row_bytes(s.k)
    bounds = guided_bounds(s.n, w.row_bytes, p.threads)
    p.keep.append(bounds)
    chunks = len(bounds) - 1
    single: dict[str, Arg] = {
        "x": q,
        "x_stride": stride,
        "ids": p.place(given.ids),
        "experts": s.n_experts,
        "bounds": int(bounds.ctypes.data),
        "n_tiles": chunks,
    }
    one = kernels.single_token_experts(fmt, p.level, tail > 0, given.shared == s.used)
    g = _gathered(e, given.ids, s, Header.many(axis))
    n_tiles = -(-s.n // tile_rows(p.level))
    lists = _lists(g, "first", "entries", "active", "first_tile")
    several: dict[str, Arg] = {**lists, "x": given.tiles, "q": q, "q_stride": stride, "n_tiles": n_tiles}
    many = kernels.packed_experts(fmt, p.level, tail > 0, padded(s.k), given.shared)
    return [
        Job(one, {**matrix, **single}, Header.single(axis), times=s.used * chunks),
        Job(many, {**matrix, **several}, g.experts, times=n_tiles),
    ]


def expert_up(e: Lowering, node: Node) -> None:
    p, s = e.plan, node.spec
    x, ids, *weights = node.inputs
    (y,) = node.outputs
    count = 1 + s.gated
    biases: Sequence[WeightRef | None] = weights[count:] or [None] * count
    size = 4 * s.n * s.used * p.sizes[p.rows(x)]
    parts = [p.temporary(size) for _ in range(count)]
    given = _inputs(e, x, ids, s, s.used)
    maps = zip(weights, biases, parts)
    p.stage(*(job for w, b, part in maps for job in _products(e, given, s, w, b, part)))
    args: dict[str, Arg] = {"gate": parts[0], "up": parts[-1], "y": p.place(y), "n": s.n}
    p.stage(Job(kernels.activate(s.activation), args, Header.axis(p.rows(x)), times=s.used))


def expert_down(e: Lowering, node: Node) -> None:
    p, s = e.plan, node.spec
    y, ids, weights, down, *bias = node.inputs
    (out,) = node.outputs
    each = p.temporary(4 * s.n * s.used * p.sizes[p.rows(y)])
    p.stage(*_products(e, _inputs(e, y, ids, s, 1), s, down, None, each))
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
