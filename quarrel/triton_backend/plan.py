"""A lowered program bound to one device: buffers, weights and caches in place, and the launches of each result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from quarrel.ops.collective import Group
from quarrel.ops.contract import CacheRef, Compute, ConstRef, StateRef, Value, WeightRef
from quarrel.ops.program import Node
from quarrel.ops.registry import Choice
from quarrel.triton_backend import fuse
from quarrel.triton_backend.buffers import Place, Scratch, place, view
from quarrel.triton_backend.float8 import Codes
from quarrel.triton_backend.halved import readers, words
from quarrel.triton_backend.hosted import is_hosted
from quarrel.triton_backend.pack import Packed
from quarrel.triton_backend.rope import left_to_attention
from quarrel.triton_backend.runtime import DTYPES, Cache, Launch, Launcher, Slot, Work, launch
from quarrel.triton_backend.weights import Weights


@dataclass
class Plan:
    """Built once; `run` launches. `rows` is how many indices of each free axis the buffers hold."""

    choices: Sequence[Choice]
    inputs: Mapping[int, Slot]
    kept: set[int]
    rows: dict[str, int]
    weights: Weights
    caches: Sequence[Cache]
    states: Sequence[torch.Tensor]
    work: Work
    compute: Compute
    device: torch.device
    launch: Launcher = launch
    deterministic: bool = False
    generation: int = -1
    float8: bool = False
    whole: int = 0
    group: Group | None = None
    slots: dict[int, Slot] = field(default_factory=dict)
    launches: list[Launch] = field(default_factory=list)
    rounded: dict[int, Codes] = field(default_factory=dict)
    counters: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rows["one"] = 1
        if self.generation < 0:
            cuda = self.device.type == "cuda"
            self.generation = torch.cuda.get_device_capability(self.device)[0] if cuda else 0
        self._scratch = Scratch()
        self._zeros: list[tuple[Slot, str, int]] = []
        self._empty = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._arenas: dict[str, torch.Tensor] = {}
        nodes = [] if self.deterministic else [c.node for c in self.choices]
        outside = {i for i, choice in enumerate(self.choices) if is_hosted(choice)}
        self._read_halved, self._read_plain = readers(nodes, self.compute, outside)
        self._halved: dict[int, torch.Tensor] = {}
        left_alone = {v.id for i in outside for v in self.choices[i].node.outputs}
        fusions = fuse.find(nodes, self.compute, self.kept | left_alone)
        self._until = fuse.lifetimes(fusions, nodes)
        parts = fuse.by_node(fusions)
        pairs = left_to_attention(nodes, self.kept)
        self._turned = {nodes[i].outputs[0].id: nodes[i] for i, _ in pairs}
        read = [(v.id, at) for i, at in pairs for v in nodes[i].inputs if isinstance(v, Value)]
        self._until |= {id: max(at, self._until.get(id, 0)) for id, at in read}
        self.nbytes = 0
        self.slots.update(self.inputs)
        self.slots.update({id: Slot(self._empty.view(p.dtype)) for id, p in self._place()[0].items()})
        for i, choice in enumerate(self.choices):
            self._scratch.next_node()
            go = choice.implementation.build(self, choice.node)
            self.launches.append(fuse.fused(self, parts[i], i, go) if i in parts else go)
        self.allocate()

    def drop(self) -> None:
        """Lets go of what was built: launches refer to their plan, and would wait for a garbage collection."""
        self.launches.clear()

    def allocate(self) -> None:
        """Makes the buffers for `rows`; what they held is lost."""
        # Let go of the old ones first: the new ones may need their memory.
        for slot in self._own_slots():
            slot.tensor = self._empty
        self._arenas = {}
        places, sizes = self._place()
        self._arenas = {axis: self._new(size) for axis, size in sizes.items()}
        for id, spot in places.items():
            self.slots[id].tensor = view(self._arenas[spot.axis], spot, self.rows[spot.axis])
        self._arenas["scratch"] = self._scratch.allocate(self.rows, self._new)
        counts = max((self.rows[axis] * width for _, axis, width in self._zeros), default=0)
        zeros = torch.zeros(counts, dtype=torch.int32, device=self.device)
        for slot, _, _ in self._zeros:
            slot.tensor = zeros
        self.nbytes = sum(a.numel() for a in self._arenas.values()) + 4 * counts
        self.nbytes += sum(4 * t.numel() for t in self._halved.values())

    def fill(self, byte: int) -> None:
        """Sets every byte of the values' buffers: 255 makes floats NaN, so that what a kernel leaves unwritten shows."""
        for arena in self._arenas.values():
            arena.fill_(byte)
        for tensor in self._halved.values():
            tensor.view(torch.uint8).fill_(byte)

    def _place(self) -> tuple[dict[int, Place], dict[str, int]]:
        nodes = [c.node for c in self.choices]
        return place(nodes, set(self.inputs), self.kept, self.rows, DTYPES[self.compute], self._until)

    def _own_slots(self) -> list[Slot]:
        return [s for id, s in self.slots.items() if id not in self.inputs]

    def _new(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    # What a launcher asks while it is built (`Site`).

    def slot(self, value: Value) -> Slot:
        return self.slots[value.id]

    def weight(self, ref: WeightRef) -> Packed:
        return self.weights.matrix(ref)

    def codes(self, weight: Packed) -> Codes:
        if id(weight) not in self.rounded:
            self.rounded[id(weight)] = Codes(weight.n, weight.k, self.device)
        return self.rounded[id(weight)]

    def vector(self, ref: WeightRef) -> torch.Tensor:
        return self.weights.vector(ref)

    def const(self, ref: ConstRef) -> torch.Tensor:
        return self.weights.const(ref)

    def cache(self, ref: CacheRef) -> Cache:
        return self.caches[ref.layer]

    def state(self, ref: StateRef) -> torch.Tensor:
        return self.states[ref.index]

    def halved(self, value: Value) -> torch.Tensor | None:
        return self._halved.get(value.id)

    def to_halve(self, value: Value) -> tuple[torch.Tensor | None, bool]:
        if value.id not in self._read_halved:
            return None, True
        _, *parts, k = value.dims
        rows = prod(int(p) for p in parts)
        made = self._halved[value.id] = torch.empty(rows * words(int(k)), dtype=torch.int32, device=self.device)
        return made, value.id in self._read_plain or value.id in self.kept

    def turned(self, value: Value) -> Node | None:
        return self._turned.get(value.id)

    def scratch(self, dim: str, width: int, dtype: torch.dtype = torch.float32) -> Slot:
        return self._scratch.want(dim, width, dtype, self._empty.view(dtype))

    def counter(self, path: str, width: int) -> torch.Tensor:
        return self.counters.setdefault(path, torch.zeros(width, dtype=torch.int64, device=self.device))

    def zeros(self, dim: str, width: int) -> Slot:
        self._zeros.append((Slot(self._empty.view(torch.int32)), dim, width))
        return self._zeros[-1][0]


def needed(nodes: Sequence[Node], wanted: Value) -> list[bool]:
    """Which nodes a result takes: those it depends on, and every append to a cache."""
    wants = {wanted.id}
    marks: list[bool] = []
    for node in reversed(nodes):
        mark = node.op.always or any(v.id in wants for v in node.outputs)
        if mark:
            wants.update(v.id for v in node.inputs if isinstance(v, Value))
        marks.append(mark)
    return marks[::-1]
