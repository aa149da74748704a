"""Where a node is built: it gives an implementation the node's operands on the device, and starts its kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast, runtime_checkable

import torch

from quarrel.ops.collective import Group
from quarrel.ops.contract import CacheRef, Compute, ConstRef, StateRef, Value, WeightRef
from quarrel.ops.program import Node
from quarrel.triton_backend.runtime.arrays import E4M3, Cache, Decoded, Packed, Slot
from quarrel.triton_backend.runtime.launch import Launcher

if TYPE_CHECKING:
    from quarrel.triton_backend.linear.left_parts import LeftParts


class Prompt(NamedTuple):
    """A sequence whose keys are all of this step."""

    seq: int
    begin: int
    """Its first row."""
    tokens: int


@dataclass(frozen=True)
class Batch:
    """The counts of a step, as host integers."""

    T: int
    """Tokens."""
    S: int
    """Sequences."""
    R: int
    """Rows of `out_rows`."""
    decode: bool
    """Some sequence has exactly one new token."""
    prefill: bool
    """Some sequence has more."""
    items: int
    """Pairs of a sequence with one new token and a split of its keys."""
    prompts: tuple[Prompt, ...] = ()
    """All sequences with more than one new token, if they are for cuDNN (`attention/cudnn.py`)."""
    longest: int = 0
    """Tokens of the longest image, in a tower's step."""
    adjusts: bool = False
    """Rows lay biases, penalties or masks on tokens (`sampling/adjust.py`)."""
    deep: bool = False
    """Few sequences, each with one new token behind many keys, where a layer is for `attention/ring.py`."""
    splits: bool = True
    """Some sequence with one new token has several splits, as far as is known."""

    def count(self, dim: str) -> int:
        """The size of a free axis."""
        return {"T": self.T, "S": self.S, "R": self.R}[dim]


Launch = Callable[[Batch], None]


@runtime_checkable
class Described(Protocol):
    """A launch that chooses among kernels, and says so for `explain`."""

    @property
    def declined(self) -> Sequence[str]:
        """A sentence for each kernel that is not among them."""

    def __call__(self, batch: Batch) -> None: ...

    def describe(self) -> str:
        """Which kernel serves which sizes."""


@dataclass(frozen=True)
class Tables:
    """Integers of a step that kernels read beside their op's own inputs, int32."""

    item_start: Slot
    """`[S + 1]`, where each sequence's items begin."""
    table_width: Slot
    """`[1]`, columns of the block table."""
    from_last: Slot | None = None
    """`[T]`, the row of `last` that is this token's id, or -1 for `ids`."""
    last: Slot | None = None
    """Tokens of the last launch that drew any."""
    tokens: Slot | None = None
    """`[1]`, tokens of the step without those that pad a batch."""


class Listed:
    """Items that the last product with pairs grouped so has listed for the ring (`linear/ring_kernels.py`), and how many
    rows each has at most."""

    items: Slot | None = None
    rows: int = 0


