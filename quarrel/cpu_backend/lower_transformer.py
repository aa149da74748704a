"""The ops of a transformer as stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quarrel.cpu_backend import attention as attention_kernels
from quarrel.cpu_backend import elementwise
from quarrel.cpu_backend import rope as rope_kernels
from quarrel.cpu_backend.cache import Cache
from quarrel.cpu_backend.dequant import embedding
from quarrel.cpu_backend.logprobs import logprobs
from quarrel.cpu_backend.lowering import Lowering
from quarrel.cpu_backend.plan import Arg, Header, Job, Live
from quarrel.cpu_backend.quantize import padded, row_bytes
from quarrel.cpu_backend.sample import sample
from quarrel.ops.activation import GatedSpec
from quarrel.ops.attention import AttentionSpec
from quarrel.ops.contract import Operand, Value, WeightRef
from quarrel.ops.linear import LinearSpec
from quarrel.ops.norm import NormSpec
from quarrel.ops.program import Node


def embedding_op(e: Lowering, node: Node) -> None:
    ids, weight = node.inputs
    (y,) = node.outputs
    w = e.weights.matrix(weight)
    p = e.plan
    args: dict[str, Arg] = {
        "ids": p.place(ids),
        "w": w.address,
        "y": p.place(y),
        "n": w.k,
        "row_bytes": w.row_bytes,
        "scale": float(node.spec.scale),
    }
    p.stage(Job(embedding(w.type, p.level, w.k), args, Header.axis(p.rows(y))))


def gather_rows(e: Lowering, node: Node) -> None:
    x, rows = node.inputs
    (y,) = node.outputs
    p = e.plan
    args = {"x": p.place(x), "rows": p.place(rows), "y": p.place(y), "n": node.spec.k}
    p.stage(Job(elementwise.gather_rows(), args, Header.axis(p.rows(y))))


def norm_op(e: Lowering, node: Node) -> None:
    x, *gains = node.inputs
    (y,) = node.outputs
    wants_q = "q" in e.plan.forms.get(y.id, ())
    e.norm_stage(x, node.spec, gains, e.plan.place(y), e.plan.place(y, "q") if wants_q else None)


def _optional(refs: Sequence[Operand]) -> WeightRef | None:
    return refs[0] if refs else None


def linear(e: Lowering, node: Node) -> None:
    x, weight, *bias = node.inputs
    jobs = e.linear_jobs(x, node.spec, weight, _optional(bias), e.plan.place(node.outputs[0]))
    e.plan.stage(*jobs)


def linear_add(e: Lowering, node: Node) -> None:
    residual, x, weight, *bias = node.inputs
    p, s = e.plan, node.spec
    y = p.place(node.outputs[0])
    p.stage(*e.linear_jobs(x, s.linear, weight, _optional(bias), y, p.place(residual), s.scale))


def _take_maps(linears: Sequence[LinearSpec], rest: Sequence[Operand]) -> list[tuple[LinearSpec, Any, Any]]:
    """Pairs each map with its weight and bias out of a composite's operands."""
    out, left = [], list(rest)
    for lin in linears:
        out.append((lin, left.pop(0), left.pop(0) if lin.bias else None))
    return out


def norm_linear(e: Lowering, node: Node) -> None:
    s = node.spec
    x, gains, rest = _split_norm(s.norm, node.inputs)
    value = e.normed(x, s.norm, gains, s.linears)
    maps = zip(_take_maps(s.linears, rest), node.outputs, strict=True)
    e.plan.stage(*(job for (lin, w, bias), y in maps for job in e.linear_jobs(value, lin, w, bias, e.plan.place(y))))
    e.plan.end_value(value)


def _split_norm(s: NormSpec, inputs: Sequence[Operand]) -> tuple[Any, Sequence[Operand], Sequence[Operand]]:
    count = 2 if s.kind == "layer" else 1
    return inputs[0], inputs[1 : 1 + count], inputs[1 + count :]


