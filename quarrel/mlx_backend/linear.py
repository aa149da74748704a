"""Linear maps over packed weights, and what is fused with them; see `matvec.py` and `matmul.py` for the kernels.

Rows of sequences that bring one row go through the matrix-vector kernel, however many such rows a step has, all others
through the matrix-matrix one; each sums in an order of its own that depends on nothing but the weight's shape.

MLX's own products are not used. `mx.quantized_matmul` reads none of GGUF's formats as they are but Q4_0 and MXFP4. Its
dense `matmul` has the same 8x8 products as ours on M1 to M4, but splits K by the number of rows, so that a row's result
would depend on the rows beside it, and rounds before a bias or a residual is added.
"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from quarrel.mlx_backend.maps import Job, Map, at_least
from quarrel.mlx_backend.matmul import matmul
from quarrel.mlx_backend.matvec import matvec
from quarrel.mlx_backend.runtime import Launch, Live, Site, evaluated
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

_MOST_MAPS = 4


def _maps(site: Site, specs: tuple[LinearSpec, ...], refs: list[WeightRef]) -> tuple[Map, ...]:
    """The operands of several maps, in the order of the contract: each a weight and its bias, if it has one."""
    maps = []
    for spec in specs:
        weight = site.weight(refs.pop(0))
        maps.append(Map(weight, at_least(site.vector(refs.pop(0))) if spec.bias else None, site.dtype(spec.out)))
    return tuple(maps)


def _axis(node: Node) -> str:
    axis = node.outputs[0].dims[0]
    assert isinstance(axis, str), node
    return axis


def build_linear(site: Site, node: Node) -> Launch:
    """LINEAR: x `[T, k]` to y `[T, n]`."""
    job = Job(_maps(site, (node.spec,), list(node.inputs[1:])), site.act)  # type: ignore[arg-type]
    few, many, axis = matvec(job), matmul(job), _axis(node)

    def run(live: Live, x: mx.array) -> list[mx.array]:
        return live.rows(axis).by_kind(few, many, x)

    return run


def build_linear_add(site: Site, node: Node) -> Launch:
    """LINEAR_ADD: the sum is rounded once, onto the float32 residual stream."""
    spec = replace(node.spec.linear, out="f32")
    job = Job(_maps(site, (spec,), list(node.inputs[2:])), site.act, alpha=node.spec.scale)  # type: ignore[arg-type]
    few, many, axis = matvec(job), matmul(job), _axis(node)

    def run(live: Live, residual: mx.array, x: mx.array) -> list[mx.array]:
        return live.rows(axis).by_kind(few, many, x, residual)

    return run


def _normed(site: Site, node: Node, specs: tuple[LinearSpec, ...], eps: float, activation: str | None) -> Launch:
    gain = site.vector(node.inputs[1])  # type: ignore[arg-type]
    maps = _maps(site, specs, list(node.inputs[2:]))  # type: ignore[arg-type]
    # The rows of x in the step's arithmetic are what the gain is multiplied with; it is rounded as they would be.
    few = matvec(Job(maps, site.act, activation, evaluated(gain.astype(site.act)), eps))
    jobs = [Job(maps, site.act, activation)] if activation else [Job((m,), site.act) for m in maps]
    many, axis = [matmul(job) for job in jobs], _axis(node)

    def several(x: mx.array) -> list[mx.array]:
        y = mx.fast.rms_norm(x, gain, eps)
        return [result for product in many for result in product(y)]

    def run(live: Live, x: mx.array) -> list[mx.array]:
        return live.rows(axis).by_kind(few, several, x)

    return run


def build_norm_linear(site: Site, node: Node) -> Launch:
    """NORM_LINEAR: one launch for all maps of a decoded row."""
    spec: NormLinearSpec = node.spec
    return _normed(site, node, spec.linears, spec.norm.eps, None)


def build_norm_gate_up(site: Site, node: Node) -> Launch:
    """NORM_GATE_UP: norm, both maps and the activation in one launch for a decoded row; norm apart for others."""
    spec: NormGateUpSpec = node.spec
    return _normed(site, node, (replace(spec.gate, out="act"), replace(spec.up, out="act")), spec.norm.eps, spec.activation)


def _accepts_norm(spec: NormLinearSpec | NormGateUpSpec) -> str | None:
    linears = spec.linears if isinstance(spec, NormLinearSpec) else (spec.gate, spec.up)
    if spec.norm.kind != "rms" or spec.norm.groups != 1:
        return f"needs one rms norm of the row, got {spec.norm.kind} norm in {spec.norm.groups} groups"
    if len(linears) > _MOST_MAPS:
        return f"needs at most {_MOST_MAPS} maps, got {len(linears)}"
    return None


IMPLEMENTATIONS = (
    Implementation(LINEAR, "matvec and matmul", build_linear),
    Implementation(LINEAR_ADD, "matvec and matmul, residual added", build_linear_add),
    Implementation(NORM_LINEAR, "matvec with norm", build_norm_linear, _accepts_norm),
    Implementation(NORM_GATE_UP, "matvec with norm, gate and up", build_norm_gate_up, _accepts_norm),
)