class Site(Protocol):
    """Where a node is built. A site of a single op keeps the defaults: nobody leaves it work, nor reads int8x2 of it."""

    launch: Launcher
    compute: Compute
    tables: Tables
    generation: int
    """Major compute capability of the device; 0 in the interpreter."""
    deterministic: bool
    """One order of sums for any number of tokens, so that a row's result is the same bits in every batch."""
    float8: bool
    """Products of many rows in E4M3 (`formats/e4m3.py`)."""
    cudnn_from: int = 0
    """Fewest tokens of a prompt that cuDNN attends to, 0 for none (`attention/cudnn.py`)."""
    group: Group | None
    """The other devices that hold a share of the model."""

    def slot(self, value: Value) -> Slot:
        """The buffer of a value."""

    def weight(self, ref: WeightRef) -> Packed:
        """A matrix, packed in its own format if that is native."""

    def beside(self, refs: Sequence[WeightRef], parts: int = 1) -> None:
        """Asks, before any of these matrices is packed, that they are packed as the rows of one if they can be, and of the
        last so many parts of its columns as such rows."""
        return

    def e4m3(self, weights: Sequence[Packed]) -> E4M3 | None:
        """Where these weights are kept in E4M3, in a step with `float8`, if there is memory for that."""
        return None

    def decoded(self, weights: Sequence[Packed]) -> Decoded | None:
        """Where these weights are kept in the compute type once they are decoded, if there is memory for that."""
        return None

    def vector(self, ref: WeightRef) -> torch.Tensor:
        """A vector as float32."""

    def const(self, ref: ConstRef) -> torch.Tensor:
        """A host table as float32."""

    def cache(self, ref: CacheRef) -> Cache:
        """A layer's keys and values."""

    def state(self, ref: StateRef) -> torch.Tensor:
        """A recurrent state, `[slots, ...]` float32; padding writes to the last slot."""

    def int8x2(self, value: Value) -> torch.Tensor | None:
        """The int8x2 form of a value (`formats/int8x2.py`), if the node that makes the value fills it in, in steps of one
        row."""
        return None

    def int8x2_target(self, value: Value) -> tuple[torch.Tensor | None, bool]:
        """For the node that makes a value: where its int8x2 form goes, if it is read, and whether the plain one is too."""
        return None, True

    def rope_of(self, value: Value) -> Node | None:
        """The ROPE_APPEND that makes these queries and leaves its work to the attention that reads them
        (`attention/rope.py`)."""
        return None

    def left_parts(self, value: Value) -> LeftParts | None:
        """Where the map that makes this stream leaves parts of K to the norm that reads it first, if one does."""
        return None

    def scratch(self, dim: str, width: int, dtype: torch.dtype = torch.float32) -> Slot:
        """`[dim, width]` that nobody else writes until the node is done; dim is T, S, R, items or one."""

    def grouped(self, ids: Value, used: int, experts: int) -> tuple[Slot, Slot, Listed, bool]:
        """Where pairs of a token and an expert lie by expert, `[T, used]` and `[experts + 1]`, and what was listed of them;
        whether an earlier node that reads the same ids has put them there, as it does in steps of several rows."""
        return self.scratch("T", used, torch.int32), self.scratch("one", experts + 1, torch.int32), Listed(), False

    def lasting(self, name: str, width: int, dtype: torch.dtype) -> Slot:
        """`[width]` that keeps what a node puts there for a later one, until the next that uses this name does so."""
        return self.scratch("one", width, dtype)

    def counter(self, path: str, width: int) -> torch.Tensor:
        """`[width]` int64 that only grows, read by `path`."""

    def zeros(self, dim: str, width: int) -> Slot:
        """`[dim, width]` int32 that every node shares: zero before each launch, because each kernel leaves it so."""


class _Inside:
    """What differs between a site and `inside` it."""

    int8x2, int8x2_target, rope_of, grouped = Site.int8x2, Site.int8x2_target, Site.rope_of, Site.grouped

    def __init__(
        self,
        outer: Site,
        slots: Mapping[int, Slot],
        weight: Callable[[WeightRef], Packed] | None,
        vector: Callable[[WeightRef], torch.Tensor] | None,
    ) -> None:
        self._outer, self._slots = outer, slots
        self.weight, self.vector = weight or outer.weight, vector or outer.vector

    def __getattr__(self, name: str) -> Any:
        return getattr(self._outer, name)

    def slot(self, value: Value) -> Slot:
        return self._slots.get(value.id) or self._outer.slot(value)


def inside(
    site: Site,
    slots: Mapping[int, Slot],
    weight: Callable[[WeightRef], Packed] | None = None,
    vector: Callable[[WeightRef], torch.Tensor] | None = None,
) -> Site:
    """The site of the nodes that a composite expands into: the values between them lie in `slots`, and may have weights and
    vectors of their own."""
    return cast(Site, _Inside(site, slots, weight, vector))


def starts_early(site: Site) -> bool:
    """Whether the device may start a kernel before the one ahead of it is over (compute capability 9.0 and above)."""
    return site.generation >= 9


def dims(value: Value) -> tuple[str, int]:
    """Free axis and width of a two-dimensional value."""
    axis, width = value.dims
    assert isinstance(axis, str), value
    assert isinstance(width, int), value
    return axis, width
