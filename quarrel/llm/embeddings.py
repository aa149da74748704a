"""Embeddings as a user sees them: the vectors, the options of a call, and how pooled rows become vectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import numpy as np
import numpy.typing as npt

from quarrel.errors import QuarrelError, RequestError

Array = npt.NDArray[Any]
Progress = Callable[[int, int], None]
Pooling = Literal["mean", "cls", "last", "rank"]
POOLINGS: tuple[Pooling, ...] = ("mean", "cls", "last", "rank")


@dataclass(frozen=True)
class Chunking:
    """Cuts texts that do not fit into pieces of `size` tokens (special ones included), each beginning with the
    last `overlap` tokens of the one before. A text that fits in `size` stays whole."""

    size: int
    overlap: int = 0

    def __post_init__(self) -> None:
        for name, value in (("size", self.size), ("overlap", self.overlap)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise RequestError(f"the chunks' {name} is {value!r}, wanted a whole number of tokens")


class EmbedKeywords(TypedDict, total=False):
    """The keyword arguments of `LLM.embed`."""

    normalize: bool
    pooling: Pooling | None
    dimensions: int | None
    prefix: str | None
    chunk: Chunking | int | None


@dataclass(frozen=True)
class EmbedOptions:
    """How texts are embedded, see `LLM.embed`; pooling and dimensions are checked where the model is known."""

    normalize: bool = True
    pooling: Pooling | None = None
    dimensions: int | None = None
    prefix: str | None = None
    chunk: Chunking | None = None

    @classmethod
    def of(cls, keywords: EmbedKeywords) -> EmbedOptions:
        """A number of tokens as `chunk` stands for chunks that overlap by an eighth."""
        chunk = keywords.get("chunk")
        if chunk is not None and not isinstance(chunk, Chunking):
            chunk = Chunking(chunk, chunk // 8 if isinstance(chunk, int) else 0)
        rest: Any = {**keywords, "chunk": chunk}
        return cls(**rest)


@dataclass(frozen=True)
class Embeddings:
    """`vectors`: float32 `[rows, dim]`, in the order of the texts. Without chunking there is one row a text.

    texts: the index of each row's text, int32 `[rows]`. tokens: how many tokens each row's piece has, int32 `[rows]`.
    pooling: how the rows of its tokens became one. normalized: rows have length 1. dimensions: `dim`, and `full` where the
    model's own rows are longer. prefix: what was put before every text.
    """

    vectors: Array
    texts: Array
    tokens: Array
    pooling: Pooling
    normalized: bool
    full: int
    prefix: str = ""

    @property
    def dimensions(self) -> int:
        return int(self.vectors.shape[1])

    @property
    def total_tokens(self) -> int:
        return int(self.tokens.sum())

    def __len__(self) -> int:
        return len(self.vectors)


def finished(rows: Array, *, normalize: bool, dimensions: int | None, centred: bool, first: int = 0) -> Array:
    """Pooled rows as vectors: cut to `dimensions` (`centred`: layer norm without gains first), of length 1.

    Rows of zeros stay what they are. Raises QuarrelError where a row, counted from `first`, is not finite.
    """
    finite = np.isfinite(rows).all(axis=1)
    if not finite.all():
        row = first + int(np.argmin(finite))
        raise QuarrelError(f"the embedding of row {row} is not finite: the model cannot be used on it")
    if dimensions is not None and dimensions < rows.shape[1]:
        if centred:
            rows = (rows - rows.mean(1, keepdims=True)) / np.sqrt(rows.var(1, keepdims=True) + 1e-5)
        rows = rows[:, :dimensions]
    rows = np.ascontiguousarray(rows, np.float32)
    if normalize:
        lengths = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))[:, None]
        rows = np.divide(rows, np.where(lengths > 0, lengths, 1.0), dtype=np.float32, casting="same_kind")
    return rows
