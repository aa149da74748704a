"""Arrays on the device: values of a step, packed weights, the cache of a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from quarrel.ops.contract import Compute

DTYPES: dict[Compute, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass
class Slot:
    """An array of the step. The tensor is replaced when a buffer has to grow, so launchers read it at each call."""

    tensor: torch.Tensor


@dataclass(frozen=True)
class Cache:
    """Keys and values of one layer, each `[blocks, n_kv, block_size, head_dim]`; padding writes to the last block.

    Codes (`ops/kv.py`) are bytes, and have scales `[blocks, n_kv, block_size]` float32 (`attention/kv_codes.py`).
    """

    k: torch.Tensor
    v: torch.Tensor
    kind: str = "plain"
    """Or "int8", "fp8", "fp8_e5m2"."""
    scales: tuple[torch.Tensor, ...] = ()
    """Of keys and of values."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.k, self.v, *self.scales)

    @property
    def both_scales(self) -> tuple[torch.Tensor, ...]:
        """The scales, or stand-ins that a kernel does not read."""
        return self.scales or (self.k, self.v)

    @property
    def block_size(self) -> int:
        return self.k.shape[2]


class Planes(NamedTuple):
    """A packed weight as kernels take it, each plane `[n, ..]` row-major (`formats/layout.py`)."""

    codes: Any
    bits: Any
    scale: Any
    top: Any


@dataclass(frozen=True)
class Packed:
    """A weight: `n` rows of `k` columns, in planes (`formats/pack.py`). An absent plane is the first one again."""

    format: str
    n: int
    k: int
    buffer: torch.Tensor
    planes: Planes
    reused: bool = False
    """Other matrices take its place from step to step, so nothing may be derived from its values."""
    whole: Packed | None = None
    """The matrix that these are rows of, where those of others follow in memory (`formats/weights.py: Weights.beside`)."""
    derived: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """What kernels made of its planes, for each that reads it so (`linear/ring_weights.py: Matrices`)."""

    @property
    def nbytes(self) -> int:
        return self.buffer.numel()


def captures(tensor: torch.Tensor) -> bool:
    """Whether work on it is recorded now."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


class Decoded:
    """Weights in the compute type, decoded once and kept: flat, `size` values."""

    def __init__(self, weights: Sequence[Packed], size: int, dtype: torch.dtype) -> None:
        self.weights = weights
        """Whose names it goes by: held, so that no others get these."""
        self._tensor = torch.empty(size, dtype=dtype, device=weights[0].buffer.device)
        self._filled = False

    @property
    def nbytes(self) -> int:
        return self._tensor.numel() * self._tensor.element_size()

    def filled(self, decode: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """The values, which `decode` puts there first if they have not been asked for."""
        if not self._filled:
            decode(self._tensor)
            # What a capture records has not run.
            self._filled = not captures(self._tensor)
        return self._tensor


class E4M3:
    """Weights in E4M3, rounded once and kept: all their rows, and a float32 scale for each (`formats/e4m3.py`)."""

    def __init__(self, weights: Sequence[Packed]) -> None:
        self.weights = weights
        """Held, as those of `Decoded` are."""
        rows, k, device = sum(w.n for w in weights), weights[0].k, weights[0].buffer.device
        self.codes = torch.empty((rows, k), dtype=torch.float8_e4m3fn, device=device)
        self.scale = torch.empty(rows, dtype=torch.float32, device=device)
        self._filled = False

    @property
    def nbytes(self) -> int:
        return self.codes.numel() + 4 * self.scale.numel()

    def fill(self, round: Callable[[], None]) -> None:
        """Calls `round`, which puts the rows there, if that has not been done."""
        if not self._filled:
            round()
            self._filled = not captures(self.codes)


class Output(NamedTuple):
    """Where a kernel stores a result, in one or both of its forms; its constant FORM is "plain", "int8x2" or "both"."""

    plain: Any  # act [T, n]
    int8x2: Any  # int32 [words(n)], of a step of one row (`formats/int8x2.py`)
