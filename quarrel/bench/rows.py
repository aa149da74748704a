"""A large map checked on some of its rows, spread evenly: the kernel computes all, the reference those."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from quarrel.gguf import GGMLType
from quarrel.ops.contract import Array, Concrete, RawWeight
from quarrel.ops.linear import LinearAddSpec, LinearSpec, NormGateUpSpec, NormLinearSpec
from quarrel.ops.moe import ExpertDownSpec, ExpertUpSpec
from quarrel.ops.norm import norm_params
from quarrel.ops.program import Node

ELEMENTS = 1 << 21
"""Weights of a map that the reference decodes: NumPy does 50 million a second, and needs 30 bytes for each."""
LEAST = 48
Operands = list[Concrete]


def some_rows(node: Node, inputs: Sequence[Concrete], got: Sequence[Concrete]) -> tuple[Node, Operands, Operands]:
    """The node with fewer rows in its maps, and its inputs and results cut to match; what is no map stays whole."""
    spec, operands = node.spec, list(inputs)
    if isinstance(spec, LinearSpec):
        cut, keep = _linear(spec, operands, 1)
        return _node(node, cut), operands, [_columns(got[0], keep)]
    if isinstance(spec, LinearAddSpec):
        cut, keep = _linear(spec.linear, operands, 2)
        operands[0] = _columns(operands[0], keep)
        return _node(node, replace(spec, linear=cut)), operands, [_columns(got[0], keep)]
    if isinstance(spec, NormLinearSpec):
        at, linears, out = len(norm_params(spec.norm)), [], []
        for one, result in zip(spec.linears, got, strict=True):
            cut, keep = _linear(one, operands, at)
            at += 1 + one.bias
            linears.append(cut)
            out.append(_columns(result, keep))
        return _node(node, replace(spec, linears=tuple(linears))), operands, out
    if isinstance(spec, NormGateUpSpec):
        at = len(norm_params(spec.norm))
        gate, keep = _linear(spec.gate, operands, at)
        up, _ = _linear(spec.up, operands, at + 1 + spec.gate.bias, keep)
        return _node(node, replace(spec, gate=gate, up=up)), operands, [_columns(got[0], keep)]
    if isinstance(spec, ExpertUpSpec | ExpertDownSpec):
        keep = _rows(spec.n, spec.k * spec.n_experts)
        for i, operand in enumerate(operands):
            if isinstance(operand, RawWeight):
                # Stacks first, then biases of one row an expert.
                stack = len(operand.raw) == spec.rows and operand.k == spec.k
                operands[i] = _stack(operand, spec.n_experts, keep) if stack else _bias(operand, keep)
        return _node(node, replace(spec, n=len(keep))), operands, [_columns(got[0], keep)]
    return node, operands, list(got)


def _node(node: Node, spec: Any) -> Node:
    return replace(node, spec=spec)


def _linear(spec: LinearSpec, operands: Operands, at: int, keep: Array | None = None) -> tuple[LinearSpec, Array]:
    """Cuts the weight, and the bias behind it, in place."""
    keep = _rows(spec.n, spec.k) if keep is None else keep
    weight = operands[at]
    assert isinstance(weight, RawWeight)
    operands[at] = RawWeight(weight.type, weight.raw[keep], weight.k)
    if spec.bias:
        bias = operands[at + 1]
        assert isinstance(bias, RawWeight)
        operands[at + 1] = _bias(bias, keep)
    return replace(spec, n=len(keep)), keep


def _rows(n: int, k: int) -> Array:
    """Which rows: evenly spread, the first and the last among them."""
    count = min(n, max(LEAST, ELEMENTS // k))
    return np.unique(np.linspace(0, n - 1, count).astype(np.int64))


def _stack(weight: RawWeight, experts: int, keep: Array) -> RawWeight:
    raw = weight.raw.reshape(experts, -1, weight.raw.shape[1])[:, keep]
    return RawWeight(weight.type, raw.reshape(-1, raw.shape[2]), weight.k)


def _bias(bias: RawWeight, keep: Array) -> RawWeight:
    values = np.ascontiguousarray(bias.dense()[:, keep], np.float32)
    return RawWeight(GGMLType.F32, values.view(np.uint8), len(keep))


def _columns(values: Concrete, keep: Array) -> Concrete:
    assert isinstance(values, np.ndarray)
    return values[..., keep]
