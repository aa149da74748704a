"""Linear maps over packed weights, and what is fused with them; `kernels.py` says which kernel takes what.

Rows of sequences that bring one row (decode) go through the matrix-vector kernel, however many such rows a step has, all
others (prefill) through the matrix-matrix one; each sums in an order of its own that depends only on the weight's shape.

MLX's own products are not used but to compare with (`quantized.py`): `mx.quantized_matmul` holds few of GGUF's formats. Its
dense `matmul` has the same 8x8 products as ours on M1 to M4, but splits K by the number of rows, so that a row's result
would depend on the rows beside it, and rounds before a bias or a residual is added.
"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from quarrel.mlx_backend.linear.kernels import Fusion, Phase, find, fusion_of
from quarrel.mlx_backend.linear.product import Map, Product, at_least
from quarrel.mlx_backend.runtime.launch import Batch, Launch, RowsFunction, Site, evaluated
from quarrel.ops.contract import WeightRef
from quarrel.ops.linear import (
    LINEAR,
    LINEAR_ADD,
    NORM_GATE_UP,
    NORM_LINEAR,
    LinearSpec,
    NormGateUpSpec,
    NormLinearSpec,
)
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation


def _maps(site: Site, specs: tuple[LinearSpec, ...], refs: list[WeightRef]) -> tuple[Map, ...]:
    """The operands of several maps, in the order of the contract: each a weight and its bias, if it has one."""
    maps = []
    for spec in specs:
        weight = site.weight(refs.pop(0))
        maps.append(Map(weight, at_least(site.vector(refs.pop(0))) if spec.bias else None, site.dtype(spec.out)))
    return tuple(maps)


def _kernel(phase: Phase, fusion: Fusion, product: Product) -> RowsFunction:
    kernel, reasons = find(phase, fusion)
    assert kernel is not None, reasons
    return kernel.build(product)


def _axis(node: Node) -> str:
    axis = node.outputs[0].dims[0]
    assert isinstance(axis, str), node
    return axis


def _build(node: Node, product: Product) -> Launch:
    fusion, axis = fusion_of(node.spec), _axis(node)
    assert fusion is not None
    decode, prefill = _kernel("decode", fusion, product), _kernel("prefill", fusion, product)

    def run(batch: Batch, *operands: mx.array) -> list[mx.array]:
        *residual, x = operands
        return batch.rows(axis).dispatch(decode, prefill, x, *residual)

    return run


def build_linear(site: Site, node: Node) -> Launch:
    """LINEAR: x `[T, k]` to y `[T, n]`."""
    return _build(node, Product(_maps(site, (node.spec,), list(node.inputs[1:])), site.act))  # type: ignore[arg-type]


def build_linear_add(site: Site, node: Node) -> Launch:
    """LINEAR_ADD: residual `[T, n]` float32, x `[T, k]`; the sum is rounded once, onto the float32 residual stream."""
    maps = _maps(site, (replace(node.spec.linear, out="f32"),), list(node.inputs[2:]))  # type: ignore[arg-type]
    return _build(node, Product(maps, site.act, alpha=node.spec.scale))


def _build_normed(site: Site, node: Node, specs: tuple[LinearSpec, ...], activation: str | None) -> Launch:
    """A norm and its maps: one launch for rows that decode, the norm apart for others."""
    fusion, eps, axis = fusion_of(node.spec), node.spec.norm.eps, _axis(node)
    assert fusion is not None
    gain = site.vector(node.inputs[1])  # type: ignore[arg-type]
    maps = _maps(site, specs, list(node.inputs[2:]))  # type: ignore[arg-type]
    # The rows of x in the step's arithmetic are what the gain is multiplied with; it is rounded as they would be.
    rounded = evaluated(gain.astype(site.act))
    decode = _kernel("decode", fusion, Product(maps, site.act, activation, rounded, eps))
    parts = [(maps, fusion.maps)] if activation else [((m,), (s,)) for m, s in zip(maps, fusion.maps)]
    products = [_kernel("prefill", Fusion(s, gated=fusion.gated), Product(m, site.act, activation)) for m, s in parts]

    def prefill(x: mx.array) -> list[mx.array]:
        y = mx.fast.rms_norm(x, gain, eps)
        return [result for product in products for result in product(y)]

    def run(batch: Batch, x: mx.array) -> list[mx.array]:
        return batch.rows(axis).dispatch(decode, prefill, x)

    return run


def build_norm_linear(site: Site, node: Node) -> Launch:
    """NORM_LINEAR: one launch for all maps of a decoded row."""
    return _build_normed(site, node, node.spec.linears, None)


def build_norm_gate_up(site: Site, node: Node) -> Launch:
    """NORM_GATE_UP: norm, both maps and the activation in one launch for a decoded row; norm apart for others."""
    spec: NormGateUpSpec = node.spec
    return _build_normed(site, node, (replace(spec.gate, out="act"), replace(spec.up, out="act")), spec.activation)


def _accepts(spec: NormLinearSpec | NormGateUpSpec) -> str | None:
    fusion = fusion_of(spec)
    assert fusion is not None
    kernel, reasons = find("decode", fusion)
    return None if kernel else reasons[-1].partition(": ")[2]


IMPLEMENTATIONS = (
    Implementation(LINEAR, "matvec and matmul", build_linear),
    Implementation(LINEAR_ADD, "matvec and matmul, residual added", build_linear_add),
    Implementation(NORM_LINEAR, "matvec with norm", build_norm_linear, _accepts),
    Implementation(NORM_GATE_UP, "matvec with norm, gate and up", build_norm_gate_up, _accepts),
)
