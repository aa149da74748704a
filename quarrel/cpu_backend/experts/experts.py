"""Experts as stages: entries sorted by expert, products, combination; the table says which kernels multiply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from quarrel.cpu_backend.experts import products, route
from quarrel.cpu_backend.formats.table import BLOCKS
from quarrel.cpu_backend.linear.activations import row_bytes
from quarrel.cpu_backend.linear.floats import PAIRS, ROWS
from quarrel.cpu_backend.linear.kernels import LinearKernel, choose, chunk_bounds, needs_blocks, needs_pairs, takes_all
from quarrel.cpu_backend.linear.matvec import matrix_fields
from quarrel.cpu_backend.linear.tile import tile_count
from quarrel.cpu_backend.lowering import Field, Lowering
from quarrel.cpu_backend.plan import Arg, Header, Job, Live
from quarrel.cpu_backend.weights import Packed
from quarrel.ops.contract import Value, WeightRef
from quarrel.ops.lora import CHOSEN_LINEAR
from quarrel.ops.moe import EXPERT_DOWN, EXPERT_UP, ROUTE, ExpertDownSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation


@dataclass(frozen=True)
class Call:
    """y[entry] = the rows of the entry's expert times its x; `shared` entries of a token read one row of x."""

    x: Value
    ids: Value
    spec: Any
    w: Packed
    output: Mapping[str, Field]
    shared: int


def _entries(e: Lowering, c: Call, rows: int) -> tuple[Mapping[str, Field], int]:
    """The entries by expert: fields that a product reads, and the header word that counts active experts.

    `rows` is the header word that says how many tokens take part.
    """

    def make() -> tuple[Mapping[str, Field], int]:
        p, s = e.plan, c.spec
        sizes = {"first": s.n_experts + 1, "entries": p.sizes["T"] * s.used, "active": s.n_experts}
        lists = {name: e.address(np.zeros(size, np.int64)) for name, size in sizes.items()}
        word = p.header.new()
        numbers = {"live_rows": Live(rows), "used": s.used, "experts": s.n_experts}
        e.shared_stage(c.ids, route.gather(), Header.ONE, ids=c.ids, count=p.header.address(word), **numbers, **lists)
        return lists, word

    return e.once(("entries", c.ids.id, rows), make)


def _packed(e: Lowering, c: Call) -> dict[str, Any]:
    return {**c.output, **matrix_fields(c.w, c.spec.n), "x": e.quantized(c.x), "x_stride": row_bytes(c.spec.k)}


def _matvec_job(e: Lowering, c: Call) -> Job:
    s, fields = c.spec, _packed(e, c)
    bounds = chunk_bounds(e, s.n, c.w.row_bytes)
    chunks = len(bounds) - 1
    fields |= {"ids": c.ids, "experts": s.n_experts, "bounds": bounds, "n_tiles": chunks}
    kernel = products.expert_matvec(BLOCKS[c.w.type], e.plan.level, fields["tail"] > 0, c.shared == s.used)
    return e.job(kernel, Header.single(e.plan.rows(c.ids)), fields, times=s.used * chunks)


def _tile_job(e: Lowering, c: Call) -> Job:
    fields, n_tiles = _packed(e, c), tile_count(e.plan.level, c.spec.n)
    lists, active = _entries(e, c, Header.many(e.plan.rows(c.ids)))
    kernel = products.expert_tile(BLOCKS[c.w.type], e.plan.level, fields["tail"] > 0, fields["p"])
    return e.job(kernel, active, {**fields, **lists, "shared": c.shared, "n_tiles": n_tiles}, times=n_tiles)


