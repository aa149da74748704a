"""Random numbers by counting: a pure function of (seed, position, lane), so no draw depends on what was drawn before.

    mix(x)   the finaliser of splitmix64 (Steele, Lea, Flood 2014): xor-shifts and two odd multiplications mod 2**64
    h        mix(mix(seed + G) + G * (LANES * position + lane + 1)),  G = 2**64 / golden ratio
    uniform  the top 24 bits of h, over 2**24: exact in float32, in [0, 1)

`position` is the index of the drawn token in its sequence, prompt included.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_G = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
LANES = 4
DRAW, XTC, ALTERNATIVE = 0, 1, 2


def mix(x: int) -> int:
    """Spreads each bit of a 64-bit number over all others."""
    x &= _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


def mixed(seed: int) -> int:
    """The part of the hash that a seed's numbers share."""
    return mix(seed + _G)


def _hash(seed: int, position: int, lane: int) -> int:
    return mix(mixed(seed) + _G * (LANES * position + lane + 1))


def uniform(seed: int, position: int, lane: int = DRAW) -> float:
    """A number in [0, 1) with 24 random bits."""
    return (_hash(seed, position, lane) >> 40) * 2.0**-24


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[Any], lane: int = DRAW) -> npt.NDArray[np.float32]:
    """`uniform` for each of the `mixed` seeds at its position."""
    with np.errstate(over="ignore"):
        x = seeds + np.uint64(_G) * (positions.astype(np.uint64) * np.uint64(LANES) + np.uint64(lane + 1))
        x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        x = x ^ x >> np.uint64(31)
    drawn: npt.NDArray[np.float32] = (x >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    return drawn


def alternative_seed(seed: int, index: int) -> int:
    """The seed of the `index`-th continuation of one prompt; the first keeps the request's own."""
    return seed if index == 0 else _hash(seed, index, ALTERNATIVE)
