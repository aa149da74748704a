"""What every launcher speaks of: the device, the arithmetic, arrays that live in a step, and counts that vary by call."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from quarrel.ops.collective import Group
from quarrel.ops.contract import CacheRef, Compute, ConstRef, StateRef, Value, WeightRef
from quarrel.ops.program import Node
from quarrel.triton_backend.pack import Packed

if TYPE_CHECKING:
    from quarrel.triton_backend.float8 import Codes

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton decides when a kernel is defined, so this is read once, as the kernels are imported."""

DTYPES: dict[Compute, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass
class Slot:
    """An array of the step. The tensor is replaced when a buffer has to grow, so launchers ask for it at each call."""

    tensor: torch.Tensor


@dataclass(frozen=True)
class Cache:
    """Keys and values of one layer, each `[blocks, n_kv, block_size, head_dim]`; padding writes to the last block.

    Codes (`ops/kv.py`) are bytes, and have scales `[blocks, n_kv, block_size]` float32 (`codes.py`).
    """

    k: torch.Tensor
    v: torch.Tensor
    kind: str = "plain"
    """Or "int8", or "fp8"."""
    scales: tuple[torch.Tensor, ...] = ()
    """Of keys and of values."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.k, self.v, *self.scales)

    @property
    def both_scales(self) -> tuple[torch.Tensor, ...]:
        """What a kernel is given; it does not read them where there are none."""
        return self.scales or (self.k, self.v)

    @property
    def block_size(self) -> int:
        return self.k.shape[2]


Prompt = tuple[int, int, int]
"""A sequence whose keys are all of this step: its place, its first row, and its tokens."""


@dataclass(frozen=True)
class Live:
    """What varies from call to call, as host integers."""

    T: int
    """Tokens."""
    S: int
    """Sequences."""
    R: int
    """Rows of `out_rows`."""
    single: bool
    """Some sequence has exactly one new token."""
    several: bool
    """Some sequence has more."""
    items: int
    """Pairs of a sequence with one new token and a split of its keys."""
    prompts: tuple[Prompt, ...] = ()
    """All sequences with more than one new token, if they are for cuDNN (`attend_whole.py`)."""

    def count(self, dim: str) -> int:
        """The size of a free axis."""
        return {"T": self.T, "S": self.S, "R": self.R}[dim]


Launch = Callable[[Live], None]
Grid = tuple[int, ...]


class Launcher(Protocol):
    """Runs a kernel; the ahead-of-time compiler puts a recorder in this place."""

    def __call__(
        self,
        kernel: Any,
        grid: Grid,
        *args: Any,
        warps: int = 4,
        stages: int = 2,
        early: bool | None = None,
        **constants: Any,
    ) -> None: ...


@cache
def options(warps: int, stages: int, early: bool | None = None) -> Mapping[str, Any]:
    """What the compiler is told."""
    told = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    return told | {"launch_pdl": True} if early else told


# The interpreter is NumPy, which warns where a GPU goes on: at infinities and in lanes that a mask throws away.
_without_warnings = np.errstate(all="ignore") if INTERPRETED else lambda function: function


@_without_warnings
def launch(
    kernel: Any, grid: Grid, *args: Any, warps: int = 4, stages: int = 2, early: bool | None = None, **constants: Any
) -> None:
    """Runs `kernel` on the current stream; an empty grid is no work.

    early: whether it may start before the kernel ahead of it is over; it has a constant PDL, and if that is true every
    program of it waits by itself.
    """
    if not all(grid):
        return
    if early is not None:
        constants["PDL"] = early
    # Behind `kernel[grid]` is this too, and one call more; the device waits for the launches of a prompt.
    kernel.run(*args, grid=grid, warmup=False, **constants, **options(warps, stages, early))


@dataclass(frozen=True)
class Work:
    """Device tables that kernels need beside the op's own inputs: attention, and the embedding of a step's ids."""

    item_start: Slot  # [S + 1] int32, where each sequence's items begin
    table_width: Slot  # [1] int32, columns of the block table
    from_last: Slot | None = None  # [T] int32, the row of `last` that is this token's id, or -1 for `ids`
    last: Slot | None = None  # tokens of the last launch that drew any
    tokens: Slot | None = None  # [1] int32, tokens of the step without those that pad a batch


class Site(Protocol):
    """Where a node is built: it hands out the node's operands on the device."""

    launch: Launcher
    compute: Compute
    work: Work
    generation: int
    """Major compute capability of the device; 0 in the interpreter."""
    deterministic: bool
    """One tile for any number of tokens, so that a row's result is the same bits in every batch."""
    float8: bool
    """Products of many rows in E4M3, where a weight's format allows (`float8.py`)."""
    whole: int
    """Fewest tokens of a prompt that cuDNN attends to, 0 for none (`attend_whole.py`)."""
    group: Group | None
    """The other devices that hold a share of the model."""

    def slot(self, value: Value) -> Slot:
        """The buffer of a value."""

    def weight(self, ref: WeightRef) -> Packed:
        """A matrix, packed in its own format if that is native."""

    def codes(self, weight: Packed) -> Codes:
        """Where a weight in E4M3 is kept, if the step says `float8`."""

    def vector(self, ref: WeightRef) -> torch.Tensor:
        """A vector as float32."""

    def const(self, ref: ConstRef) -> torch.Tensor:
        """A host table as float32."""

    def cache(self, ref: CacheRef) -> Cache:
        """A layer's keys and values."""

    def state(self, ref: StateRef) -> torch.Tensor:
        """A recurrent state, `[slots, ...]` float32; padding writes to the last slot."""

    def halved(self, value: Value) -> torch.Tensor | None:
        """The halved form of a value (`halved.py`), if whoever makes the value fills it in, for steps of one row."""

    def to_halve(self, value: Value) -> tuple[torch.Tensor | None, bool]:
        """For whoever makes a value: where to put its halved form, if it is read, and whether the plain one is read too."""

    def turned(self, value: Value) -> Node | None:
        """The ROPE_APPEND that makes these queries and leaves its work to the attention that reads them (`rope.py`)."""

    def scratch(self, dim: str, width: int, dtype: torch.dtype = torch.float32) -> Slot:
        """`[dim, width]` that holds until the node is done; dim is T, S, R, items or one."""

    def counter(self, path: str, width: int) -> torch.Tensor:
        """`[width]` int64 that only grows, read by `path`."""

    def zeros(self, dim: str, width: int) -> Slot:
        """`[dim, width]` int32 that every node shares: zero before each launch, because each kernel leaves it so."""


class Alone:
    """The part of a site whose values nobody reads halved, whose queries come turned, and where cuDNN has no part."""

    @property
    def whole(self) -> int:
        return 0

    def codes(self, weight: Packed) -> Codes:
        raise AssertionError("nothing is rounded to E4M3 here")

    def halved(self, value: Value) -> torch.Tensor | None:
        return None

    def to_halve(self, value: Value) -> tuple[torch.Tensor | None, bool]:
        return None, True

    def turned(self, value: Value) -> Node | None:
        return None


def starts_early(site: Site) -> bool:
    """Whether the device may start a kernel before the one ahead of it is over (compute capability 9.0 and above)."""
    return site.generation >= 9


def dims(value: Value) -> tuple[str, int]:
    """Free axis and width of a two-dimensional value."""
    axis, width = value.dims
    assert isinstance(axis, str), value
    assert isinstance(width, int), value
    return axis, width


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The next power of two, at least n."""
    return 1 << max(0, n - 1).bit_length()
