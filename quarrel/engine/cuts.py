"""Masks over probabilities, which the samplers cut by."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quarrel.ops.sample import over

Array = npt.NDArray[Any]


def softmax(x: Array, temperature: float = 1.0) -> Array:
    """Probabilities of one row `[V]`; at least one entry is finite."""
    e = np.exp(over(x - x.max(), temperature))
    p: Array = e / e.sum()
    return p


def typical(p: Array, mass: float) -> Array:
    """Mask of the tokens whose surprise is closest to the entropy, until their sum reaches `mass`; low ids first."""
    surprise = -np.log(np.where(p > 0, p, 1.0))
    away = np.where(p > 0, np.abs(surprise - (p * surprise).sum()), np.inf)
    order = np.argsort(away, kind="stable")
    count = int(np.searchsorted(np.cumsum(p[order]), mass)) + 1
    mask: Array = np.zeros(len(p), bool)
    mask[order[:count]] = True
    return mask


def without_top_choices(p: Array, threshold: float) -> Array:
    """Mask that leaves out all but the least likely of the tokens with `p >= threshold`, if there are two or more."""
    mask: Array = p > 0
    top = np.flatnonzero(mask & (p >= threshold))
    if len(top) > 1:
        spared = top[np.argmin(p[top])]
        mask[top] = False
        mask[spared] = True
    return mask
