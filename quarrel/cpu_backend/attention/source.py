"""Where one head's keys or values of a sequence are in memory: `attention/cache.py`, or rows of the step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import or_

from quarrel.cpu_backend.attention.cache import (
    DECODED,
    block_place,
    decoded,
    head_bytes,
    head_scale,
    load,
    raw_type,
    value_bytes,
)
from quarrel.cpu_backend.attention.shape import Shape
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import F32, I8, I32, I64, Kernel, Val, vec
from quarrel.cpu_backend.runtime.vector import F32x16
from quarrel.ops.kv import TOP


@dataclass(frozen=True)
class Source:
    """In cache blocks named by a table, or in rows one after another."""

    s: Shape
    base: Val
    table: Val | None
    head: Val
    dim: int

    @property
    def head_bytes(self) -> int:
        return head_bytes(self.s.kind, self.dim)

    @property
    def row_bytes(self) -> int:
        """From one token's head to the next one's, of a cache in the same block."""
        return self.head_bytes if self.table is not None else self.s.n_kv * self.head_bytes

    def load(self, k: Kernel, level: Level, at: Val, d: int) -> Val:
        """Values d .. d + 15 of the vector there as float32, zeros past its end; scales that `folds` moves are left out."""
        have = min(16, self.dim - d)
        if have == 16:
            return load(k, level, self.s.kind, at, self.dim, d, scaled=not self.s.folds)
        buffer = k.stack(64)
        k.store(k.zero(F32x16), buffer)
        for i in range(have):
            k.store(load(k, level, self.s.kind, at, self.dim, d + i, 1, scaled=not self.s.folds), buffer, 4 * i)
        return k.load(buffer, F32x16)

    def whole(self, k: Kernel, level: Level, at: Val, d: Val) -> Val:
        """The same where all sixteen are there."""
        kind = self.s.kind
        values = decoded(k, level, kind, k.load(at + d * value_bytes(kind), vec(raw_type(kind), 16)))
        return values * k.splat(head_scale(k, kind, at, self.dim), 16) if kind in TOP else values

    def at(self, k: Kernel, key: Val) -> Val:
        """Address of the vector of the token at position `key`."""
        if self.table is None:
            return self.base + key * self.row_bytes + self.head * self.head_bytes
        return self._in_block(k, key, self.head_bytes)

    def _in_block(self, k: Kernel, key: Val, each: int) -> Val:
        """`each` bytes for each token of the block of the one at position `key` before it."""
        s = self.s
        i = key.udiv(s.block_size)
        start = block_place(k.load(self.table + (i << 2), I32).to(I64), self.head, s.n_kv, s.block_size, self.head_bytes)
        return self.base + start + (key - i * s.block_size) * each

    def sixteen(self, k: Kernel, key: Val, last: Val) -> list[Val]:
        """Addresses of tokens key .. key + 15, `key` being a multiple of 16."""
        # A cache block is whole memory; rows one after another end with the last.
        first = self.at(k, key)
        return [
            first + (self.row_bytes * i if self.table is not None else k.minimum(last - key, i) * self.row_bytes)
            for i in range(16)
        ]

    def row_scales(self, k: Kernel, key: Val) -> Val:
        """The scales of tokens key .. key + 15, `key` being a multiple of 16, as F32x16."""
        row = self.at(k, key)
        return k.join([k.load(row, F32, i * self.row_bytes + self.dim) for i in range(16)])

    def prefetch(self, k: Kernel, rows: list[Val], locality: int = 3) -> None:
        for row in rows:
            for line in range(0, self.head_bytes, 64):
                k.prefetch(row, line, locality)
            if self.head_bytes % 64:  # it may end in a further line
                k.prefetch(row, self.head_bytes - 1, locality)


@dataclass(frozen=True)
class Keys(Source):
    """Of a cache: sixteen tokens' values in one dimension are a vector."""

    @property
    def _pitch(self) -> int:
        """Bytes from one dimension of a block to the next one."""
        return self.s.block_size * value_bytes(self.s.kind)

    def columns(self, k: Kernel, key: Val) -> Val:
        """Address of the first dimension of tokens key .. key + 15, `key` being a multiple of 16."""
        return self._in_block(k, key, value_bytes(self.s.kind))

    def column(self, k: Kernel, level: Level, at: Val, d: Val) -> Val:
        """Sixteen tokens' values in dimension d, of those at `at`, as float32; codes lack their scales."""
        return decoded(k, level, self.s.kind, self.raw(k, at, d))

    def raw(self, k: Kernel, at: Val, d: Val) -> Val:
        """The same as the cache has them."""
        return k.load(at + d * self._pitch, vec(raw_type(self.s.kind), 16))

    def scales(self, k: Kernel, at: Val) -> Val | None:
        """Of the sixteen tokens at `at`, if they are codes."""
        if self.s.kind not in TOP:
            return None
        bytes = (k.load(at, vec(I8, 16), (self.dim + i) * self._pitch).to(I32, unsigned=True) << 8 * i for i in range(4))
        return reduce(or_, bytes).bitcast(F32x16) * DECODED[self.s.kind]

    def prefetch_part(self, k: Kernel, key: Val, last: Val, part: Val | int, parts: int, locality: int) -> None:
        """Of the next block as much as sixteen of this block's keys from `key` on are of it, in so many parts; none is
        looked up beyond `last`."""
        size = 16 * self.head_bytes // parts
        at = self.at(k, k.minimum(key + self.s.block_size, last & -16)) + k.lift(part, I64) * size
        for line in range(0, size, 64):
            k.prefetch(at, line, locality)
