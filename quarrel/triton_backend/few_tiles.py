"""How steps of one row are cut into programs: by format and shape alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from quarrel.triton_backend.dots import FLOATS
from quarrel.triton_backend.runtime import INTERPRETED, cdiv, power_of_two

LARGEST_WALK = 1 << 25
"""Weights of a gate (or its up matrix) above which a walk loses to tiles."""


@dataclass(frozen=True)
class Tile:
    """`rows` of W a program, `words` of codes at a time (values, for the float types), `deep` two tiles ahead, not one."""

    rows: int
    words: int
    warps: int
    deep: bool = False


def narrow_tile_for(format: str, n: int, k: int) -> Tile:
    """One warp of two rows by 128 words, by format and shape alone: what chosen experts were measured with.

    Long rows of few outputs have few programs, so each of those loads further ahead.
    """
    if INTERPRETED:
        return Tile(16, 64, 1, deep=True)  # programs run one after the other there
    if format in FLOATS:
        return Tile(2, min(256, power_of_two(k)), 1)
    return Tile(2, min(128, power_of_two(_words(format, k))), 1, deep=n < 3 * k)


def tile_for(format: str, n: int, k: int) -> Tile:
    """For a map alone, by format and shape alone; all figures are of an H200.

    Large matrices: narrow tiles, in a step of Mistral-7B 20% ahead of four warps of two rows each; one row of gate and up
    each made the step 9% longer. Where a tile of two or four warps is a whole row, all of it is on its way before the
    wait: 3.7 us for 4096 x 4096 in Q4_K, against 4.4 us, and a step of TinyLlama, of 2048 columns, 6% shorter. Twice as
    wide tiles for its 2048 outputs of 5632 columns: 11% of that step. Q8_0 has whole steps of Mistral-7B 2% shorter so.
    """
    words = _words(format, k)
    if INTERPRETED or format in FLOATS:
        return narrow_tile_for(format, n, k)
    if format == "Q8_0" and words % 512 == 0:
        return Tile(4, 512, 4)
    if words in (256, 512) and n <= 8192:
        return Tile(4, words, words // 128)
    if words > 512 and n <= 2048:
        return Tile(2, 256, 2, deep=True)
    return narrow_tile_for(format, n, k)


def _words(format: str, k: int) -> int:
    """Of the codes of a row."""
    return cdiv(k, 4 if format == "Q8_0" else 8)


@dataclass(frozen=True)
class Walk:
    """`rows` of W at a time, `words` of codes (a whole row), in `each` programs on every multiprocessor (`stream.py`)."""

    rows: int
    words: int
    warps: int
    each: int


def gate_tile_for(format: str, n: int, k: int) -> Tile:
    """For a gate and its up matrix together; in Q8_0 half as many rows of each, as Mistral-7B was measured."""
    tile = tile_for(format, n, k)
    return replace(tile, rows=tile.rows // 2) if format == "Q8_0" and not INTERPRETED else tile


def walk_for(format: str, n: int, k: int) -> Walk | None:
    """By format and shape alone: a block of 32 columns to a thread. None: tiles behind a norm.

    What is saved is a launch, 1.6 us on an H200, and what is lost are bytes on their way: with gate and up of Mistral-7B,
    68 MB, tiles behind a norm were 1.5% ahead (564.6 tok/s against 556.3), and 15% in Q8_0.

    Four rows of gate and of up in Q4_K take 128 registers, so 16 warps a multiprocessor; two, of integers, take 77 to 96,
    norm included, so 20: 7% of a step of TinyLlama's ahead of 16. Four have more bytes on their way, two share rows out
    better where there are few: the longest program decides, on 132 multiprocessors.
    """
    if format in FLOATS:
        words, warps = power_of_two(k), max(1, power_of_two(k) // 256)
    else:
        per = 4 if format == "Q8_0" else 8
        words = power_of_two(cdiv(max(k, 64), per))  # the norm takes even and odd blocks apart
        warps = max(1, words // 128)
    if INTERPRETED:
        return Walk(16, words, 1, 1) if warps == 1 else None  # both ways run there
    if warps > 8 or n * k > LARGEST_WALK or format == "Q8_0":
        return None
    longest = {rows: rows * cdiv(cdiv(n, rows), 132 * (16 // warps)) for rows in (2, 4)}
    rows = 4 if format == "Q4_K" and longest[4] <= longest[2] else 2
    return Walk(rows, words, warps, (16 if rows == 4 or format in FLOATS else 20) // warps)


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def tiles_for(formats: Sequence[str], n: int, k: int) -> list[Tile]:
    """For maps of one row that share a launch, `n` outputs in all: rows and warps are the same for each."""
    tiles = [tile_for(f, n, k) for f in formats]
    if len({(t.rows, t.warps) for t in tiles}) > 1:
        return [Tile(2, min(t.words, 128), 1, t.deep) for t in tiles]
    return tiles
