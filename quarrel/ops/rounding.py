"""Errors of the size that an arithmetic makes, put into values: what the rounding of a model's own data does to a result.

How far two right ways through the same ops may be apart depends on the data as much as on the format. A sum of k rounded
terms is off by u * sqrt(k) of a term, a softmax multiplies an error of its scores by their size, a column of activations a
hundred times as large as its neighbours makes the steps of their 8-bit codes a hundred times as wide. So no table of
constants holds for every model: the data is shaken by errors of the known size, and what comes out is compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from quarrel.ops.contract import Array, Compute, Op

ROUNDOFF: Mapping[Compute, float] = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, "int8": 2.0**-24}
"""Largest relative error of storing a value between two ops. With `int8`, values stay float32 there: a map rounds its input
to codes, the same ones in every kernel."""

CODED = ("linear", "expert_up", "expert_down", "chosen_linear")
"""Ops that round their `act` input to 8 bits, with a scale for BLOCK columns, in `int8` arithmetic."""
BLOCK, CODES = 32, 127

Shake = Callable[[Op, Array], Array]


def shake_inputs(compute: Compute, rng: np.random.Generator) -> Shake:
    """What an op's arithmetic makes of an `act` input: each value off by a rounding, or by half a step of its code."""

    def shake(op: Op, x: Array) -> Array:
        if compute != "int8" or op.name not in CODED:
            return shake_result(x, ROUNDOFF[compute], rng)
        padded = np.zeros((*x.shape[:-1], -(-x.shape[-1] // BLOCK) * BLOCK), np.float32)
        padded[..., : x.shape[-1]] = x
        steps = np.abs(padded).reshape(*x.shape[:-1], -1, BLOCK).max(-1) / CODES
        half = 0.5 * np.repeat(steps, BLOCK, -1)[..., : x.shape[-1]]
        coded: Array = x + half * rng.uniform(-1, 1, x.shape).astype(np.float32)
        return coded

    return shake


def result_error(compute: Compute, terms: int) -> float:
    """RMS error, relative to its size, of a result that is stored between ops: its rounding, those of the few values
    behind it, which add up as squares do, and those of a float32 sum of so many terms."""
    return ROUNDOFF[compute] + ROUNDOFF["float32"] * math.sqrt(terms)


def shake_result(x: Array, error: float, rng: np.random.Generator) -> Array:
    """`x`, `[T, ...]`, off by this relative error.

    It is relative to the value or to the RMS of its column over the rows, whichever is larger: a sum that happens to be
    small has the errors of its terms.
    """
    sizes = np.maximum(np.abs(x), np.sqrt(np.mean(np.square(x), 0, keepdims=True)))
    shaken: Array = x + sizes * (np.float32(error) * rng.standard_normal(x.shape, np.float32))
    return shaken
