"""How steps of one row are cut into programs: by format and shape alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from quarrel.triton_backend.formats.table import FLOATS
from quarrel.triton_backend.runtime.launch import INTERPRETED, cdiv, power_of_two

LARGEST_WALK = 1 << 25
"""Weights of a gate (or its up matrix) of which a walk may be worth it."""


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


@dataclass(frozen=True)
class ExpertTile(Tile):
    """`tiles` at once, and as many ahead. `rounds`: programs of 32 rows count themselves, the last writes the int8x2."""

    tiles: int = 1
    rounds: bool = True


def up_tile_for(format: str, n: int, k: int) -> ExpertTile:
    """For the gate and up matrices of a chosen expert, `[n, k]`: tiles as for a map alone."""
    tile = narrow_tile_for(format, n, k)
    if INTERPRETED:
        return _together(tile, cdiv(_words(format, k), tile.words), 2)
    # Each program that counts itself waits until its rows are written, which a launch more does not: gpt-oss 2 us a layer,
    # Mixtral 5.6.
    return replace(_together(tile, 1, 1), rounds=format not in ("MXFP4", "Q4_K"))


def down_tile_for(format: str, n: int, k: int, used: int) -> ExpertTile:
    """For the matrices `[n, k]` of the chosen experts, so many for each output.

    Programs are few, so each asks for much at once: a layer of gpt-oss is 9 us shorter with six tiles, one of Mixtral in
    Q6_K 4 with two of 256 words, one of LFM2-8B-A1B 2.5 and one of Gemma 4 26B-A4B 1.5 with eight tiles for four.
    """
    tile = narrow_tile_for(format, n, k)
    words = k if format in FLOATS else _words(format, k)
    if format == "Q6_K" and words > 1024 and not INTERPRETED:
        return _together(replace(tile, words=256, warps=2), used * cdiv(words, 256), 2)
    tiles = used * cdiv(words, tile.words)
    return _together(tile, tiles, 3 if INTERPRETED else 6 if tiles % 8 else 8)


def _together(tile: Tile, tiles: int, most: int) -> ExpertTile:
    """As many of these tiles at once as divide them, up to `most`."""
    return ExpertTile(tile.rows, tile.words, tile.warps, tiles=max(d for d in range(1, most + 1) if tiles % d == 0))


def tile_for(format: str, n: int, k: int) -> Tile:
    """For a map alone, by format and shape alone.

    What each is worth was measured in whole steps on an H200, map by map (docs/decisions.md): whole rows where a tile of
    two to eight warps holds one, so that all of it is on its way before the wait; else two or four warps for long rows,
    and narrow tiles for many rows, of which more programs fit a multiprocessor.
    """
    if INTERPRETED:
        return narrow_tile_for(format, n, k)
    if format in FLOATS:
        return _floats(n, k)
    words = _words(format, k)
    if format == "Q8_0" and words == 1024 and n < k:
        return Tile(8, 256, 2, deep=True)  # gpt-oss' o, 0.4 us for 4 warps of 512 words
    if format == "Q8_0" and words % 512 == 0:
        return Tile(8 if words == 1024 and n <= 8192 else 4, 512, 4)  # Mistral-7B's o 1%, all maps 2%
    if format == "Q8_0":
        return narrow_tile_for(format, n, k)
    if words == 256:
        return Tile(4, 256, 2)  # TinyLlama: query, key, value and o 6%, gate and up 9%, head 1% of a step
    if 256 < words <= 512 and n <= 4096:
        return Tile(4, 512, 4)  # Mistral-7B's o, 3.7 us for 4.4; Granite-4-micro's o, query, key and value 1%
    if words > 512 and n < 4096:
        # Granite-4-micro's down 8%, TinyLlama's 11%
        return Tile(4, 512, 4) if words % 512 == 0 else Tile(2, 256, 2, deep=True)
    if words > 512:
        return Tile(2, 256, 2)  # Mistral-7B's down, 5%; two tiles ahead 3%
    if n >= 8 * k and words >= 256:
        return Tile(4, 256, 2) if words % 256 == 0 else Tile(4, 64, 1)  # heads: Mistral-7B 0.6%, Granite-4-micro 2.4%
    return Tile(4, 128, 1) if words == 512 else narrow_tile_for(format, n, k)  # Mistral-7B's query, key and value, 3%


def _floats(n: int, k: int) -> Tile:
    """SmolLM2-135M: down in whole rows 7% of a step, head 3%, query, key and value 2%, o 1%."""
    words = power_of_two(k)
    if not 512 < words <= 2048:
        return Tile(2, min(256, words), 1)
    if n >= 8 * k:
        return Tile(4, 256, 2)
    return Tile(2, words, 2) if words == 1024 else Tile(1, words, 8)


def _words(format: str, k: int) -> int:
    """Of the codes of a row."""
    return cdiv(k, 4 if format == "Q8_0" else 8)


def gate_tile_for(format: str, n: int, k: int) -> Tile:
    """For a gate and its up matrix together: narrow tiles, but whole rows of 2048 columns and of Q8_0 as for a map alone.

    In steps of Mistral-7B other tiles were 0.5 to 7% behind, in Granite-4-micro's 1 to 5%. Of 2560 columns and 10240
    outputs (Gemma-4-E4B), which no whole tiles of 128 words cover, four rows of 64 took 12 layers 640 us for 651.
    """
    words = _words(format, k)
    if format == "Q8_0" and words % 512 == 0 and not INTERPRETED:
        return Tile(4, 512, 4)
    if INTERPRETED or format in FLOATS or words == 256:
        return tile_for(format, n, k)
    if format != "Q8_0" and words % 128 == 64 and n >= 4 * k:
        return Tile(4, 64, 1)
    return Tile(1 if format == "Q8_0" else 2, min(128, power_of_two(words)), 1)


@dataclass(frozen=True)
class Walk:
    """`rows` of W at a time, a whole row of `words`, in `each` programs on every multiprocessor (`stream.py`)."""

    rows: int
    words: int
    warps: int
    each: int


def walk_for(format: str, n: int, k: int) -> Walk | None:
    """For a gate and its up matrix, by format and shape alone: eight values to a thread, 24 warps a multiprocessor.

    What is saved is the launch of a norm. In SmolLM2-135M that is 2% of a step, ahead of tiles. None: tiles behind a norm,
    which were ahead of any walk over integers (4% in Mistral-7B, 9% in TinyLlama and Granite-4-micro): a row that is
    made int8x2 by every program takes the registers of loads.
    """
    words = power_of_two(k)
    warps = max(1, words // 256)
    if format not in FLOATS or warps > 8 or n * k > LARGEST_WALK:
        return None
    if INTERPRETED:
        return Walk(16, words, 1, 1) if warps == 1 else None  # both ways run there
    return Walk(2, words, warps, 24 // warps)


@cache
def multiprocessors(device: torch.device) -> int:
    """Of the GPU that tensors are on, or that those without storage stand for: a cut depends on it."""
    if device.type == "cpu" or not torch.cuda.is_available():
        return 2
    found = device if device.type == "cuda" else torch.device("cuda", torch.cuda.current_device())
    return torch.cuda.get_device_properties(found).multi_processor_count


def tiles_for(formats: Sequence[str], n: int, k: int) -> list[Tile]:
    """For maps of one row that share a launch, `n` outputs in all: rows and warps are the same for each."""
    tiles = [tile_for(f, n, k) for f in formats]
    if len({(t.rows, t.warps) for t in tiles}) > 1:
        return [Tile(2, min(t.words, 128), 1, t.deep) for t in tiles]
    return tiles