def _floats(e: Lowering, c: Call, kind: str, x: Field, k: int) -> Job:
    """The products with weights as rows of `k` values of a kind."""
    s, w = c.spec, c.w
    lists, active = _entries(e, c, Header.axis(e.plan.rows(c.ids)))
    n_tiles = -(-s.n // ROWS)
    matrix = {"w": w.address, "n": s.n, "k": k, "row_bytes": w.row_bytes, "chunk_rows": ROWS, "n_tiles": n_tiles}
    fields = {**lists, **c.output, **matrix, "shared": c.shared, "x": x, "x_stride": 4 * k}
    return e.job(products.expert_floats(kind, e.plan.level, k), active, fields, times=n_tiles)


def _pairs_job(e: Lowering, c: Call) -> Job:
    return _floats(e, c, PAIRS, e.in_bfloat16(c.x), c.spec.k // 2)


def _float_job(e: Lowering, c: Call) -> Job:
    return _floats(e, c, c.w.type, c.x, c.spec.k)


KERNELS = (
    LinearKernel("int8 matvec by expert", "few rows", "q", needs_blocks, _matvec_job),
    LinearKernel("int8 tile by expert", "more rows", "q", needs_blocks, _tile_job),
    LinearKernel("bfloat16 tile by expert", "any rows", "f32", needs_pairs, _pairs_job),
    LinearKernel("float32 tile by expert", "any rows", "f32", takes_all, _float_job),
)
"""As `linear/kernels.py`; "few rows" are one token here, whatever the number of its experts."""


def _jobs(
    e: Lowering,
    x: Value,
    ids: Value,
    s: Any,
    weight: WeightRef,
    y: Arg,
    shared: int,
    bias: WeightRef | None = None,
    residual: Field = None,
) -> list[Job]:
    choice = choose(e, KERNELS, s)
    e.note(str(choice), choice.declined)
    output = {"y": y, "y_stride": 4 * s.n, "bias": bias, "residual": residual, "scale": 1.0}
    call = Call(x, ids, s, e.weights.matrix(weight), output, shared)
    return [kernel.job(e, call) for kernel in choice.kernels]


def build_route(e: Lowering, node: Node) -> None:
    s, (logits, *vectors), (ids, weights) = node.spec, node.inputs, node.outputs
    bias, gains = vectors[0] if s.bias else None, vectors[-1] if s.gains else None
    log = {"log": e.counts.begin(node.path), "log_used": e.counts.used}
    sizes = {"n": s.n_experts, "used": s.used, "groups": s.n_groups, "groups_used": s.groups_used, "scale": float(s.scale)}
    kernel = route.route(s.gate, s.renormalise, s.bias, s.n_groups > 1, s.gains, s.n_experts)
    e.stage(kernel, ids, logits=logits, bias=bias, gains=gains, ids=ids, weights=weights, **log, **sizes)


def build_expert_up(e: Lowering, node: Node) -> None:
    p, s, (y,) = e.plan, node.spec, node.outputs
    x, ids, *weights = node.inputs
    count = 1 + s.gated
    biases = weights[count:] or [None] * count
    size = 4 * s.n * s.used * p.sizes[p.rows(x)]
    parts = [p.temporary(size) for _ in range(count)]
    maps = zip(weights, biases, parts)
    p.stage(*(job for w, bias, part in maps for job in _jobs(e, x, ids, s, w, part, s.used, bias)))
    e.stage(products.activate(s.activation), x, times=s.used, gate=parts[0], up=parts[-1], y=y, n=s.n)


def build_expert_down(e: Lowering, node: Node) -> None:
    p, s, (out,) = e.plan, node.spec, node.outputs
    y, ids, weights, down, *bias = node.inputs
    each = p.temporary(4 * s.n * s.used * p.sizes[p.rows(y)])
    p.stage(*_jobs(e, y, ids, s, down, each, 1))
    sizes = {"n": s.n, "used": s.used, "experts": s.n_experts}
    fields = {"y": each, "ids": ids, "weights": weights, "bias": bias[0] if bias else None, "out": out, **sizes}
    e.stage(route.combine(bool(bias)), out, **fields)


def build_chosen_linear(e: Lowering, node: Node) -> None:
    """One of some matrices for each row: as one expert of which each token uses one, without weights."""
    s, (x, ids, weight, *base) = node.spec, node.inputs
    one = ExpertDownSpec(s.type, s.count, 1, s.n, s.k)
    y = e.plan.place(node.outputs[0])
    e.plan.stage(*_jobs(e, x, ids, one, weight, y, 1, residual=base[0] if base else None))


IMPLEMENTATIONS = (
    Implementation(ROUTE, "float64 choice", build_route),
    Implementation(EXPERT_UP, "linear + gate", build_expert_up),
    Implementation(EXPERT_DOWN, "linear + weighted sum", build_expert_down),
    Implementation(CHOSEN_LINEAR, "linear by adapter", build_chosen_linear),
)
