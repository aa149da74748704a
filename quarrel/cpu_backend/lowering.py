"""How each op becomes stages: the implementations that this backend registers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quarrel.cpu_backend import attention as attention_kernels
from quarrel.cpu_backend import elementwise, rope
from quarrel.cpu_backend.dequant import embedding
from quarrel.cpu_backend.dot_row import dot_row
from quarrel.cpu_backend.float_linear import ROWS, float_linear
from quarrel.cpu_backend.formats import BLOCKS
from quarrel.cpu_backend.norm import norm
from quarrel.cpu_backend.plan import Arg, Header, Job, Live, Plan
from quarrel.cpu_backend.quantize import padded, quantize, row_bytes
from quarrel.cpu_backend.sample import sample
from quarrel.cpu_backend.tile import LANES, T_BLOCK, shapes, tile
from quarrel.cpu_backend.weights import Packed, Weights
from quarrel.ops import (
    ADD,
    ATTENTION,
    CAP,
    EMBEDDING,
    GATED,
    GATHER_ROWS,
    KV_APPEND,
    LINEAR,
    LINEAR_ADD,
    NORM,
    NORM_GATE_UP,
    NORM_LINEAR,
    ROPE,
    ROPE_APPEND,
    SAMPLE,
)
from quarrel.ops.activation import GatedSpec
from quarrel.ops.attention import AttentionSpec
from quarrel.ops.contract import ConstRef, Operand, Value, WeightRef
from quarrel.ops.linear import LinearSpec
from quarrel.ops.norm import NormSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation, Registry

CHUNK_BYTES = 32768
"""Weight bytes of the shortest chunk of the decode path: about 3 us of one core's share of memory bandwidth."""


