"""What some nodes of a step do together, how long values live for that, and a node's launch with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from quarrel.ops.contract import Value
from quarrel.ops.program import Node
from quarrel.triton_backend.runtime.site import Batch, Launch, Site

Build = Callable[[Site, Launch], Launch]
"""From a node's own launch, for steps of other rows."""


@dataclass(frozen=True)
class Fusion:
    """What some nodes do in a step of `least` to so many rows: nothing where there is no build."""

    parts: Mapping[int, Build | None]
    rows: int = 1
    least: int = 1
    packs: Callable[[Site], None] | None = None
    """Before the first node is built."""
    notes: Mapping[int, str] = field(default_factory=dict)
    """What `explain` says of nodes."""
    decodes: bool = False
    """Nothing in a step with prompts."""

    @property
    def first(self) -> int:
        return min(self.parts)

    @property
    def last(self) -> int:
        return max(self.parts)


def lifetimes(fusions: Sequence[Fusion], nodes: Sequence[Node]) -> dict[int, int]:
    """Until which node values live, by their id, where that is later than their own readers say."""
    until: dict[int, int] = {}
    for fusion in fusions:
        read = {v.id for i in fusion.parts for v in nodes[i].inputs if isinstance(v, Value)}
        until |= {value: max(fusion.last, until.get(value, 0)) for value in read}
    return until


def until_added(
    fusions: Sequence[Fusion], nodes: Sequence[Node], adds: Sequence[tuple[int, int]], until: Mapping[int, int]
) -> dict[int, int]:
    """The same of what nodes, each by itself or at the end of fusions, leave to a norm behind them (`left_parts.py`)."""
    longer = dict(until)
    for i, at in adds:
        parts = {i, *(part for f in fusions if f.last == i for part in f.parts)}
        for value in (v for part in parts for v in nodes[part].inputs if isinstance(v, Value)):
            longer[value.id] = max(at, longer.get(value.id, 0))
    return longer


def by_node(fusions: Sequence[Fusion]) -> dict[int, list[Fusion]]:
    """Which fusions a node is part of, by its number: those of the fewest rows last."""
    found: dict[int, list[Fusion]] = {}
    for fusion in sorted(fusions, key=lambda f: -f.rows):
        for i in fusion.parts:
            found.setdefault(i, []).append(fusion)
    return found


def launch_of(site: Site, fusions: Sequence[Fusion], i: int, alone: Launch) -> Launch:
    """A node's launch, which gives way in a step of few rows."""
    for fusion in fusions:
        build = fusion.parts[i]
        alone = _either(nothing if build is None else build(site, alone), fusion, alone)
    return alone


def _either(together: Launch, fusion: Fusion, alone: Launch) -> Launch:
    def run(batch: Batch) -> None:
        fits = fusion.least <= batch.T <= fusion.rows and not (fusion.decodes and batch.prefill)
        (together if fits else alone)(batch)

    return run


def nothing(batch: Batch) -> None:
    """The launch of a node for which another one stands."""
