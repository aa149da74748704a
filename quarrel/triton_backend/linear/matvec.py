"""Linear maps and what is fused around them: the matvecs of one row, and the ops that `kernels.py` computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from quarrel.ops.contract import Value, WeightRef
from quarrel.ops.linear import (
    LINEAR,
    LINEAR_ADD,
    NORM_GATE_UP,
    NORM_LINEAR,
    LinearSpec,
    NormGateUpSpec,
    NormLinearSpec,
    linear_params,
)
from quarrel.ops.norm import NORM, NormSpec, norm_params
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.triton_backend.elementwise import norm
from quarrel.triton_backend.formats.int8x2 import int8x2_rows, norm_int8x2_rows, words
from quarrel.triton_backend.formats.table import FLOATS, INTEGERS, by_name, has_matvec, matvec_planes
from quarrel.triton_backend.linear import own_row
from quarrel.triton_backend.linear.composite import maps_of
from quarrel.triton_backend.linear.kernels import WITHOUT_COPIES, ByRows
from quarrel.triton_backend.linear.maps import Maps
from quarrel.triton_backend.linear.matvec_kernels import gate_up, matvec, matvecs, norm_gate_up
from quarrel.triton_backend.linear.matvec_tiles import Walk, gate_tile_for, multiprocessors, tile_for, tiles_for, walk_for
from quarrel.triton_backend.runtime.arrays import DTYPES, Packed, Planes, Slot
from quarrel.triton_backend.runtime.launch import INTERPRETED, cdiv, power_of_two
from quarrel.triton_backend.runtime.site import Batch, Launch, Site, dims, starts_early

_BLOCKS = 16
_AT_ONCE = 4
"""Maps of one row in a launch."""
MAX_NORM = 16384
"""A norm of one row is one program."""
ACTIVATIONS = ("silu", "gelu_tanh")
Fill = Callable[[torch.Tensor], None]
"""Launches what leaves the normalised row that maps read, as int8x2, in a tensor."""


def takes(site: Site, lin: LinearSpec) -> bool:
    """Whether a step of one row has a matvec for it."""
    return site.compute != "float32" and not site.deterministic and has_matvec(lin.type, lin.k)


@dataclass(frozen=True)
class Row:
    """One row of activations: plain, int8x2, or both."""

    plain: Slot
    int8x2: torch.Tensor | Slot | None

    def of(self, format: str) -> torch.Tensor:
        if format in FLOATS:
            return self.plain.tensor
        assert self.int8x2 is not None
        return self.int8x2.tensor if isinstance(self.int8x2, Slot) else self.int8x2


@dataclass(frozen=True)
class Map:
    """A weight, its bias, and what kernels read of them."""

    weight: Packed
    bias: torch.Tensor | None
    planes: Planes


def _map(site: Site, refs: Sequence[WeightRef]) -> Map:
    weight = site.weight(refs[0])
    bias = site.vector(refs[1]) if len(refs) > 1 else None
    return Map(weight, bias, weight.planes if by_name(weight.format).dots is None else matvec_planes(weight))


def _row(site: Site, value: Value, format: str) -> tuple[Row, Launch | None]:
    """A value as a matvec reads it, and the launch that makes it so if its maker did not."""
    source = site.slot(value)
    if format in FLOATS:
        return Row(source, None), None
    made = site.int8x2(value)
    if made is not None:
        return Row(source, made), None
    _, k = dims(value)
    to = site.scratch("one", words(k), torch.int32)

    def prepare(batch: Batch) -> None:
        grid = (1, cdiv(k // 32, _BLOCKS))
        site.launch(int8x2_rows, grid, to.tensor, source.tensor, K=k, B=_BLOCKS, early=starts_early(site))

    return Row(source, to), prepare


def _one(site: Site, m: Map, row: Row, y: Slot, residual: Slot | None, alpha: float) -> None:
    w = m.weight
    tile = tile_for(w.format, w.n, w.k)
    none = y.tensor
    site.launch(
        matvec, (cdiv(w.n, tile.rows),), y.tensor, row.of(w.format), m.planes, none if m.bias is None else m.bias,
        none if residual is None else residual.tensor, alpha, w.n, K=w.k, FORMAT=w.format, BIAS=m.bias is not None,
        ADD=residual is not None, R=tile.rows, W=tile.words, DEEP=tile.deep, ASM=not INTERPRETED, warps=tile.warps,
        early=starts_early(site),
    )  # fmt: skip


def _several(site: Site, maps: Sequence[Map], row: Row, ys: Sequence[Slot]) -> None:
    """Two to four maps of one row and one K; a third that is missing has no rows."""
    tiles = tiles_for([m.weight.format for m in maps], sum(m.weight.n for m in maps), maps[0].weight.k)
    rows, warps = tiles[0].rows, tiles[0].warps
    programs = sum(cdiv(m.weight.n, rows) for m in maps)
    ns = [m.weight.n for m in maps] + [0] * (3 - len(maps))
    maps, ys, tiles = ([*part, *part[-1:] * (3 - len(part))] for part in (maps, ys, tiles))  # type: ignore[assignment]
    formats = tuple(m.weight.format for m in maps)
    y = tuple(s.tensor for s in ys)
    site.launch(
        matvecs, (programs,), y, tuple(row.of(f) for f in formats), tuple(m.planes for m in maps),
        tuple(y[i] if m.bias is None else m.bias for i, m in enumerate(maps)), tuple(ns), K=maps[0].weight.k,
        FORMATS=formats, BIAS=maps[0].bias is not None, R=rows, WORDS=tuple(t.words for t in tiles), DEEP=tiles[0].deep,
        ASM=not INTERPRETED, warps=warps, early=starts_early(site),
    )  # fmt: skip


def build_linear(site: Site, node: Node) -> Launch:
    """LINEAR: x `[T, k]` to y `[T, n]`."""
    x, *refs = node.inputs
    return _linear(site, node, node.spec, x, refs)


def build_without_matvec(site: Site, node: Node) -> Launch:
    """LINEAR of a value that no norm leaves as int8x2."""
    x, *refs = node.inputs
    return _linear(site, node, node.spec, x, refs, one_row=False)


def build_linear_add(site: Site, node: Node) -> Launch:
    """LINEAR_ADD: the sum is rounded once, onto the float32 residual stream."""
    residual, x, *refs = node.inputs
    return _linear(site, node, node.spec.linear, x, refs, site.slot(residual), node.spec.scale)  # type: ignore[arg-type]


def _linear(
    site: Site, node: Node, spec: LinearSpec, x: Any, refs: Any, residual: Slot | None = None, alpha: float = 1.0,
    one_row: bool = True,
) -> Launch:  # fmt: skip
    m, target = _map(site, refs), node.outputs[0]
    y, matvec = site.slot(target), None
    if one_row and takes(site, spec):
        row, prepare = _row(site, x, m.weight.format)

        def matvec(batch: Batch) -> None:
            if prepare is not None:
                prepare(batch)
            _one(site, m, row, y, residual, alpha)

    axis, _ = dims(target)
    left = None if residual is None else site.left_parts(target)
    return ByRows(site, Maps(site.slot(x), [y], [m.weight], [m.bias], axis, residual, alpha, left=left, matvec=matvec))


def build_gate_and_up(site: Site, maps: Sequence[Node], activation: Node) -> Launch:
    """Two LINEAR of one x and the GATED behind them, of several rows."""
    x, target = maps[0].inputs[0], activation.outputs[0]
    axis, _ = dims(target)
    weights = [site.weight(node.inputs[1]) for node in maps]  # type: ignore[arg-type]
    biases = [site.vector(node.inputs[2]) if node.spec.bias else None for node in maps]  # type: ignore[arg-type]
    made = Maps(site.slot(x), [site.slot(target)], weights, biases, axis, activation=activation.spec.activation)  # type: ignore[arg-type]
    return ByRows(site, made, WITHOUT_COPIES)


def _normed(
    site: Site, spec: NormSpec, inputs: Sequence[Any], formats: Sequence[str], fill: Fill | None = None
) -> tuple[Row, Launch]:
    """The norm of one row as these formats read it, in one launch: `fill`, or that of the norm alone."""
    source, gain = site.slot(inputs[0]), site.vector(inputs[1])
    int8x2, plain = any(f in INTEGERS for f in formats), any(f in FLOATS for f in formats)
    to = site.scratch("one", words(spec.k), torch.int32)
    y = site.scratch("one", spec.k, DTYPES[site.compute])
    if fill is not None:
        return Row(y, to), lambda batch: fill(to.tensor)

    def run(batch: Batch) -> None:
        norm_row(site, spec, source.tensor, gain, to.tensor if int8x2 else None, y.tensor if plain else None)

    return Row(y, to), run


def norm_row(
    site: Site, spec: NormSpec, x: torch.Tensor, gain: torch.Tensor, to: torch.Tensor | None, y: torch.Tensor | None
) -> None:
    """RMS norm of one row, int8x2 into `to`, plain into `y`, or both."""
    site.launch(
        norm_int8x2_rows, (1,), x if to is None else to, x if y is None else y, x, gain, spec.eps, K=spec.k,
        B=power_of_two(cdiv(spec.k, 32)), INT8X2=to is not None, PLAIN=y is not None,
        warps=8 if spec.k >= 2048 else 4 if spec.k >= 1024 else 2, early=starts_early(site),
    )  # fmt: skip


def row_builder(node: Node) -> Callable[[Site, Fill], Launch] | None:
    """How a node is built for one row whose norm, which it begins with, somebody leaves as int8x2: if all its maps read it
    so."""
    if node.op is NORM_LINEAR:
        linears, build = node.spec.linears, norm_linear_row
    elif node.op is NORM_GATE_UP:
        linears, build = (node.spec.gate, node.spec.up), norm_gate_up_row
    else:
        return None
    fits = can_norm(node.spec.norm) and all(lin.type.name in INTEGERS and has_matvec(lin.type, lin.k) for lin in linears)
    return (lambda site, fill: build(site, node, fill)) if fits else None


def can_norm(spec: NormSpec) -> bool:
    """Whether `norm_row` does it."""
    return spec.kind == "rms" and spec.groups == 1 and spec.k % 32 == 0 and spec.k <= MAX_NORM


def build_norm_linear(site: Site, node: Node) -> Launch:
    """NORM_LINEAR: x `[T, k]`, gain `[k]`, up to four weights a launch."""
    spec: NormLinearSpec = node.spec
    several = maps_of(site, node)
    if not can_norm(spec.norm) or not all(takes(site, lin) for lin in spec.linears):
        return ByRows(site, several)
    return ByRows(site, replace(several, matvec=norm_linear_row(site, node)))


def norm_linear_row(site: Site, node: Node, fill: Fill | None = None) -> Launch:
    """NORM_LINEAR of one row."""
    spec: NormLinearSpec = node.spec
    taken = len(norm_params(spec.norm))
    rest: list[Any] = list(node.inputs[taken:])
    maps = []
    for lin in spec.linears:
        count = len(linear_params(lin)) - 1
        maps.append(_map(site, rest[:count]))
        del rest[:count]
    ys = [site.slot(v) for v in node.outputs]
    if fill is None and len(maps) == 1 and own_row.takes_norm(maps[0].weight.format, maps[0].weight.n, spec.norm.k):
        source, gain = site.slot(node.inputs[0]), site.vector(node.inputs[1])  # type: ignore[arg-type]
        return own_row.build_norm(site, spec.norm, source, gain, ys[0], maps[0].weight, maps[0].bias)
    row, normed = _normed(site, spec.norm, node.inputs, [m.weight.format for m in maps], fill)
    # One launch has either biases throughout or none.
    groups = [
        chosen[i : i + _AT_ONCE]
        for bias in (False, True)
        for chosen in [[j for j, m in enumerate(maps) if (m.bias is not None) == bias]]
        for i in range(0, len(chosen), _AT_ONCE)
    ]

    def one_row(batch: Batch) -> None:
        normed(batch)
        for group in groups:
            if len(group) == 1:
                _one(site, maps[group[0]], row, ys[group[0]], None, 1.0)
            else:
                _several(site, [maps[j] for j in group], row, [ys[j] for j in group])

    return one_row


def build_norm_gate_up(site: Site, node: Node) -> Launch:
    """NORM_GATE_UP: x `[T, k]` to act(gate norm(x)) * up norm(x), `[T, F]`."""
    spec: NormGateUpSpec = node.spec
    several = maps_of(site, node)
    if not can_norm(spec.norm) or not takes(site, spec.gate):
        return ByRows(site, several)
    return ByRows(site, replace(several, matvec=norm_gate_up_row(site, node)))


def norm_gate_up_row(site: Site, node: Node, fill: Fill | None = None) -> Launch:
    """NORM_GATE_UP of one row."""
    spec: NormGateUpSpec = node.spec
    taken = len(norm_params(spec.norm))
    count = len(linear_params(spec.gate)) - 1
    rest: Any = node.inputs[taken:]
    gate, up = _map(site, rest[:count]), _map(site, rest[count:])
    w = gate.weight
    target = node.outputs[0]
    y = site.slot(target)
    int8x2, _ = site.int8x2_target(target)
    walk = walk_for(w.format, w.n, w.k)
    if walk is None:
        go = _gate_up(site, spec, node, gate, up, y, fill)
    else:
        assert fill is None, "programs that walk compute the norm"
        go = _walk_gate_up(site, spec, node, walk, gate, up, y)

    def one_row(batch: Batch) -> None:
        go(batch)
        if int8x2 is not None:
            grid = (1, cdiv(w.n // 32, _BLOCKS))
            site.launch(int8x2_rows, grid, int8x2, y.tensor, K=w.n, B=_BLOCKS, early=starts_early(site))

    return one_row


def _gate_up(site: Site, spec: NormGateUpSpec, node: Node, gate: Map, up: Map, y: Slot, fill: Fill | None = None) -> Launch:
    w = gate.weight
    tile = gate_tile_for(w.format, w.n, w.k)
    row, normed = _normed(site, spec.norm, node.inputs, [w.format], fill)

    def run(batch: Batch) -> None:
        normed(batch)
        biases = [y.tensor if m.bias is None else m.bias for m in (gate, up)]
        site.launch(
            gate_up, (cdiv(w.n, tile.rows),), y.tensor, row.of(w.format), gate.planes, up.planes, *biases, w.n, K=w.k,
            FORMAT=w.format, KIND=spec.activation, BIAS=gate.bias is not None, R=tile.rows, W=tile.words,
            ASM=not INTERPRETED, warps=tile.warps, early=starts_early(site),
        )  # fmt: skip

    return run


def _walk_gate_up(site: Site, spec: NormGateUpSpec, node: Node, walk: Walk, gate: Map, up: Map, y: Slot) -> Launch:
    w = gate.weight
    source, gain = site.slot(node.inputs[0]), site.vector(node.inputs[1])  # type: ignore[arg-type]
    programs = min(cdiv(w.n, walk.rows), walk.each * multiprocessors(gain.device))

    def run(batch: Batch) -> None:
        biases = [gain if m.bias is None else m.bias for m in (gate, up)]
        site.launch(
            norm_gate_up, (programs,), y.tensor, source.tensor, gain, spec.norm.eps, gate.planes.codes, up.planes.codes,
            *biases, w.n, K=w.k, FORMAT=w.format, KIND=spec.activation, BIAS=gate.bias is not None, R=walk.rows,
            W=walk.words, ASM=not INTERPRETED, warps=walk.warps, early=starts_early(site),
        )  # fmt: skip

    return run


def build_norm(site: Site, node: Node) -> Launch:
    """NORM: as `norm.py`, and int8x2 for whoever reads it so."""
    spec: NormSpec = node.spec
    many = norm.build_norm(site, node)
    target = node.outputs[0]
    if spec.groups != 1 or not can_norm(spec):
        return many
    source, gain, y = site.slot(node.inputs[0]), site.vector(node.inputs[1]), site.slot(target)  # type: ignore[arg-type]
    int8x2, plain = site.int8x2_target(target)

    def one_row(batch: Batch) -> None:
        norm_row(site, spec, source.tensor, gain, int8x2, y.tensor if plain else None)

    if int8x2 is None:
        return many
    axis, _ = dims(target)
    return lambda batch: (one_row if batch.count(axis) == 1 else many)(batch)


def _accepts_maps(spec: NormLinearSpec) -> str | None:
    return None if spec.norm.kind == "rms" and spec.norm.groups == 1 else "needs one RMS norm of the whole row"


def _accepts_gate(spec: NormGateUpSpec) -> str | None:
    if spec.activation not in ACTIVATIONS:
        return f"needs one of the activations {', '.join(ACTIVATIONS)}, got {spec.activation}"
    if (spec.gate.type, spec.gate.bias, spec.gate.n) != (spec.up.type, spec.up.bias, spec.up.n):
        return f"needs gate and up of one type and shape, got {replace(spec.gate)} and {replace(spec.up)}"
    return _accepts_maps(NormLinearSpec(spec.norm, ()))


WITHOUT_MATVEC = Implementation(LINEAR, "linear maps", build_without_matvec)
IMPLEMENTATIONS = (
    Implementation(LINEAR, "linear maps", build_linear),
    Implementation(LINEAR_ADD, "linear maps, residual added", build_linear_add),
    Implementation(NORM_LINEAR, "norm, then linear maps", build_norm_linear, _accepts_maps),
    Implementation(NORM_GATE_UP, "norm, then gate and up", build_norm_gate_up, _accepts_gate),
    Implementation(NORM, "rows, as int8x2 for matvecs", build_norm, norm._accepts),
)
