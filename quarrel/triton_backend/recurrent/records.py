"""Arguments that recurrent kernels share, as records: on the host of tensors, in a kernel of pointers; and what an op
stores on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from quarrel.ops.contract import ConstRef, Operand
from quarrel.triton_backend.runtime.arrays import Slot
from quarrel.triton_backend.runtime.site import Site


class Sequences(NamedTuple):
    """Which rows are a sequence's."""

    query_start: Any  # int32 [S + 1], first row
    kv_len: Any  # int32 [S], tokens with the step's own; a sequence whose tokens are all new starts from zero


class Heads(NamedTuple):
    """Constants of a Mamba-2 scan."""

    HEADS: int
    DIM: int
    """Of a head."""
    GROUPS: int
    """Heads that share B and C."""
    N: int
    """States of a channel."""


class Mamba2Weights(NamedTuple):
    """A mixer's vectors, float32; WIDTH = heads * head_dim + 2 * groups * n_state."""

    taps: Any  # [WIDTH, W]
    offset: Any  # [WIDTH], bias of the convolution
    dt_bias: Any  # [heads]
    a: Any  # [heads], negative
    d: Any  # [heads]


class DeltaHeads(NamedTuple):
    """Constants of a gated delta rule."""

    NK: int
    NV: int
    K: int
    """Values of a query or key."""
    V: int
    """Of a value head."""
    GROUPED: bool
    """Whether the value heads of a key lie side by side."""


class DeltaWeights(NamedTuple):
    """A mixer's vectors behind its convolution, float32."""

    dt_bias: Any  # [NV]
    a: Any  # [NV], negative
    gain: Any  # [V]


@dataclass(frozen=True)
class Stored:
    """What an op with a state stores on the device: float32 weights, the table of sequences, the state."""

    weights: tuple[torch.Tensor, ...]
    query_start: Slot
    kv_len: Slot
    slots: Slot
    """int32 `[S]`, a sequence's place in the state."""
    state: torch.Tensor

    @classmethod
    def of(cls, site: Site, weights: Sequence[Operand], rest: Sequence[Operand]) -> Stored:
        *tables, state = rest
        vectors = tuple(site.const(w) if isinstance(w, ConstRef) else site.vector(w) for w in weights)  # type: ignore[arg-type]
        return cls(vectors, *(site.slot(t) for t in tables), site.state(state))  # type: ignore[arg-type]

    def sequences(self) -> dict[str, Any]:
        """The arguments of a kernel that reads and writes the state."""
        table = Sequences(self.query_start.tensor, self.kv_len.tensor)
        return {"sequences": table, "state_slots": self.slots.tensor}
