"""Experts that are on the device while they are used most: one stack of slots for all layers of a pool.

The last slot is zeros for good. A choice of an expert that is not there goes to it with a share of 0, so that its product
is 0 whatever stands in other slots; the host adds what was meant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial

import numpy as np
import torch

from quarrel.gguf import FORMATS, GGMLType
from quarrel.ops.contract import Array, Compute, WeightRef
from quarrel.ops.host import ExpertPool
from quarrel.ops.program import Node
from quarrel.ops.step import WeightSource
from quarrel.ops.weights import file_bytes, rows_as
from quarrel.triton_backend.experts.residency import Residency
from quarrel.triton_backend.formats.pack import Uploader, blank, fill, packed_bytes
from quarrel.triton_backend.formats.weights import stored_as
from quarrel.triton_backend.runtime.arrays import Packed


class Pool:
    """The stacks of some layers, which are added before anything else is done."""

    def __init__(
        self, pool: ExpertPool, source: WeightSource, compute: Compute, device: torch.device, upload: Callable[[], Uploader]
    ) -> None:
        self.slots = pool.slots
        self._source, self._compute, self._device, self._upload = source, compute, device, upload
        self._layers: list[tuple[WeightRef, ...]] = []
        self._matrices: list[bool] = []
        """Which of a layer's weights are matrices; biases follow those of their node."""
        self.n_experts = 0
        """Of a layer."""
        self.chosen = self.found = self.moved = 0
        """Choices so far, those of experts that were there, and bytes that took the place of others."""

    def add(self, up: Node, down: Node) -> int:
        """The number of the layer with these nodes."""
        self.n_experts = up.spec.n_experts
        refs = [[ref for ref in node.inputs if isinstance(ref, WeightRef)] for node in (up, down)]
        self._layers.append((*refs[0], *refs[1]))
        self._matrices = [i <= up.spec.gated for i in range(len(refs[0]))] + [i == 0 for i in range(len(refs[1]))]
        return len(self._layers) - 1

    def describe(self) -> str:
        """How many experts there is room for."""
        every = len(self._layers) * self.n_experts
        return (
            f"{self.slots} of {every} experts of {len(self._layers)} layers on the device, by use, the rest in host memory"
        )

    @property
    def nbytes(self) -> int:
        """On the device."""
        return sum(
            packed_bytes(stored_as(r.type, self._compute), self._rows(r), r.k) if matrix else 4 * self._rows(r) * r.k
            for r, matrix in zip(self._layers[0], self._matrices, strict=True)
        )

    def node(self, node: Node) -> Node:
        """The product with the slots in place of the layer's experts."""
        return replace(node, spec=replace(node.spec, n_experts=self.slots + 1))

    def matrix(self, ref: WeightRef) -> Packed:
        """The stack in which this one's experts are."""
        found = self._stacks[self._place(ref)]
        assert isinstance(found, Packed)
        return found

    def vector(self, ref: WeightRef) -> torch.Tensor:
        """The same of biases, `[(slots + 1) * n]` float32."""
        found = self._stacks[self._place(ref)]
        assert isinstance(found, torch.Tensor)
        return found

    def slots_of(self, layer: int, ids: Array) -> Array:
        """int32 of the same shape: where the chosen experts are, -1 for those that the host has; each counts as used."""
        experts = ids.astype(np.int64) + layer * self.n_experts
        found = self._residency.slot_of[experts]
        self._residency.use(experts.reshape(-1))
        self.chosen += found.size
        self.found += int((found >= 0).sum())
        return found

    def missing(self, layer: int, ids: Array) -> Array:
        """Which of the choices the host has, as numbers of `ids` flat; nothing is counted."""
        return np.flatnonzero(self._residency.slot_of[ids.reshape(-1) + layer * self.n_experts] < 0)

    def next_step(self) -> None:
        """Brings what is used most, behind the work that is queued on the device."""
        for slot, expert in self._residency.moves():
            self._bring(self._stacks, slot, expert)
            self.moved += self._expert_bytes

    @cached_property
    def _residency(self) -> Residency:
        return Residency(len(self._layers) * self.n_experts, self.slots, self._expert_bytes)

    @cached_property
    def _expert_bytes(self) -> int:
        return sum(map(file_bytes, self._layers[0])) // self.n_experts

    @cached_property
    def _stacks(self) -> list[Packed | torch.Tensor]:
        stacks = [
            replace(blank(stored_as(r.type, self._compute), self._rows(r), r.k, self._device), reused=True)
            if matrix
            else torch.zeros(self._rows(r) * r.k, device=self._device)
            for r, matrix in zip(self._layers[0], self._matrices, strict=True)
        ]
        for ref, stack in zip(self._layers[0], stacks, strict=True):
            if isinstance(stack, Packed):
                self._fill(stack, ref, self.slots, _zeros(stored_as(ref.type, self._compute), ref.k))
        for slot, expert in enumerate(self._residency.expert_in):
            self._bring(stacks, slot, int(expert))
        return stacks

    def _bring(self, stacks: list[Packed | torch.Tensor], slot: int, expert: int) -> None:
        layer, number = divmod(expert, self.n_experts)
        for ref, stack in zip(self._layers[layer], stacks, strict=True):
            if isinstance(stack, Packed):
                rows = rows_as(self._source, ref, stored_as(ref.type, self._compute))
                first = number * (ref.rows // self.n_experts)
                self._fill(stack, ref, slot, partial(_shifted, rows, first))
            else:
                values = self._upload()(rows_as(self._source, ref, GGMLType.F32)(number, number + 1))
                stack[slot * ref.k : (slot + 1) * ref.k] = values.view(torch.float32).view(-1)

    def _fill(self, stack: Packed, ref: WeightRef, slot: int, read: Callable[[int, int], Array]) -> None:
        n = ref.rows // self.n_experts
        fill(stack, stored_as(ref.type, self._compute), read, self._upload(), slot * n, n)

    def _rows(self, ref: WeightRef) -> int:
        return (self.slots + 1) * (ref.rows // self.n_experts)

    def _place(self, ref: WeightRef) -> int:
        return next(layer.index(ref) for layer in self._layers if ref in layer)


def _shifted(read: Callable[[int, int], Array], first: int, start: int, stop: int) -> Array:
    return read(first + start, first + stop)


def _zeros(type: GGMLType, k: int) -> Callable[[int, int], Array]:
    """Rows of blocks whose bytes, and so values, are all 0."""
    width = k // FORMATS[type].elements * FORMATS[type].nbytes
    return lambda start, stop: np.zeros((stop - start, width), np.uint8)
