"""What a vector store answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Hits:
    """Nearest first. ids: uint64 `[n]`, which Longbow cuts to 32 bits. scores: float32 `[n]`, distances: smaller is nearer
    (cosine: 1 - cos; dot_product: the negative product)."""

    ids: Array
    scores: Array

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Dataset:
    """What GetFlightInfo tells. Longbow counts record batches, not rows, and gives neither schema nor endpoints."""

    name: str
    batches: int
    nbytes: int


@dataclass(frozen=True)
class Readiness:
    """`indexed`: rows that a search sees."""

    status: Literal["READY", "BUSY", "NOT_FOUND"]
    indexed: int
    reason: str = ""
