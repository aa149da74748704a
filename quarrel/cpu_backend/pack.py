"""Quantised activation rows packed into tiles, so that the prefill path reads them as one stream.

A tile is `slots` rows. For every group j of 32 values and superblock b it has a unit of bytes: the codes, four consecutive
values of every slot after one another; then per slot d, d * sum, sum, and the sums of the two halves.
"""

from __future__ import annotations

from dataclasses import dataclass

from quarrel.cpu_backend.abi import Fields, KernelDef
from quarrel.cpu_backend.features import Level
from quarrel.cpu_backend.ir import I32, I64, Kernel, Val
from quarrel.cpu_backend.quantize import QuantRow, padded


def tile_slots(level: Level) -> int:
    """Activation rows of a tile: with `tile.vectors` vectors of weight rows, their sums fill the registers."""
    return 6 if level.registers >= 32 else 2


def tile_bytes(level: Level, k: int) -> int:
    """Bytes of a tile of rows of `k` values."""
    return padded(k) // 32 * _unit(tile_slots(level))


def _unit(slots: int) -> int:
    return -(-52 * slots // 64) * 64


@dataclass(frozen=True)
class Packed:
    """Offsets inside a tile at `base`, `blocks` superblocks long."""

    level: Level
    base: Val
    blocks: Val

    @property
    def slots(self) -> int:
        return tile_slots(self.level)

    @property
    def unit(self) -> int:
        return _unit(self.slots)

    @property
    def tile_bytes(self) -> Val:
        return self.blocks * (8 * self.unit)

    def at(self, group: Val, b: Val) -> Val:
        """Address of a unit."""
        return self.base + (self.blocks * group + b) * self.unit

    def codes(self, g: int, slot: int) -> int:
        return 4 * (g * self.slots + slot)

    def d(self, slot: int) -> int:
        return 32 * self.slots + 4 * slot

    def d_sum(self, slot: int) -> int:
        return 36 * self.slots + 4 * slot

    def sum32(self, slot: int) -> int:
        return 40 * self.slots + 4 * slot

    def sum16(self, half: int, slot: int) -> int:
        return (44 + 4 * half) * self.slots + 4 * slot


def _pack_row(k: Kernel, x: Packed, row: QuantRow, slot: Val) -> None:
    """Copies one quantised row into a slot."""
    skip = slot << 2
    with k.range(0, 8) as j, k.range(0, x.blocks) as b:
        to, word = x.at(j, b) + skip, (b << 3) + j << 2
        codes = row.codes + (b << 8) + (j << 5)
        for g in range(8):
            k.store(k.load(codes, I32, 4 * g), to, x.codes(g, 0))
        for source, offset in ((row.d, x.d(0)), (row.d_sum, x.d_sum(0)), (row.sum32, x.sum32(0))):
            k.store(k.load(source + word, I32), to, offset)
        for half in range(2):
            k.store(k.load(row.sum16 + (word << 1), I32, 4 * half), to, x.sum16(half, 0))


def pack(level: Level) -> KernelDef:
    """Chunk i packs rows [slots * i, ...) of x into tile i, the last row standing in for rows past the end."""
    slots = tile_slots(level)

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        x = Packed(level, a.out, a.p >> 8)
        tile = Packed(level, a.out + chunk * x.tile_bytes, a.p >> 8)
        with k.range(0, slots) as slot:
            row = k.minimum(chunk * slots + slot, a.live_rows - 1)
            _pack_row(k, tile, QuantRow(a.x + row * a.x_stride, a.p), slot)

    return KernelDef("pack", ("x", "x_stride", "p", "live_rows", "out"), body)


def pack_entries(level: Level, shared: int) -> KernelDef:
    """Chunk i packs the i-th tile of all experts' entries, in the order of `entries`; see `route.gather`."""
    slots = tile_slots(level)

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        x = Packed(level, a.out, a.p >> 8)
        tile = Packed(level, a.out + chunk * x.tile_bytes, a.p >> 8)
        first, end = (k.load(a.tiles + (chunk << 4), I64, 8 * i) for i in range(2))
        with k.range(0, slots) as slot:
            entry = k.load(a.entries + (k.minimum(first + slot, end - 1) << 3), I64)
            _pack_row(k, tile, QuantRow(a.x + entry.udiv(shared) * a.x_stride, a.p), slot)

    return KernelDef(f"pack/entries/{shared}", ("x", "x_stride", "p", "entries", "tiles", "out"), body)
