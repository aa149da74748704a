"""What every kernel family shares: operands, the batch of a call, and the site where a node is built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from quarrel.mlx_backend.formats.layout import Packed
from quarrel.ops.contract import Array, Compute, ConstRef, WeightRef
from quarrel.ops.kv import KVType

DTYPES: dict[Compute, mx.Dtype] = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


class Cache(NamedTuple):
    """Keys and values of one layer, each `[n_blocks * block_size, n_kv, head_dim]`: a token's slot is its row. Codes are
    uint8, and behind those of a head lie the 4 bytes of its float32 scale: `[.., head_dim + 4]`.

    Kernels write into both where they lie. `written` is a number that whoever wrote last returned: a kernel that reads or
    writes the cache takes it among its inputs, so that MLX runs it behind that."""

    k: mx.array
    v: mx.array
    written: mx.array


class Rows:
    """Which rows of a free axis decode (their sequence has one row of it) and which are prefill (it has several).

    A row's arithmetic is chosen by that alone, so that no result depends on what else is in the batch.
    """

    def __init__(self, decode: Array) -> None:
        """`decode`: bool `[rows]`."""
        self.count = len(decode)
        self._decode, self._prefill = np.flatnonzero(decode), np.flatnonzero(~decode)

    @property
    def all_decode(self) -> bool:
        return len(self._prefill) == 0

    @property
    def any_decode(self) -> bool:
        return len(self._decode) > 0

    def dispatch(self, decode: RowsFunction, prefill: RowsFunction, *arrays: mx.array) -> list[mx.array]:
        """`decode` on some rows of the arrays, `prefill` on the others; each result's rows in their old order."""
        if self.all_decode:
            return list(decode(*arrays))
        if not self.any_decode:
            return list(prefill(*arrays))
        first, rest = mx.array(self._decode), mx.array(self._prefill)
        back = mx.array(np.argsort(np.concatenate([self._decode, self._prefill])))
        parts = zip(decode(*(a[first] for a in arrays)), prefill(*(a[rest] for a in arrays)), strict=True)
        return [mx.concatenate([a, b])[back] for a, b in parts]


RowsFunction = Callable[..., Sequence[mx.array]]


@dataclass(frozen=True, eq=False)
class Batch:
    """What the host knows of a call, beside the sizes of its arrays."""

    tokens: Rows
    """The T tokens, by how many new tokens their sequence has."""
    out_rows: Rows
    """The R rows whose results are wanted, by how many of them are their sequence's."""
    max_new: int = 1
    """Most new tokens of a sequence."""
    block_size: int = 32
    """Tokens in a block of the cache."""
    kv_cache: KVType = "auto"
    """As what keys and values are stored."""

    def rows(self, axis: str) -> Rows:
        """The rows of a free axis, T or R."""
        return {"T": self.tokens, "R": self.out_rows}[axis]


Operand = mx.array | Cache
Launch = Callable[..., Sequence[Operand]]
"""`launch(batch, *operands)`: the node's inputs in order, without weights and constants; a cache is a `Cache`, a state an
array `[slots, ...]` float32. It returns the node's outputs in order, then what the cache or state has become: a cache the
same arrays with another `written`."""


class Site(Protocol):
    """Where a node is built: it hands out what stays the same from call to call."""

    compute: Compute
    act: mx.Dtype

    def weight(self, ref: WeightRef) -> Packed:
        """A matrix, in its own format if kernels read that."""

    def vector(self, ref: WeightRef) -> mx.array:
        """A vector as float32 `[n]`."""

    def const(self, ref: ConstRef) -> mx.array:
        """A host table as float32 `[n]`."""

    def dtype(self, kind: str) -> mx.Dtype:
        """The array type of a value: act, f32 or i32."""


def batch_of(
    query_start: Array | None,
    out_rows: Array | None,
    tokens: int,
    rows: int,
    block_size: int = 32,
    kv_cache: KVType = "auto",
) -> Batch:
    """Without `query_start`, as where one op is run alone, all rows are one sequence's."""
    starts = np.array([0, tokens]) if query_start is None else query_start
    new = np.diff(starts)
    single = np.full(rows, rows == 1)
    if query_start is not None and out_rows is not None:
        owner = np.searchsorted(starts, out_rows, side="right") - 1
        single = np.bincount(owner, minlength=len(new))[owner] == 1
    return Batch(Rows(np.repeat(new == 1, new)), Rows(single), int(new.max(initial=0)), block_size, kv_cache)


def evaluated(array: mx.array) -> mx.array:
    """What a builder makes for its calls must pass through here: steps run in other threads, which cannot evaluate it."""
    mx.eval(array)
    return array


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
