"""The chosen experts of one token: two launches of `matvec_kernels.py`, and one that rounds what is between them where
the first cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from quarrel.ops.contract import Value
from quarrel.ops.moe import EXPERT_DOWN, EXPERT_UP, ExpertDownSpec, ExpertUpSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.triton_backend.experts import experts
from quarrel.triton_backend.experts.choose import Chooses, no_choice
from quarrel.triton_backend.experts.matvec_kernels import down_of_experts, up_of_experts
from quarrel.triton_backend.formats.int8x2 import int8x2_rows, words
from quarrel.triton_backend.formats.table import FLOATS, has_matvec, matvec_planes
from quarrel.triton_backend.linear.matvec_tiles import down_tile_for, up_tile_for
from quarrel.triton_backend.runtime.arrays import Slot
from quarrel.triton_backend.runtime.launch import INTERPRETED, cdiv
from quarrel.triton_backend.runtime.site import Batch, Launch, Site, starts_early

_BLOCKS = 16


def takes(site: Site, spec: ExpertUpSpec | ExpertDownSpec) -> bool:
    """Whether one token's experts have a matvec."""
    return site.compute != "float32" and not site.deterministic and has_matvec(spec.type, spec.k)


def _as_int8x2(site: Site, value: Value, rows: int, k: int, format: str) -> tuple[Slot | torch.Tensor, Launch | None]:
    """What a matvec of this format reads of a value `[1, .., k]` of so many rows, and the launch that makes it, if any."""
    source = site.slot(value)
    if format in FLOATS:
        return source, None
    made = site.int8x2(value)
    if made is not None:
        return made, None
    to = site.scratch("one", rows * words(k), torch.int32)

    def prepare(batch: Batch) -> None:
        _to_int8x2(site, to.tensor, source.tensor, rows, k)

    return to, prepare


def _to_int8x2(site: Site, to: torch.Tensor, source: torch.Tensor, rows: int, k: int) -> None:
    grid = (rows, cdiv(k // 32, _BLOCKS))
    site.launch(int8x2_rows, grid, to, source, K=k, B=_BLOCKS, early=starts_early(site))


def _tensor(x: Slot | torch.Tensor) -> torch.Tensor:
    return x.tensor if isinstance(x, Slot) else x


def build_expert_up(site: Site, node: Node) -> experts.ExpertLaunch:
    """EXPERT_UP: x `[T, k]`, ids `[T, used]`, stacks of matrices, to y `[T, used, n]`."""
    many = experts.build_expert_up(site, node)
    stacks = [site.weight(r) for r in node.inputs[2 : 3 + node.spec.gated]]  # type: ignore[arg-type]
    if not (takes(site, node.spec) and experts.one_format(stacks)):
        return many
    return replace(many, one_row=matvec_up(site, node, site.slot(node.inputs[1])))  # type: ignore[arg-type]


def matvec_up(site: Site, node: Node, ids: Slot | None, chooses: Chooses | None = None) -> Launch:
    """EXPERT_UP of one token, whose experts stand in `ids` or are chosen here; without them it takes all."""
    spec: ExpertUpSpec = node.spec
    x_value, _, *refs = node.inputs
    count = 1 + spec.gated
    stacks = [site.weight(r) for r in refs[:count]]  # type: ignore[arg-type]
    biases = [site.vector(r) for r in refs[count:]]  # type: ignore[arg-type]
    planes = [matvec_planes(s) for s in stacks]
    format = stacks[0].format
    x, prepare = _as_int8x2(site, x_value, 1, spec.k, format)  # type: ignore[arg-type]
    target = node.outputs[0]
    y = site.slot(target)
    to, _ = site.int8x2_target(target)
    tile = up_tile_for(format, spec.n, spec.k)
    # A launch less a layer, for a counter that each program adds to.
    inside = to is not None and tile.rounds and 32 % tile.rows == 0
    arrived = site.zeros("one", spec.used * (spec.n // 32)) if inside else y

    def matvec(batch: Batch) -> None:
        if prepare is not None:
            prepare(batch)
        none = y.tensor
        left, constants = chooses or no_choice(none)
        programs = cdiv(spec.n, tile.rows) + (chooses is not None)
        site.launch(
            up_of_experts, (programs, spec.used), y.tensor, to if inside else none, arrived.tensor,
            _tensor(x), none if ids is None else ids.tensor, left(), planes[0], planes[-1], biases[0] if biases else none,
            biases[-1] if biases else none, spec.n, **constants, LEFT=chooses is not None, K=spec.k,
            F=spec.n if inside else 32, FORMAT=format, GATED=spec.gated,
            KIND=spec.activation, BIAS=spec.bias, R=tile.rows, W=tile.words, D=tile.tiles, FIXED=ids is None, INT8X2=inside,
            ASM=not INTERPRETED, warps=tile.warps, early=starts_early(site),
        )  # fmt: skip
        if to is not None and not inside:
            _to_int8x2(site, to, y.tensor, spec.used, spec.n)

    return matvec


def build_expert_down(site: Site, node: Node) -> experts.ExpertLaunch:
    """EXPERT_DOWN: y `[T, used, k]`, ids and weights `[T, used]`, a stack of matrices, to out `[T, n]` float32."""
    many = experts.build_expert_down(site, node)
    if not takes(site, node.spec):
        return many
    return replace(many, one_row=matvec_down(site, node, node.outputs[0], None, 1.0))


def matvec_down(
    site: Site, node: Node, target: Value, residual: Value | None, alpha: float, chooses: Chooses | None = None
) -> Launch:
    """EXPERT_DOWN of one token into `target`, added to a residual stream if there is one."""
    spec: ExpertDownSpec = node.spec
    y, ids_value, shares_value, down, *rest = node.inputs
    stack = site.weight(down)  # type: ignore[arg-type]
    bias = site.vector(rest[0]) if spec.bias else None  # type: ignore[arg-type]
    planes = matvec_planes(stack)
    x, prepare = _as_int8x2(site, y, spec.used, spec.k, stack.format)  # type: ignore[arg-type]
    ids, shares, out = site.slot(ids_value), site.slot(shares_value), site.slot(target)  # type: ignore[arg-type]
    added = None if residual is None else site.slot(residual)
    tile = down_tile_for(stack.format, spec.n, spec.k, spec.used)
    stride = spec.k if stack.format in FLOATS else words(spec.k)

    def matvec(batch: Batch) -> None:
        if prepare is not None:
            prepare(batch)
        left, constants = chooses or no_choice(shares.tensor)
        site.launch(
            down_of_experts, (cdiv(spec.n, tile.rows),), out.tensor, _tensor(x), ids.tensor, shares.tensor, left(), planes,
            out.tensor if bias is None else bias, out.tensor if added is None else added.tensor, alpha, spec.n,
            LEFT=chooses is not None, S=constants["S"], X_STRIDE=stride, K=spec.k, USED=spec.used,
            FORMAT=stack.format, BIAS=spec.bias, ADD=added is not None, R=tile.rows, W=tile.words, D=tile.tiles,
            ASM=not INTERPRETED, warps=tile.warps, early=starts_early(site),
        )  # fmt: skip

    return matvec


def _bodies(name: str) -> Sequence[Implementation]:
    return [i for i in experts.IMPLEMENTATIONS if i.op.name == name]


IMPLEMENTATIONS = (
    Implementation(EXPERT_UP, "matvecs of the chosen, or grouped tiles", build_expert_up, _bodies("expert_up")[0].accepts),
    Implementation(EXPERT_DOWN, "matvecs of the chosen, added in order, or grouped tiles", build_expert_down),
)