def norm_gate_up(e: Lowering, node: Node) -> None:
    s, p = node.spec, e.plan
    x, gains, rest = _split_norm(s.norm, node.inputs)
    value = e.normed(x, s.norm, gains, (s.gate, s.up))
    size = 4 * s.gate.n * p.sizes[p.rows(x)]
    both = [p.temporary(size), p.temporary(size)]
    maps = zip(_take_maps((s.gate, s.up), rest), both, strict=True)
    p.stage(*(job for (lin, w, bias), y in maps for job in e.linear_jobs(value, lin, w, bias, y)))
    p.end_value(value)
    _gated_stage(e, GatedSpec(s.activation, s.gate.n), both[0], both[1], node.outputs[0])


def gated(e: Lowering, node: Node) -> None:
    gate, up = (e.plan.place(v) for v in node.inputs)
    _gated_stage(e, node.spec, gate, up, node.outputs[0])


def _gated_stage(e: Lowering, s: GatedSpec, gate: Arg, up: Arg, y: Value) -> None:
    p = e.plan
    quantised = p.forms.get(y.id, {"f32"}) == {"q"}
    # Padding columns belong to the last chunk, so the chunks cover the padded width.
    per_row = -(-(padded(s.n) if quantised else s.n) // elementwise.COLUMNS)
    args: dict[str, Arg] = {"gate": gate, "up": up, "n": s.n, "per_row": per_row}
    args |= {"q": p.place(y, "q"), "q_stride": row_bytes(s.n)} if quantised else {"y": p.place(y)}
    p.stage(Job(elementwise.gated(s.activation, quantised), args, Header.axis(p.rows(y)), times=per_row))


def add(e: Lowering, node: Node) -> None:
    p, s = e.plan, node.spec
    a, b = node.inputs
    (y,) = node.outputs
    args = {"a": p.place(a), "b": p.place(b), "y": p.place(y), "n": s.n, "scale": float(s.scale)}
    p.stage(Job(elementwise.add(), args, Header.axis(p.rows(y))))


def cap(e: Lowering, node: Node) -> None:
    p, s = e.plan, node.spec
    (x,), (y,) = node.inputs, node.outputs
    args = {"x": p.place(x), "y": p.place(y), "n": s.n, "scale": float(s.scale), "limit": float(s.cap)}
    p.stage(Job(elementwise.cap(s.cap != 0.0), args, Header.axis(p.rows(y))))


def rope(e: Lowering, node: Node) -> None:
    p, s = e.plan, node.spec
    x, positions, freq = node.inputs
    (y,) = node.outputs
    args: dict[str, Arg] = {
        "x": p.place(x),
        "y": p.place(y),
        "positions": p.place(positions),
        "freq": e.constant(freq),
        "heads": s.n_heads,
        "dim": s.head_dim,
        "half": s.half,
        "magnitude": float(s.magnitude),
    }
    p.stage(Job(rope_kernels.rope(s.style, s.half), args, Header.axis(p.rows(y))))


def kv_append(e: Lowering, node: Node) -> None:
    p, s = e.plan, node.spec
    k, v, slots, cache = node.inputs
    c = e.caches[cache.layer]
    args: dict[str, Arg] = {
        "k": p.place(k),
        "v": p.place(v),
        "slots": p.place(slots),
        "heads": s.n_kv,
        "dim": s.head_dim,
        "k_cache": int(c.k.ctypes.data),
        "v_cache": int(c.v.ctypes.data),
    }
    p.stage(Job(rope_kernels.kv_append(p.level, c.kind), args, Header.axis(p.rows(k))))


def rope_append(e: Lowering, node: Node) -> None:
    p, s = e.plan, node.spec
    q, k, v, positions, freq, slots, cache = node.inputs
    (y,) = node.outputs
    c = e.caches[cache.layer]
    args: dict[str, Arg] = {
        "q": p.place(q),
        "k": p.place(k),
        "v": p.place(v),
        "y": p.place(y),
        "positions": p.place(positions),
        "freq": e.constant(freq),
        "slots": p.place(slots),
        "k_cache": int(c.k.ctypes.data),
        "v_cache": int(c.v.ctypes.data),
        "heads": s.q.n_heads,
        "kv_heads": s.k.n_heads,
        "dim": s.q.head_dim,
        "half": s.q.half,
        "magnitude": float(s.q.magnitude),
    }
    kernel = rope_kernels.rope_append(s.q.style, p.level, c.kind, s.q.half, s.k.width)
    p.stage(Job(kernel, args, Header.axis(p.rows(y))))


def attention(e: Lowering, node: Node) -> None:
    p, s = e.plan, node.spec
    q, query_start, kv_len, block_table, cache, *sinks = node.inputs
    c = e.caches[cache.layer]
    shape = attention_shape(s, c)
    items, word = e.items(shape.queries, query_start, kv_len)
    args: dict[str, Arg] = {
        "q": p.place(q),
        "y": p.place(node.outputs[0]),
        "k_cache": int(c.k.ctypes.data),
        "v_cache": int(c.v.ctypes.data),
        "block_table": p.place(block_table),
        "live_blocks": p.live("B"),
        "items": items,
        "live_items": Live(word),
        "sinks": e.weights.vector(sinks[0]) if sinks else 0,
    }
    p.stage(Job(attention_kernels.attention(shape, p.level), args, word, times=s.n_kv))


def attention_shape(s: AttentionSpec, c: Cache) -> attention_kernels.Shape:
    """The kernel's static facts."""
    group = s.n_heads // s.n_kv
    block_size = c.k.shape[1]
    return attention_kernels.Shape(group, s.n_kv, s.head_dim, block_size, s.scale, s.window, s.cap, s.sinks, c.kind)


def sample_op(e: Lowering, node: Node) -> None:
    p = e.plan
    names = ("logits", "temperature", "top_k", "top_p", "min_p", "uniform")
    args: dict[str, Arg] = {name: p.place(v) for name, v in zip(names, node.inputs, strict=True)}
    args |= {"n": node.spec.n, "tokens": p.place(node.outputs[0])}
    p.stage(Job(sample(node.spec.n), args, Header.axis(p.rows(node.outputs[0]))))


def logprobs_op(e: Lowering, node: Node) -> None:
    p, s = e.plan, node.spec
    names = ("logits", "tokens", "logprobs", "best")
    args: dict[str, Arg] = {name: p.place(v) for name, v in zip(names, (*node.inputs, *node.outputs), strict=True)}
    p.stage(Job(logprobs(s.top), args | {"n": s.n, "top": s.top}, Header.axis(p.rows(node.outputs[0]))))


def plain(e: Lowering, node: Node) -> None:
    p, s = e.plan, node.spec
    (x,), (y,) = node.inputs, node.outputs
    per_row = -(-s.n // elementwise.COLUMNS)
    args = {"x": p.place(x), "y": p.place(y), "n": s.n, "per_row": per_row}
    p.stage(Job(elementwise.plain(s.activation), args, Header.axis(p.rows(y)), times=per_row))


def add_row(e: Lowering, node: Node) -> None:
    p, s = e.plan, node.spec
    (x, row), (y,) = node.inputs, node.outputs
    args = {"x": p.place(x), "row": e.weights.vector(row), "y": p.place(y), "n": s.n}
    p.stage(Job(elementwise.add_row(), args, Header.axis(p.rows(y))))


def mean_rows(e: Lowering, node: Node) -> None:
    p = e.plan
    (x, query_start), (y,) = node.inputs, node.outputs
    args = {"x": p.place(x), "starts": p.place(query_start), "y": p.place(y), "n": node.spec.k}
    p.stage(Job(elementwise.mean_rows(), args, Header.axis(p.rows(y))))


def encode(e: Lowering, node: Node) -> None:
    p, s = e.plan, node.spec
    q, k, v, query_start = node.inputs
    shape = attention_kernels.Shape(1, s.n_heads, s.head_dim, 16, s.scale, causal=False)
    items, word = e.items(shape.queries, query_start, None)
    args: dict[str, Arg] = {
        "q": p.place(q),
        "y": p.place(node.outputs[0]),
        "k_cache": p.place(k),
        "v_cache": p.place(v),
        "query_start": p.place(query_start),
        "items": items,
        "live_items": Live(word),
    }
    p.stage(Job(attention_kernels.attention(shape, p.level), args, word, times=s.n_heads))
