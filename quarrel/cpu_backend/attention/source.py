"""Where one head's keys or values of a sequence are in memory."""

from __future__ import annotations

from dataclasses import dataclass

from quarrel.cpu_backend.attention.cache import decoded, head_bytes, head_scale, load, place, raw_type, value_bytes
from quarrel.cpu_backend.attention.shape import Shape
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import I32, I64, Kernel, Val, vec
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
        """Values d .. d + 15 of the vector there as float32, zeros past its end."""
        have = min(16, self.dim - d)
        if have == 16:
            return load(k, level, self.s.kind, at, self.dim, d)
        buffer = k.stack(64)
        k.store(k.zero(F32x16), buffer)
        for i in range(have):
            k.store(load(k, level, self.s.kind, at, self.dim, d + i, 1), buffer, 4 * i)
        return k.load(buffer, F32x16)

    def whole(self, k: Kernel, level: Level, at: Val, d: Val) -> Val:
        """The same where all sixteen are there."""
        kind = self.s.kind
        values = decoded(k, level, kind, k.load(at + d * value_bytes(kind), vec(raw_type(kind), 16)))
        return values * k.splat(head_scale(k, kind, at, self.dim), 16) if kind in TOP else values

    def at(self, k: Kernel, key: Val) -> Val:
        """Address of the vector of the token at position `key`."""
        s = self.s
        if self.table is None:
            return self.base + key * self.row_bytes + self.head * self.head_bytes
        i = key.udiv(s.block_size)
        block = k.load(self.table + (i << 2), I32).to(I64)
        return self.base + place(block, key - i * s.block_size, self.head, s.n_kv, s.block_size, self.head_bytes)

    def sixteen(self, k: Kernel, key: Val, last: Val) -> list[Val]:
        """Addresses of tokens key .. key + 15, `key` being a multiple of 16; none is looked up beyond `last`."""
        if self.s.block_size % 16:
            return [self.at(k, k.minimum(key + i, last)) for i in range(16)]
        # A cache block is whole memory; rows one after another end with the last.
        first = self.at(k, key)
        return [
            first + (self.row_bytes * i if self.table is not None else k.minimum(last - key, i) * self.row_bytes)
            for i in range(16)
        ]

    def prefetch(self, k: Kernel, rows: list[Val], locality: int = 3) -> None:
        for row in rows:
            for line in range(0, self.head_bytes, 64):
                k.prefetch(row, line, locality)
            if self.head_bytes % 64:  # it may end in a further line
                k.prefetch(row, self.head_bytes - 1, locality)
