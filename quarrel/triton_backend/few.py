"""Linear maps and what is fused around them, for a step of one row: matvecs over packed weights (`matvec.py`).

Steps of more rows, and arithmetic in float32, go to the tiles of `linear.py`, after the norm that a composite begins with.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from quarrel.triton_backend import linear, norm
from quarrel.triton_backend.dots import FLOATS, WORDS
from quarrel.triton_backend.few_tiles import Walk, gate_tile_for, multiprocessors, tile_for, tiles_for, walk_for
from quarrel.triton_backend.halved import halve_rows, norm_halve_rows, words
from quarrel.triton_backend.inner import expanded
from quarrel.triton_backend.matvec import gate_up, matvec, matvec3, wide
from quarrel.triton_backend.pack import Packed
from quarrel.triton_backend.runtime import (
    DTYPES,
    INTERPRETED,
    Launch,
    Live,
    Site,
    Slot,
    cdiv,
    dims,
    power_of_two,
    starts_early,
)
from quarrel.triton_backend.stream import stream_gate_up

_HALVE_BLOCKS = 16
MAX_NORM = 16384
"""A norm of one row is one program."""
ACTIVATIONS = ("silu", "gelu_tanh")


def takes(site: Site, lin: LinearSpec) -> bool:
    """Whether a step of one row has a matvec for it."""
    name = lin.type.name
    here = site.compute != "float32" and not site.deterministic
    return here and (name in FLOATS or (name in WORDS and lin.k % 32 == 0))


@dataclass(frozen=True)
class Row:
    """One row of activations: plain, halved, or both."""

    plain: Slot
    halved: torch.Tensor | Slot | None

    def of(self, format: str) -> torch.Tensor:
        if format in FLOATS:
            return self.plain.tensor
        assert self.halved is not None
        return self.halved.tensor if isinstance(self.halved, Slot) else self.halved


@dataclass(frozen=True)
class Map:
    """A weight, its bias, and what kernels read of them."""

    weight: Packed
    bias: torch.Tensor | None
    planes: tuple[torch.Tensor, ...]


def _map(site: Site, refs: Sequence[WeightRef]) -> Map:
    weight = site.weight(refs[0])
    bias = site.vector(refs[1]) if len(refs) > 1 else None
    return Map(weight, bias, wide(weight.format, weight.planes))


def _row(site: Site, value: Value, format: str) -> tuple[Row, Launch | None]:
    """A value as a matvec reads it, and the launch that halves it if its maker did not."""
    source = site.slot(value)
    if format in FLOATS:
        return Row(source, None), None
    made = site.halved(value)
    if made is not None:
        return Row(source, made), None
    _, k = dims(value)
    to = site.scratch("one", words(k), torch.int32)

    def halve(live: Live) -> None:
        grid = (1, cdiv(k // 32, _HALVE_BLOCKS))
        site.launch(halve_rows, grid, to.tensor, source.tensor, K=k, B=_HALVE_BLOCKS, early=starts_early(site))

    return Row(source, to), halve


def _one(site: Site, m: Map, row: Row, y: Slot, residual: Slot | None, alpha: float) -> None:
    w = m.weight
    tile = tile_for(w.format, w.n, w.k)
    none = y.tensor
    site.launch(
        matvec, (cdiv(w.n, tile.rows),), y.tensor, row.of(w.format), *m.planes, none if m.bias is None else m.bias,
        none if residual is None else residual.tensor, alpha, w.n, K=w.k, FORMAT=w.format, BIAS=m.bias is not None,
        ADD=residual is not None, R=tile.rows, W=tile.words, DEEP=tile.deep, ASM=not INTERPRETED, warps=tile.warps,
        early=starts_early(site),
    )  # fmt: skip


def _three(site: Site, maps: Sequence[Map], row: Row, ys: Sequence[Slot]) -> None:
    """Up to three maps of one row and one K; a third that is missing has no rows."""
    tiles = tiles_for([m.weight.format for m in maps], sum(m.weight.n for m in maps), maps[0].weight.k)
    rows, warps = tiles[0].rows, tiles[0].warps
    programs = sum(cdiv(m.weight.n, rows) for m in maps)
    ns = [m.weight.n for m in maps] + [0] * (3 - len(maps))
    maps, ys, tiles = ([*part, *part[-1:] * (3 - len(part))] for part in (maps, ys, tiles))  # type: ignore[assignment]
    a, b, c = (m.weight.format for m in maps)
    y = [s.tensor for s in ys]
    biases = [y[i] if m.bias is None else m.bias for i, m in enumerate(maps)]
    site.launch(
        matvec3, (programs,), *y, row.of(a), row.of(b), row.of(c), *maps[0].planes, *maps[1].planes, *maps[2].planes,
        *biases, *ns, K=maps[0].weight.k, F0=a, F1=b, F2=c, BIAS=maps[0].bias is not None, R=rows, W0=tiles[0].words,
        W1=tiles[1].words, W2=tiles[2].words, DEEP=tiles[0].deep, ASM=not INTERPRETED, warps=warps,
        early=starts_early(site),
    )  # fmt: skip


def _either(value: Value, few: Launch, many: Launch) -> Launch:
    axis, _ = dims(value)

    def run(live: Live) -> None:
        (few if live.count(axis) == 1 else many)(live)

    return run


def build_linear(site: Site, node: Node) -> Launch:
    """LINEAR: x `[T, k]` to y `[T, n]`."""
    spec: LinearSpec = node.spec
    many = linear.build_linear(site, node)
    x, *refs = node.inputs
    return many if not takes(site, spec) else _build(site, node, many, x, refs, None, 1.0)


def build_linear_add(site: Site, node: Node) -> Launch:
    """LINEAR_ADD: the sum is rounded once, onto the float32 residual stream."""
    spec: LinearSpec = node.spec.linear
    many = linear.build_linear_add(site, node)
    residual, x, *refs = node.inputs
    if not takes(site, spec):
        return many
    return _build(site, node, many, x, refs, residual, node.spec.scale)


def _build(site: Site, node: Node, many: Launch, x: Any, refs: Any, residual: Any, alpha: float) -> Launch:
    m = _map(site, refs)
    row, halve = _row(site, x, m.weight.format)
    target = node.outputs[0]
    y = site.slot(target)
    added = None if residual is None else site.slot(residual)

    def few(live: Live) -> None:
        if halve is not None:
            halve(live)
        _one(site, m, row, y, added, alpha)

    return _either(target, few, many)


def _normed(site: Site, spec: NormSpec, inputs: Sequence[Any], formats: Sequence[str]) -> tuple[Row, Launch]:
    """The norm of one row as these formats read it, in one launch."""
    source, gain = site.slot(inputs[0]), site.vector(inputs[1])
    halves, plain = any(f in WORDS for f in formats), any(f in FLOATS for f in formats)
    to = site.scratch("one", words(spec.k), torch.int32)
    y = site.scratch("one", spec.k, DTYPES[site.compute])

    def run(live: Live) -> None:
        norm_row(site, spec, source.tensor, gain, to.tensor if halves else None, y.tensor if plain else None)

    return Row(y, to), run


def norm_row(
    site: Site, spec: NormSpec, x: torch.Tensor, gain: torch.Tensor, to: torch.Tensor | None, y: torch.Tensor | None
) -> None:
    """RMS norm of one row, halved into `to`, plain into `y`, or both."""
    site.launch(
        norm_halve_rows, (1,), x if to is None else to, x if y is None else y, x, gain, spec.eps, K=spec.k,
        B=power_of_two(cdiv(spec.k, 32)), HALVED=to is not None, PLAIN=y is not None,
        warps=8 if spec.k >= 2048 else 4 if spec.k >= 1024 else 2, early=starts_early(site),
    )  # fmt: skip


def can_norm(spec: NormSpec) -> bool:
    """Whether `norm_row` does it."""
    return spec.kind == "rms" and spec.groups == 1 and spec.k % 32 == 0 and spec.k <= MAX_NORM


def build_norm_linear(site: Site, node: Node) -> Launch:
    """NORM_LINEAR: x `[T, k]`, gain `[k]`, up to three weights a launch."""
    spec: NormLinearSpec = node.spec
    many = expanded(site, node)
    if not can_norm(spec.norm) or not all(takes(site, lin) for lin in spec.linears):
        return many
    taken = len(norm_params(spec.norm))
    rest: list[Any] = list(node.inputs[taken:])
    maps = []
    for lin in spec.linears:
        count = len(linear_params(lin)) - 1
        maps.append(_map(site, rest[:count]))
        del rest[:count]
    ys = [site.slot(v) for v in node.outputs]
    row, normed = _normed(site, spec.norm, node.inputs, [m.weight.format for m in maps])
    # One launch has either biases throughout or none.
    groups = [
        chosen[i : i + 3]
        for bias in (False, True)
        for chosen in [[j for j, m in enumerate(maps) if (m.bias is not None) == bias]]
        for i in range(0, len(chosen), 3)
    ]

    def few(live: Live) -> None:
        normed(live)
        for group in groups:
            if len(group) == 1:
                _one(site, maps[group[0]], row, ys[group[0]], None, 1.0)
            else:
                _three(site, [maps[j] for j in group], row, [ys[j] for j in group])

    return _either(node.outputs[0], few, many)


def build_norm_gate_up(site: Site, node: Node) -> Launch:
    """NORM_GATE_UP: x `[T, k]` to act(gate norm(x)) * up norm(x), `[T, F]`."""
    spec: NormGateUpSpec = node.spec
    many = expanded(site, node)
    if not can_norm(spec.norm) or not takes(site, spec.gate):
        return many
    taken = len(norm_params(spec.norm))
    count = len(linear_params(spec.gate)) - 1
    rest: Any = node.inputs[taken:]
    gate, up = _map(site, rest[:count]), _map(site, rest[count:])
    w = gate.weight
    target = node.outputs[0]
    y = site.slot(target)
    halved, _ = site.to_halve(target)
    walk = walk_for(w.format, w.n, w.k)
    go = _gate_up(site, spec, node, gate, up, y) if walk is None else _walk_gate_up(site, spec, node, walk, gate, up, y)

    def few(live: Live) -> None:
        go(live)
        if halved is not None:
            grid = (1, cdiv(w.n // 32, _HALVE_BLOCKS))
            site.launch(halve_rows, grid, halved, y.tensor, K=w.n, B=_HALVE_BLOCKS, early=starts_early(site))

    return _either(target, few, many)


def _gate_up(site: Site, spec: NormGateUpSpec, node: Node, gate: Map, up: Map, y: Slot) -> Launch:
    w = gate.weight
    tile = gate_tile_for(w.format, w.n, w.k)
    row, normed = _normed(site, spec.norm, node.inputs, [w.format])

    def run(live: Live) -> None:
        normed(live)
        biases = [y.tensor if m.bias is None else m.bias for m in (gate, up)]
        site.launch(
            gate_up, (cdiv(w.n, tile.rows),), y.tensor, row.of(w.format), *gate.planes, *up.planes, *biases, w.n, K=w.k,
            FORMAT=w.format, KIND=spec.activation, BIAS=gate.bias is not None, R=tile.rows, W=tile.words,
            ASM=not INTERPRETED, warps=tile.warps, early=starts_early(site),
        )  # fmt: skip

    return run


def _walk_gate_up(site: Site, spec: NormGateUpSpec, node: Node, walk: Walk, gate: Map, up: Map, y: Slot) -> Launch:
    w = gate.weight
    source, gain = site.slot(node.inputs[0]), site.vector(node.inputs[1])  # type: ignore[arg-type]
    programs = min(cdiv(w.n, walk.rows), walk.each * multiprocessors(gain.device))

    def run(live: Live) -> None:
        biases = [gain if m.bias is None else m.bias for m in (gate, up)]
        site.launch(
            stream_gate_up, (programs,), y.tensor, source.tensor, gain, spec.norm.eps, gate.planes[0], up.planes[0],
            *biases, w.n, K=w.k, FORMAT=w.format, KIND=spec.activation, BIAS=gate.bias is not None, R=walk.rows,
            W=walk.words, ASM=not INTERPRETED, warps=walk.warps, early=starts_early(site),
        )  # fmt: skip

    return run


def build_norm(site: Site, node: Node) -> Launch:
    """NORM: as `norm.py`, and halved for whoever reads it so."""
    spec: NormSpec = node.spec
    many = norm.build_norm(site, node)
    target = node.outputs[0]
    if spec.groups != 1 or not can_norm(spec):
        return many
    source, gain, y = site.slot(node.inputs[0]), site.vector(node.inputs[1]), site.slot(target)  # type: ignore[arg-type]
    halved, plain = site.to_halve(target)

    def few(live: Live) -> None:
        norm_row(site, spec, source.tensor, gain, halved, y.tensor if plain else None)

    return many if halved is None else _either(target, few, many)


def _accepts_maps(spec: NormLinearSpec) -> str | None:
    return None if spec.norm.kind == "rms" and spec.norm.groups == 1 else "needs one RMS norm of the whole row"


def _accepts_gate(spec: NormGateUpSpec) -> str | None:
    if spec.activation not in ACTIVATIONS:
        return f"needs one of the activations {', '.join(ACTIVATIONS)}, got {spec.activation}"
    if (spec.gate.type, spec.gate.bias, spec.gate.n) != (spec.up.type, spec.up.bias, spec.up.n):
        return f"needs gate and up of one type and shape, got {replace(spec.gate)} and {replace(spec.up)}"
    return _accepts_maps(NormLinearSpec(spec.norm, ()))


IMPLEMENTATIONS = (
    Implementation(LINEAR, "matvec, or tiles", build_linear),
    Implementation(LINEAR_ADD, "matvec or tiles, residual added", build_linear_add),
    Implementation(NORM_LINEAR, "norm, then up to three matvecs a launch, or tiles", build_norm_linear, _accepts_maps),
    Implementation(NORM_GATE_UP, "norm, then gate and up in one launch, or tiles", build_norm_gate_up, _accepts_gate),
    Implementation(NORM, "rows, halved for matvecs", build_norm, norm._accepts),
)
