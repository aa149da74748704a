"""What attention's kernels know of a layer, and the sizes of their steps."""

from __future__ import annotations

from dataclasses import dataclass

from quarrel.cpu_backend.attention.cache import Kind
from quarrel.ops.kv import TOP

SPLIT = 256
KEYS = 64
"""Keys of one step of the score loop: four vectors."""
ROWS = 64
"""Query rows (positions times heads of the group) that share one unpacking of the keys."""


@dataclass(frozen=True)
class Shape:
    """Static facts of one layer."""

    group: int
    n_kv: int
    dim: int
    block_size: int
    scale: float
    window: int = 0
    cap: float = 0.0
    sinks: bool = False
    kind: Kind = "float32"
    chunked: bool = False
    causal: bool = True
    """Otherwise keys and values are rows of the step itself, and every query sees all of its sequence's."""
    latent: int = 0
    reach: int = 0
    """How far away a query sees keys where it sees both sides; 0 for any distance."""
    spans: bool = False
    """Each query says which position it sees up to."""
    integers: bool = False
    """Queries, and weights of the softmax, are rounded to 16 bits and multiplied by codes as whole numbers."""

    @property
    def folds(self) -> bool:
        """Scales of codes multiply scores, and weights of the softmax, instead of keys and values. Where scores read the
        values too, a score has two scales."""
        return self.kind in TOP and not self.latent

    @property
    def value_dim(self) -> int:
        return self.latent or self.dim

    @property
    def query_dim(self) -> int:
        return self.dim + self.latent

    @property
    def queries(self) -> int:
        """Query positions of a chunk."""
        return max(1, ROWS // self.group)

    @property
    def padded(self) -> int:
        """Values of a query, in whole vectors; `latent` has them anyway."""
        return -(-self.query_dim // 16) * 16

    @property
    def value_padded(self) -> int:
        return -(-self.value_dim // 16) * 16

    @property
    def rows(self) -> int:
        return self.queries * self.group
