"""A lowered program bound to one device: buffers, weights and caches in place, and the launches of each result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from quarrel.ops.attention import ATTENTION
from quarrel.ops.collective import Group
from quarrel.ops.contract import CacheRef, Compute, ConstRef, StateRef, Value, WeightRef
from quarrel.ops.program import Node
from quarrel.ops.registry import Choice
from quarrel.triton_backend import fuse
from quarrel.triton_backend.attention.paged import short_splits, splits_for
from quarrel.triton_backend.attention.rope import left_to_attention
from quarrel.triton_backend.attention.splits import MOST_SPLITS
from quarrel.triton_backend.experts.host import is_hosted
from quarrel.triton_backend.experts.joined import joins
from quarrel.triton_backend.formats.int8x2 import readers, words
from quarrel.triton_backend.formats.weights import Weights
from quarrel.triton_backend.fusion import by_node, launch_of, lifetimes, until_added
from quarrel.triton_backend.linear.left_parts import LeftParts, left_to_norms
from quarrel.triton_backend.linear.matvec_tiles import multiprocessors
from quarrel.triton_backend.runtime.arrays import DTYPES, E4M3, Cache, Decoded, Packed, Slot
from quarrel.triton_backend.runtime.buffers import Place, Scratch, place, view
from quarrel.triton_backend.runtime.launch import Launcher, launch
from quarrel.triton_backend.runtime.site import Described, Launch, Listed, Site, Tables


@dataclass
class Plan(Site):
    """Built once; `run` launches. `rows` is how many indices of each free axis the buffers hold."""

    choices: Sequence[Choice]
    inputs: Mapping[int, Slot]
    kept: set[int]
    rows: dict[str, int]
    weights: Weights
    caches: Sequence[Cache]
    states: Sequence[torch.Tensor]
    tables: Tables
    compute: Compute
    device: torch.device
    launch: Launcher = launch
    deterministic: bool = False
    generation: int = -1
    float8: bool = False
    cudnn_from: int = 0
    group: Group | None = None
    decoded_bytes: int = 0
    """What `decoded` and `e4m3` may still give away."""
    slots: dict[int, Slot] = field(default_factory=dict)
    launches: list[Launch] = field(default_factory=list)
    described: dict[int, Described] = field(default_factory=dict)
    """Launches that choose among kernels, by the numbers of their nodes."""
    float8_weights: dict[tuple[int, ...], E4M3] = field(default_factory=dict)
    decoded_weights: dict[tuple[int, ...], Decoded] = field(default_factory=dict)
    counters: dict[str, torch.Tensor] = field(default_factory=dict)
    most_splits: int = field(init=False)
    """Of the keys of each of a few sequences, in steps that are not deterministic."""
    short_splits: int = field(init=False)
    """Of those, in a step of one sequence: how many have a tile of keys (`attention/paged.py`)."""

    def __post_init__(self) -> None:
        self.rows["one"] = 1
        if self.generation < 0:
            cuda = self.device.type == "cuda"
            self.generation = torch.cuda.get_device_capability(self.device)[0] if cuda else 0
        self.most_splits = self._most_splits()
        self.short_splits = short_splits([c.node.spec for c in self.choices if c.node.op is ATTENTION])
        self._scratch, self._pairs = Scratch(), Scratch()
        self._pairs.next_node()
        self._grouped: dict[tuple[int, int], tuple[int, Slot, Slot, Listed]] = {}
        self._lasting: dict[tuple[str, int], Slot] = {}
        self._zeros: list[tuple[Slot, str, int]] = []
        self._empty = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._arenas: dict[str, torch.Tensor] = {}
        nodes = [] if self.deterministic else [c.node for c in self.choices]
        outside = {i for i, choice in enumerate(self.choices) if is_hosted(choice)}
        self._read_int8x2, self._read_plain = readers(nodes, self.compute, outside)
        self._int8x2: dict[int, torch.Tensor] = {}
        left_alone = {v.id for i in outside for v in self.choices[i].node.outputs}
        fusions = fuse.find(nodes, self.compute, self.kept | left_alone, joins(self))
        self.notes = {i: note for fusion in fusions for i, note in fusion.notes.items()}
        packs = {fusion.first: fusion.packs for fusion in fusions if fusion.packs is not None}
        self._until = lifetimes(fusions, nodes)
        parts = by_node(fusions)
        pairs = left_to_attention(nodes, self.kept)
        self._ropes = {nodes[i].outputs[0].id: nodes[i] for i, _ in pairs}
        read = [(v.id, at) for i, at in pairs for v in nodes[i].inputs if isinstance(v, Value)]
        self._until |= {id: max(at, self._until.get(id, 0)) for id, at in read}
        adds = left_to_norms(nodes, self.kept | left_alone)
        self._left_parts = {nodes[i].outputs[0].id: LeftParts() for i, _ in adds}
        self._until |= until_added(fusions, nodes, adds, self._until)
        self.nbytes = 0
        self.slots.update(self.inputs)
        self.slots.update({id: Slot(self._empty.view(p.dtype)) for id, p in self._place()[0].items()})
        for i, choice in enumerate(self.choices):
            self._scratch.next_node()
            if i in packs:
                packs[i](self)
            go = choice.implementation.build(self, choice.node)
            if isinstance(go, Described):
                self.described[i] = go
            self.launches.append(launch_of(self, parts.get(i, ()), i, go))
        self.allocate()

    def _most_splits(self) -> int:
        specs = [c.node.spec for c in self.choices if c.node.op is ATTENTION]
        if self.deterministic or self.device.type != "cuda" or not specs:
            return MOST_SPLITS
        kind = self.caches[0].kind if self.caches else "plain"
        return splits_for(specs, self.compute, kind, self.generation, multiprocessors(self.device))

    def begin(self) -> None:
        """Before the launches of a step: a step that failed may have left parts."""
        for left in self._left_parts.values():
            left.clear()

    def drop(self) -> None:
        """Lets go of what was built: launches refer to their plan, and would wait for a garbage collection."""
        self.launches.clear()
        self.described.clear()

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
        self._arenas["pairs"] = self._pairs.allocate(self.rows, self._new)
        counts = max((self.rows[axis] * width for _, axis, width in self._zeros), default=0)
        zeros = torch.zeros(counts, dtype=torch.int32, device=self.device)
        for slot, _, _ in self._zeros:
            slot.tensor = zeros
        self.nbytes = sum(a.numel() for a in self._arenas.values()) + 4 * counts
        self.nbytes += sum(4 * t.numel() for t in self._int8x2.values())

    def fill(self, byte: int) -> None:
        """Sets every byte of the values' buffers: 255 makes floats NaN, so that what a kernel leaves unwritten shows."""
        for arena in self._arenas.values():
            arena.fill_(byte)
        for tensor in self._int8x2.values():
            tensor.view(torch.uint8).fill_(byte)

    def _place(self) -> tuple[dict[int, Place], dict[str, int]]:
        nodes = [c.node for c in self.choices]
        return place(nodes, set(self.inputs), self.kept, self.rows, DTYPES[self.compute], self._until)

    def _own_slots(self) -> list[Slot]:
        return [s for id, s in self.slots.items() if id not in self.inputs]

    def _new(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    # A site: what implementations read while they are built.

    def slot(self, value: Value) -> Slot:
        return self.slots[value.id]

    def weight(self, ref: WeightRef) -> Packed:
        return self.weights.matrix(ref)

    def beside(self, refs: Sequence[WeightRef], parts: int = 1) -> None:
        self.weights.beside(refs, parts)

    def e4m3(self, weights: Sequence[Packed]) -> E4M3 | None:
        key, size = tuple(map(id, weights)), sum(w.n * (w.k + 4) for w in weights)
        if key not in self.float8_weights:
            if any(w.reused for w in weights) or size > self.decoded_bytes:
                return None
            self.decoded_bytes -= size
            self.float8_weights[key] = E4M3(weights)
        return self.float8_weights[key]

    def decoded(self, weights: Sequence[Packed]) -> Decoded | None:
        key, dtype = tuple(map(id, weights)), DTYPES[self.compute]
        if key not in self.decoded_weights:
            size = sum(w.n * w.k for w in weights)
            if any(w.reused for w in weights) or size * dtype.itemsize > self.decoded_bytes:
                return None
            self.decoded_bytes -= size * dtype.itemsize
            self.decoded_weights[key] = Decoded(weights, size, dtype)
        return self.decoded_weights[key]

    def vector(self, ref: WeightRef) -> torch.Tensor:
        return self.weights.vector(ref)

    def const(self, ref: ConstRef) -> torch.Tensor:
        return self.weights.const(ref)

    def cache(self, ref: CacheRef) -> Cache:
        return self.caches[ref.layer]

    def state(self, ref: StateRef) -> torch.Tensor:
        return self.states[ref.index]

    def int8x2(self, value: Value) -> torch.Tensor | None:
        return self._int8x2.get(value.id)

    def int8x2_target(self, value: Value) -> tuple[torch.Tensor | None, bool]:
        if value.id not in self._read_int8x2:
            return None, True
        _, *parts, k = value.dims
        rows = prod(int(p) for p in parts)
        if value.id not in self._int8x2:  # a fusion builds its nodes once more, for steps of other rows
            self._int8x2[value.id] = torch.empty(rows * words(int(k)), dtype=torch.int32, device=self.device)
        return self._int8x2[value.id], value.id in self._read_plain or value.id in self.kept

    def rope_of(self, value: Value) -> Node | None:
        return self._ropes.get(value.id)

    def left_parts(self, value: Value) -> LeftParts | None:
        return self._left_parts.get(value.id)

    def scratch(self, dim: str, width: int, dtype: torch.dtype = torch.float32) -> Slot:
        return self._scratch.want(dim, width, dtype, self._empty.view(dtype))

    def grouped(self, ids: Value, used: int, experts: int) -> tuple[Slot, Slot, Listed, bool]:
        key = (used, experts)
        if key in self._grouped:
            last, order, starts, listed = self._grouped[key]
        else:
            sizes = (("T", used), ("one", experts + 1))
            order, starts = (self._pairs.want(*size, torch.int32, self._empty.view(torch.int32)) for size in sizes)
            last, listed = -1, Listed()
        # Nodes are built in the order in which they run, so that nobody has written there since.
        self._grouped[key] = ids.id, order, starts, listed
        return order, starts, listed, last == ids.id

    def lasting(self, name: str, width: int, dtype: torch.dtype) -> Slot:
        key = (name, width)
        if key not in self._lasting:
            self._lasting[key] = self._pairs.want("one", width, dtype, self._empty.view(dtype))
        return self._lasting[key]

    def counter(self, path: str, width: int) -> torch.Tensor:
        return self.counters.setdefault(path, torch.zeros(width, dtype=torch.int64, device=self.device))

    def zeros(self, dim: str, width: int) -> Slot:
        self._zeros.append((Slot(self._empty.view(torch.int32)), dim, width))
        return self._zeros[-1][0]