def guided_bounds(rows: int, row_bytes: int, threads: int) -> np.ndarray:
    """Where chunks of weight rows begin and end: long ones first, so that memory is read in long runs, short ones last.

    A chunk takes half of a thread's share of what is left. Rows are computed alike in any chunk, so the cut has no influence
    on results.
    """
    least = max(2, CHUNK_BYTES // row_bytes)
    bounds = [0]
    while bounds[-1] < rows:
        size = max(least, (rows - bounds[-1]) // (2 * threads))
        bounds.append(min(rows, bounds[-1] + size + size % 2))
    return np.array(bounds, np.int64)


@dataclass(frozen=True)
class Cache:
    """Key and value arrays of one layer, `[C, block_size, n_kv, head_dim]`, float16 or float32."""

    k: np.ndarray
    v: np.ndarray

    @property
    def half(self) -> bool:
        return self.k.dtype == np.float16


class Lowering:
    """Turns nodes into stages of one plan."""

    def __init__(self, plan: Plan, weights: Weights, caches: Sequence[Cache]) -> None:
        self.plan, self.weights, self.caches = plan, weights, caches
        self._items: dict[int, tuple[int, int]] = {}

    # Forms of activations

    def packs(self, spec: LinearSpec) -> bool:
        """Whether this map reads its activations rounded to 8 bits."""
        return not self.plan.exact and self.weights.stored_type(spec.type) in BLOCKS

    def quantised(self, x: Value) -> Arg:
        """x rounded to 8 bits, by a stage of its own unless its producer did so."""
        p = self.plan
        if not p.has(x, "q"):
            k = p.width(x)
            args: dict[str, Arg] = {"x": p.place(x), "out": p.place(x, "q"), "k": k, "out_stride": row_bytes(k)}
            p.stage(Job(quantize(p.level), args, Header.axis(p.rows(x))))
        return p.place(x, "q")

    # Linear maps

    def linear_jobs(
        self,
        x: Value,
        s: LinearSpec,
        weight: WeightRef,
        bias: WeightRef | None,
        y: Arg,
        residual: Arg = 0,
        scale: float = 1.0,
    ) -> list[Job]:
        """The jobs of one map; for packed weights one for a single row and one for many."""
        w = self.weights.matrix(weight)
        common: dict[str, Arg] = {
            "w": w.address,
            "n": s.n,
            "row_bytes": w.row_bytes,
            "y": y,
            "y_stride": 4 * s.n,
            "bias": self.weights.vector(bias) if bias else 0,
            "residual": residual,
            "scale": float(scale),
        }
        return self._packed_jobs(x, w, common) if self.packs(s) else self._float_jobs(x, w, common)

    def _packed_jobs(self, x: Value, w: Packed, common: Mapping[str, Arg]) -> list[Job]:
        p, axis = self.plan, self.plan.rows(x)
        fmt, level = BLOCKS[w.type], self.plan.level
        tail = w.k % 256 // fmt.elements
        q = self.quantised(x)
        shared = {**common, "x": q, "p": padded(w.k), "blocks": w.k // 256, "tail": tail}
        bounds = guided_bounds(w.rows, w.row_bytes, p.threads)
        p.keep.append(bounds)
        per_row = {key: value for key, value in shared.items() if key != "n"} | {"bounds": int(bounds.ctypes.data)}
        one = Job(dot_row(fmt, level, tail > 0), per_row, Header.single(axis), times=len(bounds) - 1)
        n_tiles = -(-w.rows // (LANES * shapes(level)[0].vectors))
        args = {**shared, "live_rows": p.live(axis), "x_stride": row_bytes(w.k), "n_tiles": n_tiles}
        return [one, Job(tile(fmt, level, tail > 0, padded(w.k)), args, Header.many(axis), T_BLOCK, n_tiles)]

    def _float_jobs(self, x: Value, w: Packed, common: Mapping[str, Arg]) -> list[Job]:
        axis = self.plan.rows(x)
        rows = ROWS if w.type in BLOCKS else max(4, min(256, CHUNK_BYTES // w.row_bytes))
        n_tiles = -(-w.rows // rows)
        args = {
            **common,
            "live_rows": self.plan.live(axis),
            "x": self.plan.place(x),
            "k": w.k,
            "n_tiles": n_tiles,
            "chunk_rows": rows,
        }
        return [Job(float_linear(w.type, self.plan.level, w.k), args, Header.axis(axis), T_BLOCK, n_tiles)]

    # Norms

    def norm_stage(self, x: Value, s: NormSpec, gains: Sequence[Operand], y: Arg, q: Arg | None) -> None:
        """Normalises x into y, and into q rounded to 8 bits."""
        addresses = [self.weights.vector(g) for g in gains if isinstance(g, WeightRef)]
        args: dict[str, Arg] = {
            "x": self.plan.place(x),
            "gain": addresses[0],
            "bias": addresses[1] if s.kind == "layer" else 0,
            "y": y,
            "n": s.k,
            "groups": s.groups,
            "eps": float(s.eps),
        }
        if q is not None:
            args |= {"q": q, "q_stride": row_bytes(s.width)}
        self.plan.stage(Job(norm(s.kind, q is not None), args, Header.axis(self.plan.rows(x))))

    def normed(self, x: Value, s: NormSpec, gains: Sequence[Operand], linears: Sequence[LinearSpec]) -> Value:
        """A value that only the current node reads: the norm of x, in the forms that its linear maps want."""
        value = Value(-1 - self.plan.node, "act", (self.plan.rows(x), s.width), "normed")
        wants_q = any(self.packs(lin) for lin in linears)
        self.norm_stage(x, s, gains, self.plan.place(value), self.plan.place(value, "q") if wants_q else None)
        return value

    # Attention

    def items(self, queries: int, node: Node) -> tuple[int, int]:
        """The planned blocks of queries (address, header word of their count), planned once per step for every block size."""
        if queries not in self._items:
            p = self.plan
            most = p.sizes["T"] + p.sizes["S"]
            memory, word = np.zeros(4 * most, np.int64), p.header.new()
            p.keep.append(memory)
            _, query_start, kv_len = (i for i in node.inputs[:3])
            args: dict[str, Arg] = {
                "live_seqs": p.live("S"),
                "query_start": p.place(query_start),
                "kv_len": p.place(kv_len),  # type: ignore[arg-type]
                "items": int(memory.ctypes.data),
                "count": p.header.address(word),
            }
            p.stage(Job(attention_kernels.plan(queries), args, Header.ONE))
            self._items[queries] = int(memory.ctypes.data), word
        return self._items[queries]


def _embedding(e: Lowering, node: Node) -> None:
    ids, weight = node.inputs
    (y,) = node.outputs
    w = e.weights.matrix(weight)  # type: ignore[arg-type]
    p = e.plan
    args: dict[str, Arg] = {
        "ids": p.place(ids),
        "w": w.address,
        "y": p.place(y),
        "n": w.k,
        "row_bytes": w.row_bytes,  # type: ignore[arg-type]
        "scale": float(node.spec.scale),
    }
    p.stage(Job(embedding(w.type, p.level, w.k), args, Header.axis(p.rows(y))))


def _gather_rows(e: Lowering, node: Node) -> None:
    x, rows = node.inputs
    (y,) = node.outputs
    p = e.plan
    args = {"x": p.place(x), "rows": p.place(rows), "y": p.place(y), "n": node.spec.k}  # type: ignore[arg-type]
    p.stage(Job(elementwise.gather_rows(), args, Header.axis(p.rows(y))))


def _norm(e: Lowering, node: Node) -> None:
    x, *gains = node.inputs
    (y,) = node.outputs
    wants_q = "q" in e.plan.forms.get(y.id, ())
    e.norm_stage(x, node.spec, gains, e.plan.place(y), e.plan.place(y, "q") if wants_q else None)  # type: ignore[arg-type]


def _optional(refs: Sequence[Operand]) -> WeightRef | None:
    return refs[0] if refs else None  # type: ignore[return-value]


def _linear(e: Lowering, node: Node) -> None:
    x, weight, *bias = node.inputs
    jobs = e.linear_jobs(x, node.spec, weight, _optional(bias), e.plan.place(node.outputs[0]))  # type: ignore[arg-type]
    e.plan.stage(*jobs)


def _linear_add(e: Lowering, node: Node) -> None:
    residual, x, weight, *bias = node.inputs
    p, s = e.plan, node.spec
    y = p.place(node.outputs[0])
    p.stage(*e.linear_jobs(x, s.linear, weight, _optional(bias), y, p.place(residual), s.scale))  # type: ignore[arg-type]


def _take_maps(linears: Sequence[LinearSpec], rest: Sequence[Operand]) -> list[tuple[LinearSpec, Any, Any]]:
    """Pairs each map with its weight and bias out of a composite's operands."""
    out, left = [], list(rest)
    for lin in linears:
        out.append((lin, left.pop(0), left.pop(0) if lin.bias else None))
    return out


def _norm_linear(e: Lowering, node: Node) -> None:
    s = node.spec
    x, gains, rest = _split_norm(s.norm, node.inputs)
    value = e.normed(x, s.norm, gains, s.linears)
    maps = zip(_take_maps(s.linears, rest), node.outputs, strict=True)
    e.plan.stage(*(job for (lin, w, bias), y in maps for job in e.linear_jobs(value, lin, w, bias, e.plan.place(y))))
    e.plan.end_value(value)


def _split_norm(s: NormSpec, inputs: Sequence[Operand]) -> tuple[Any, Sequence[Operand], Sequence[Operand]]:
    count = 2 if s.kind == "layer" else 1
    return inputs[0], inputs[1 : 1 + count], inputs[1 + count :]


def _norm_gate_up(e: Lowering, node: Node) -> None:
    s, p = node.spec, e.plan
    x, gains, rest = _split_norm(s.norm, node.inputs)
    value = e.normed(x, s.norm, gains, (s.gate, s.up))
    size = 4 * s.gate.n * p.sizes[p.rows(x)]
    both = [p.temporary(size), p.temporary(size)]
    maps = zip(_take_maps((s.gate, s.up), rest), both, strict=True)
    p.stage(*(job for (lin, w, bias), y in maps for job in e.linear_jobs(value, lin, w, bias, y)))
    p.end_value(value)
    _gated_stage(e, GatedSpec(s.activation, s.gate.n), both[0], both[1], node.outputs[0])


def _gated(e: Lowering, node: Node) -> None:
    gate, up = (e.plan.place(v) for v in node.inputs)  # type: ignore[arg-type]
    _gated_stage(e, node.spec, gate, up, node.outputs[0])


def _gated_stage(e: Lowering, s: GatedSpec, gate: Arg, up: Arg, y: Value) -> None:
    p = e.plan
    quantised = p.forms.get(y.id, {"f32"}) == {"q"}
    # Padding columns belong to the last chunk, so the chunks cover the padded width.
    per_row = -(-(padded(s.n) if quantised else s.n) // elementwise.COLUMNS)
    args: dict[str, Arg] = {"gate": gate, "up": up, "n": s.n, "per_row": per_row}
    args |= {"q": p.place(y, "q"), "q_stride": row_bytes(s.n)} if quantised else {"y": p.place(y)}
    p.stage(Job(elementwise.gated(s.activation, quantised), args, Header.axis(p.rows(y)), times=per_row))


def _add(e: Lowering, node: Node) -> None:
    p, s = e.plan, node.spec
    a, b = node.inputs
    (y,) = node.outputs
    args = {"a": p.place(a), "b": p.place(b), "y": p.place(y), "n": s.n, "scale": float(s.scale)}  # type: ignore[arg-type]
    p.stage(Job(elementwise.add(), args, Header.axis(p.rows(y))))


def _cap(e: Lowering, node: Node) -> None:
    p, s = e.plan, node.spec
    (x,), (y,) = node.inputs, node.outputs
    args = {"x": p.place(x), "y": p.place(y), "n": s.n, "scale": float(s.scale), "limit": float(s.cap)}  # type: ignore[arg-type]
    p.stage(Job(elementwise.cap(s.cap != 0.0), args, Header.axis(p.rows(y))))


def _constant(e: Lowering, ref: ConstRef | Value) -> int:
    assert isinstance(ref, ConstRef), ref
    data = np.zeros(len(ref.data) + 16, np.float32)
    data[: len(ref.data)] = ref.data
    e.plan.keep.append(data)
    return int(data.ctypes.data)


def _rope(e: Lowering, node: Node) -> None:
    p, s = e.plan, node.spec
    x, positions, freq = node.inputs
    (y,) = node.outputs
    args: dict[str, Arg] = {
        "x": p.place(x),
        "y": p.place(y),
        "positions": p.place(positions),
        "freq": _constant(e, freq),  # type: ignore[arg-type]
        "heads": s.n_heads,
        "dim": s.head_dim,
        "half": s.half,
        "magnitude": float(s.magnitude),
    }
    p.stage(Job(rope.rope(s.style, s.half), args, Header.axis(p.rows(y))))


def _kv_append(e: Lowering, node: Node) -> None:
    p, s = e.plan, node.spec
    k, v, slots, cache = node.inputs
    c = e.caches[cache.layer]  # type: ignore[union-attr]
    args: dict[str, Arg] = {
        "k": p.place(k),
        "v": p.place(v),
        "slots": p.place(slots),
        "width": s.width,  # type: ignore[arg-type]
        "k_cache": int(c.k.ctypes.data),
        "v_cache": int(c.v.ctypes.data),
    }
    p.stage(Job(rope.kv_append(p.level, c.half), args, Header.axis(p.rows(k))))  # type: ignore[arg-type]


def _rope_append(e: Lowering, node: Node) -> None:
    p, s = e.plan, node.spec
    q, k, v, positions, freq, slots, cache = node.inputs
    (y,) = node.outputs
    c = e.caches[cache.layer]  # type: ignore[union-attr]
    args: dict[str, Arg] = {
        "q": p.place(q),
        "k": p.place(k),
        "v": p.place(v),
        "y": p.place(y),  # type: ignore[arg-type]
        "positions": p.place(positions),
        "freq": _constant(e, freq),
        "slots": p.place(slots),  # type: ignore[arg-type]
        "k_cache": int(c.k.ctypes.data),
        "v_cache": int(c.v.ctypes.data),
        "heads": s.q.n_heads,
        "kv_heads": s.k.n_heads,
        "dim": s.q.head_dim,
        "width": s.k.width,
        "half": s.q.half,
        "magnitude": float(s.q.magnitude),
    }
    kernel = rope.rope_append(s.q.style, p.level, c.half, s.q.half, s.k.width)
    p.stage(Job(kernel, args, Header.axis(p.rows(y))))


def _attention(e: Lowering, node: Node) -> None:
    p, s = e.plan, node.spec
    q, _, _, block_table, cache, *sinks = node.inputs
    c = e.caches[cache.layer]  # type: ignore[union-attr]
    shape = attention_shape(s, c)
    items, word = e.items(shape.queries, node)
    args: dict[str, Arg] = {
        "q": p.place(q),
        "y": p.place(node.outputs[0]),
        "k_cache": int(c.k.ctypes.data),
        "v_cache": int(c.v.ctypes.data),  # type: ignore[arg-type]
        "block_table": p.place(block_table),
        "live_blocks": p.live("B"),
        "items": items,
        "live_items": Live(word),  # type: ignore[arg-type]
        "sinks": e.weights.vector(sinks[0]) if sinks else 0,  # type: ignore[arg-type]
    }
    p.stage(Job(attention_kernels.attention(shape, p.level), args, word, times=s.n_kv))


def attention_shape(s: AttentionSpec, c: Cache) -> attention_kernels.Shape:
    """The kernel's static facts."""
    group = s.n_heads // s.n_kv
    block_size = c.k.shape[1]
    return attention_kernels.Shape(group, s.n_kv, s.head_dim, block_size, s.scale, s.window, s.cap, s.sinks, c.half)


def _sample(e: Lowering, node: Node) -> None:
    p = e.plan
    names = ("logits", "temperature", "top_k", "top_p", "min_p", "uniform")
    args: dict[str, Arg] = {name: p.place(v) for name, v in zip(names, node.inputs, strict=True)}  # type: ignore[arg-type]
    args |= {"n": node.spec.n, "tokens": p.place(node.outputs[0])}
    p.stage(Job(sample(node.spec.n), args, Header.axis(p.rows(node.outputs[0]))))


def _same_rotation(s: Any) -> str | None:
    q, k = s.q, s.k
    same = (q.style, q.head_dim, q.n_rot, q.magnitude) == (k.style, k.head_dim, k.n_rot, k.magnitude)
    return None if same else f"query and key must rotate alike, got {q} and {k}"


REGISTRY = Registry(
    "cpu",
    [
        Implementation(EMBEDDING, "dequantise rows", _embedding),
        Implementation(GATHER_ROWS, "copy rows", _gather_rows),
        Implementation(NORM, "vector norm", _norm),
        Implementation(LINEAR, "packed dot", _linear),
        Implementation(LINEAR_ADD, "packed dot + residual", _linear_add),
        Implementation(NORM_LINEAR, "norm, round, packed dots", _norm_linear),
        Implementation(NORM_GATE_UP, "norm, round, packed dots, gate", _norm_gate_up),
        Implementation(GATED, "vector gate", _gated),
        Implementation(ADD, "vector add", _add),
        Implementation(CAP, "vector cap", _cap),
        Implementation(ROPE, "vector rope", _rope),
        Implementation(KV_APPEND, "paged append", _kv_append),
        Implementation(ROPE_APPEND, "rope + paged append", _rope_append, _same_rotation),
        Implementation(ATTENTION, "paged flash", _attention),
        Implementation(SAMPLE, "radix select", _sample),
    ],
)


def reads_rounded(e_packs: Any, node: Node, position: int) -> bool:
    """Whether a node reads the operand at `position` rounded to 8 bits."""
    if node.op is LINEAR:
        return position == 0 and e_packs(node.spec)
    if node.op is LINEAR_ADD:
        return position == 1 and e_packs(node.spec.linear)
    return False
