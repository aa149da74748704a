"""One model on several devices: a narrower spec and cut tensors for each rank; `assemble` makes its program of them.

What reads the residual stream is cut by rows, what writes it by columns, so that a half of a layer ends in one sum over the
ranks. A half that cannot be cut is computed whole by every rank; where much of a model is like that, or where asked for,
ranks hold whole layers instead and hand the stream on. In a pipeline the ranks of a stage cut its layers alike.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from quarrel.errors import RequestError
from quarrel.models.collectives import with_collectives
from quarrel.models.cut import Cut, CutTensors, Cutter
from quarrel.models.feedforward import FEED_FORWARDS
from quarrel.models.mixers import MIXERS
from quarrel.models.spec import Layer, ModelSpec
from quarrel.models.stages import place_of, stage_of
from quarrel.models.tensors import Tensors
from quarrel.ops.program import Program

Split = Literal["auto", "tensor", "layers"]
MOST_WHOLE = 0.25
"""Of a model's layers, what every rank may compute whole."""


class RankTensors(CutTensors):
    """The tensors of a rank; what is traced on them becomes its program."""

    owners: tuple[int, ...] | None = None
    """Which rank computes each layer, where whole layers are divided."""

    stage: int | None = None
    """Which of the owners this rank is one of, where it computes nothing else."""

    def traced(self, program: Program) -> Program:
        if self.stage is None or self.owners is None:
            return with_collectives(program, self, self.owners)
        return stage_of(with_collectives(program, self) if self.ranks > 1 else program, self.owners, self.stage)


def shard(
    spec: ModelSpec, tensors: Tensors, rank: int, ranks: int, split: Split = "auto", stages: int = 1
) -> tuple[ModelSpec, RankTensors]:
    """The spec and the tensors of one rank. Raises RequestError.

    stages: those of a pipeline, of `ranks // stages` ranks each, which cut its layers as tensors; see `place_of`.
    """
    if ranks < 2 or not 0 <= rank < ranks or ranks % stages:
        raise RequestError(f"rank {rank} of {ranks} in {stages} stages is none: wanted 2 ranks or more, counted from 0")
    if stages > 1:
        stage, member = place_of(rank, ranks, stages)
        cuts: dict[str, Cut] = {}
        width, layers = ranks // stages, spec.layers
        if width > 1:
            layers = tuple(_cut(spec, tensors, il, layer, member, width, cuts)[0] for il, layer in enumerate(layers))
        parts = RankTensors(tensors, cuts, member, width)
        parts.owners, parts.stage = _owners(spec, tensors, stages), stage
        return replace(spec, layers=layers), parts
    if split != "layers":
        cuts = {}
        cut = [_cut(spec, tensors, il, layer, rank, ranks, cuts) for il, layer in enumerate(spec.layers)]
        whole, total = sum(size for _, size in cut), sum(_sizes(spec, tensors))
        if split == "tensor" or whole <= MOST_WHOLE * total or len(cut) < ranks:
            return replace(spec, layers=tuple(layer for layer, _ in cut)), RankTensors(tensors, cuts, rank, ranks)
    parts = RankTensors(tensors, {}, rank, ranks)
    parts.owners = _owners(spec, tensors, ranks)
    return spec, parts


def _owners(spec: ModelSpec, tensors: Tensors, ranks: int) -> tuple[int, ...]:
    """Who has each layer, where whole layers are divided."""
    sizes = _sizes(spec, tensors)
    # Keys that later layers read lie on one device with those.
    mixers = [layer.mixer for layer in spec.layers]
    first = min((m.reads for m in mixers if m is not None and m.reads is not None), default=len(sizes))
    units = sizes[:first] + [sum(sizes[first:])] * (first < len(sizes))
    if len(units) < ranks:
        parts_of = "layers" if len(units) == len(sizes) else "groups of layers that share keys"
        raise RequestError(f"the model has {len(units)} {parts_of} for {ranks} devices: use fewer")
    owners = _runs(units, ranks)
    return owners + owners[-1:] * (len(sizes) - len(units))


def _cut(
    spec: ModelSpec, tensors: Tensors, il: int, layer: Layer, rank: int, ranks: int, cuts: dict[str, Cut]
) -> tuple[Layer, int]:
    """A rank's part of a layer, and the bytes of what could not be cut."""
    prefix, whole = f"blk.{il}.", 0
    cutter = Cutter(tensors, prefix, spec.n_embd, rank, ranks)
    narrow: list[Any] = []
    for half, kinds in ((layer.mixer, MIXERS), (layer.ffn, FEED_FORWARDS)):
        part = None
        if half is not None:
            kind = kinds[type(half)]
            part = kind.shard(cutter, half)
            if part is None:
                whole += sum(_bytes(tensors, prefix + name) for name in kind.tensors)
        narrow.append(part or half)
    cuts |= cutter.cuts
    return replace(layer, mixer=narrow[0], ffn=narrow[1]), whole


def _runs(sizes: list[int], ranks: int) -> tuple[int, ...]:
    """Consecutive layers of about the same number of bytes, at least one a rank."""
    owners: list[int] = []
    done = rank = 0
    for il, size in enumerate(sizes):
        left = len(sizes) - il
        if rank + 1 < ranks and owners and owners[-1] == rank:
            full = (done + size / 2) * ranks >= (rank + 1) * sum(sizes)
            if full or left <= ranks - 1 - rank:
                rank += 1
        owners.append(rank)
        done += size
    return tuple(owners)


def _sizes(spec: ModelSpec, tensors: Tensors) -> list[int]:
    return [_bytes(tensors, f"blk.{il}.") for il in range(len(spec.layers))]


def _bytes(tensors: Tensors, prefix: str) -> int:
    return sum(t.nbytes for name, t in tensors.file.tensors.items() if name.startswith(prefix))
