"""Splits of the keys of a sequence with one new token, which programs walk side by side: on the host and in kernels.

They follow from the sequence's own length, and are longer in a step of many sequences, as there are programs enough.
Those of a sequence are of one length, in whole steps of STEP keys, but the last.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

from quarrel.ops.contract import Array
from quarrel.triton_backend.runtime.launch import cdiv, power_of_two

SPLIT, MOST_SPLITS, STEP = 128, 64, 32
SEVERAL_SEQS = 5
"""Sequences from which splits are twice as long: fewer of them meet."""
MANY_SEQS = 17
"""Sequences from which there are programs enough for longer splits and smaller tiles."""
PLACES: tl.constexpr = tl.constexpr(power_of_two(MOST_SPLITS))
_STEP: tl.constexpr = tl.constexpr(STEP)


def split_keys(seqs: int) -> int:
    """Most keys of a split, below MOST_SPLITS of them, in a step of so many sequences; a padded batch has the same.

    A layer of Mistral-7B with 128 sequences of 640 keys took 361 us in splits of 256 and 348 in splits of 1024 (H200).
    """
    if seqs < SEVERAL_SEQS:
        return SPLIT
    return 2 * SPLIT if seqs <= 64 else 8 * SPLIT


def splits_of(kv_len: Array, split: int = SPLIT, most: int = MOST_SPLITS) -> Array:
    """How many splits a sequence with one new token has, up to `most`: of `split` keys or fewer, if so many suffice."""
    count = np.clip(-(-kv_len // split), 1, most)
    keys = -(-kv_len // (count * STEP)) * STEP
    return -(-kv_len // np.maximum(keys, 1))


def splits_of_one(keys: int) -> int:
    """`splits_of` for one sequence."""
    count = min(max(cdiv(keys, SPLIT), 1), MOST_SPLITS)
    return cdiv(keys, max(cdiv(keys, count * STEP) * STEP, 1))


def most_splits(keys: int, seqs: int) -> int:
    """Splits of so many sequences that hold so many keys in all."""
    return min(cdiv(keys, SPLIT) + seqs, MOST_SPLITS * seqs)


@triton.jit
def split_of(n_keys, SPLIT: tl.constexpr, MOST: tl.constexpr):
    """Keys of a split, as in `splits_of`."""
    count = tl.minimum(tl.maximum((n_keys + SPLIT - 1) // SPLIT, 1), MOST)
    return (n_keys + count * _STEP - 1) // (count * _STEP) * _STEP
