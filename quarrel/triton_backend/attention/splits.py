"""Splits of the keys of a sequence with one new token, which programs walk side by side: on the host and in kernels.

They follow from the sequence's own length, and are longer in a step of many sequences, as there are programs enough; a few
sequences have so many at most that all key heads together fill the device (`whole_rounds`). Those of a sequence are of one
length, in whole steps of STEP keys, but the last, so a kernel finds that length from how many there are.
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
_AT_ONCE: tl.constexpr = tl.constexpr(8)
"""Splits that are added together where another kernel combines them: 64 take eight rounds of loads."""


def split_keys(seqs: int) -> int:
    """Most keys of a split, below MOST_SPLITS of them, in a step of so many sequences; a padded batch has the same.

    A layer of Mistral-7B with 128 sequences of 640 keys took 361 us in splits of 256 and 348 in splits of 1024 (H200).
    """
    if seqs < SEVERAL_SEQS:
        return SPLIT
    return 2 * SPLIT if seqs <= 64 else 8 * SPLIT


def whole_rounds(n_kv: int, places: int) -> int:
    """Most splits of a sequence whose programs, one to each of `n_kv` key heads, leave few of the device's places empty, in
    as few rounds as that takes: two rounds are two starts, and a third that is half empty takes as long as a full one.

    8 key heads in the 264 places of an H200, 33 splits for 64: 16.8 us for 24.8 behind 8192 keys, 43.8 for 48.2 behind
    32,000, 146.6 for 157.5 behind 131,072.
    """
    for rounds in range(1, 5):
        splits = rounds * places // n_kv
        if splits >= MOST_SPLITS:
            break
        if splits * n_kv * 16 >= rounds * places * 15:
            return splits
    return MOST_SPLITS


def most_of_each(seqs: int, most: int) -> int:
    """Splits of a sequence in a step of so many, where a few sequences have `most`."""
    return most if seqs < SEVERAL_SEQS else MOST_SPLITS


def splits_of(kv_len: Array, split: int = SPLIT, most: int = MOST_SPLITS) -> Array:
    """How many splits a sequence with one new token has, up to `most`: of `split` keys or fewer, if so many suffice."""
    count = np.clip(-(-kv_len // split), 1, most)
    keys = -(-kv_len // (count * STEP)) * STEP
    return -(-kv_len // np.maximum(keys, 1))


def splits_of_one(keys: int, most: int = MOST_SPLITS, short: int = 0) -> int:
    """`splits_of` for one sequence, but up to `short` splits have STEP keys or fewer."""
    count = min(max(cdiv(keys, SPLIT), min(cdiv(keys, STEP), short), 1), most)
    return cdiv(keys, max(cdiv(keys, count * STEP) * STEP, 1))


def most_splits(keys: int, seqs: int) -> int:
    """Splits of so many sequences, or of one, that hold so many keys in all."""
    return max(min(cdiv(keys, SPLIT) + seqs, MOST_SPLITS * seqs), splits_of_one(keys, short=MOST_SPLITS))


@triton.jit
def split_of(n_keys, splits):
    """Keys of a split of a sequence that has so many of them, by `splits_of`."""
    return (n_keys + splits * _STEP - 1) // (splits * _STEP) * _STEP


@triton.jit
def _greatest(partial, first_item, splits, head, HEADS: tl.constexpr):
    """Of a head: the greatest score of its splits, and the sum of all weights beside that."""
    i = tl.arange(0, PLACES)
    place = (first_item + i).to(tl.int64) * HEADS + head
    tops = tl.load(partial.top_sum + place * 2, mask=i < splits, other=float("-inf"))
    top = tl.max(tops, 0)
    sums = tl.load(partial.top_sum + place * 2 + 1, mask=i < splits, other=0.0)
    return top, tl.sum(sums * tl.exp2(tops - top), 0)


@triton.jit
def _weights(partial, first_item, begin, splits, head, top, HEADS: tl.constexpr):
    """Of splits begin.., some at a time [_AT_ONCE]."""
    j = begin + tl.arange(0, _AT_ONCE)
    at = (first_item + j).to(tl.int64) * HEADS + head
    return tl.exp2(tl.load(partial.top_sum + at * 2, mask=j < splits, other=float("-inf")) - top)


@triton.jit
def _pieces(partial, first_item, begin, splits, head, HEADS: tl.constexpr, WIDE: tl.constexpr):
    """Their sums, `[_AT_ONCE, WIDE]`."""
    j = begin + tl.arange(0, _AT_ONCE)
    at = ((first_item + j).to(tl.int64) * HEADS + head) * WIDE
    return tl.load(partial.sums + at[:, None] + tl.arange(0, WIDE)[None, :], mask=(j < splits)[:, None], other=0.0)


@triton.jit
def combine_head(
    p_out, partial, item_start, seq, head, HEADS: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """One head's sums over the splits of a sequence, some at a time and in order, into p_out [WIDE]; nothing where its
    one split has left the result there. `partial` is a `records.Partial`."""
    first_item = tl.load(item_start + seq)
    splits = tl.load(item_start + seq + 1) - first_item
    if splits > 1:
        top, total = _greatest(partial, first_item, splits, head, HEADS)
        r = tl.arange(0, WIDE)
        acc = tl.zeros([WIDE], tl.float32)
        for begin in range(0, splits, _AT_ONCE):
            weight = _weights(partial, first_item, begin, splits, head, top, HEADS)
            acc += tl.sum(_pieces(partial, first_item, begin, splits, head, HEADS, WIDE) * weight[:, None], 0)
        tl.store(p_out + r, (acc / total).to(p_out.dtype.element_ty))


@triton.jit
def combined(x, partial, first_item, splits, head, HEADS: tl.constexpr, WIDE: tl.constexpr):
    """`combine_head` of a step's one row, or x `[HEADS * WIDE]` where its one split has left the result there: [WIDE], of
    x's type. Some splits are on their way while those before them are added."""
    r = tl.arange(0, WIDE)
    if splits > 1:
        piece = _pieces(partial, first_item, 0, splits, head, HEADS, WIDE)
        top, total = _greatest(partial, first_item, splits, head, HEADS)
        acc = tl.zeros([WIDE], tl.float32)
        for begin in tl.range(0, splits, _AT_ONCE, num_stages=1):
            n_piece = _pieces(partial, first_item, begin + _AT_ONCE, splits, head, HEADS, WIDE)
            acc += tl.sum(piece * _weights(partial, first_item, begin, splits, head, top, HEADS)[:, None], 0)
            piece = n_piece
        result = (acc / total).to(x.dtype.element_ty)
    else:
        result = tl.load(x + head * WIDE + r)
    return result
