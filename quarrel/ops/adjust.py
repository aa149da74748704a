"""Logits with what a request lays on single tokens before the next one is drawn: biases, bans, penalties of repetition, and
the mask of a grammar.

Row r has the entries `list_end[r - 1]` (0 for the first row) to `list_end[r]` of the lists: a token id, how often the text
has it, and a bias. The token that the row itself continues, `ids[rows[r]]`, counts once more, so that the lists need not
know it: a device may still be drawing it when the step is launched. For each id, with its entries' sums:

    x = logits[r, id] + bias                                          an infinite logit counts as minus infinity
    where the count is above 0:
        x = x / repetition[r]  if x > 0,  else x * repetition[r]      at most `MOST`
        x = x - count * frequency[r] - presence[r]

Last, where `mask_row[r]` is not -1, an id whose bit is 0 in that row of `masks` becomes minus infinity, unless it is NaN:
bit `id % 32` of word `id // 32`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from quarrel.ops.contract import Array, Case, Concrete, Op, Param, Value
from quarrel.ops.null import Builder

MOST = 1e30
"""A logit is not made larger: two that became infinite would have no difference."""
MOST_LISTED = 320
"""Entries of one row."""


@dataclass(frozen=True)
class AdjustSpec:
    """`n` logits a row."""

    n: int

    @property
    def words(self) -> int:
        """Of a mask."""
        return words_of(self.n)


def words_of(n: int) -> int:
    """32-bit words of a mask of so many ids."""
    return -(-n // 32)


def packed(allowed: Array) -> Array:
    """The mask of ids that may come, bool `[n]`."""
    bits = np.packbits(allowed, bitorder="little")
    return np.pad(bits, (0, -len(bits) % 4)).view(np.int32)


def penalised(x: Array, counts: Array, repetition: float, presence: float, frequency: float) -> Array:
    """Logits of tokens that the text has `counts` times, in the arithmetic of x."""
    with np.errstate(over="ignore"):
        x = np.where(x > 0, x / repetition, x * repetition)
    less: Array = np.minimum(x, MOST) - counts * frequency - presence
    return less


def adjust_reference(
    s: AdjustSpec,
    logits: Array,
    ids: Array,
    rows: Array,
    list_end: Array,
    list_ids: Array,
    list_counts: Array,
    list_biases: Array,
    repetition: Array,
    presence: Array,
    frequency: Array,
    mask_row: Array,
    masks: Array,
) -> tuple[Array]:
    """NumPy body, in float64."""
    out = np.where(np.isinf(logits), np.float32(-np.inf), logits)
    starts = np.append(0, list_end[:-1])
    for r, (first, end) in enumerate(zip(starts, list_end)):
        entries = slice(first, end)
        tokens = np.append(list_ids[entries], ids[rows[r]])
        found, at = np.unique(tokens, return_inverse=True)
        counts, biases = np.zeros(len(found)), np.zeros(len(found))
        np.add.at(counts, at, np.append(list_counts[entries], 1.0))
        np.add.at(biases, at, np.append(list_biases[entries], 0.0))
        x = out[r, found].astype(np.float64) + biases
        strengths = (float(a[r]) for a in (repetition, presence, frequency))
        out[r, found] = np.where(counts > 0, penalised(x, counts, *strengths), x)
        if mask_row[r] >= 0:
            bits = np.ascontiguousarray(masks[mask_row[r]], "<i4").view(np.uint8)
            allowed = np.unpackbits(bits, count=s.n, bitorder="little").astype(bool)
            out[r] = np.where(allowed | np.isnan(out[r]), out[r], np.float32(-np.inf))
    return (out,)


def _make(case: Case, rng: np.random.Generator) -> tuple[Concrete, ...]:
    n, tokens, rows, most = case.spec.n, case.dims["T"], case.dims["R"], case.dims["most"]
    logits = rng.standard_normal((rows, n), dtype=np.float32) * 3
    lengths = rng.integers(most + 1, size=rows)
    end = np.cumsum(lengths, dtype=np.int32)
    total = int(end[-1])
    # Few ids, so that some are listed twice and some are the row's own.
    known = rng.integers(n, size=min(n, max(2, most // 2)))
    ids, listed = (rng.choice(known, size).astype(np.int32) for size in (tokens, total))
    counts = rng.integers(3, size=total).astype(np.float32)
    biases = rng.choice(np.array([0.0, 0.0, 2.5, -4.0], np.float32), total)
    if case.dims.get("odd"):  # bans, infinities of both signs, and a row with a NaN
        biases[rng.random(total) < 0.2] = -np.inf
        logits[rng.random(logits.shape) < 0.2] = np.inf
        logits[rng.random(logits.shape) < 0.2] = -np.inf
        logits[-1, rng.integers(n)] = np.nan
    repetition = (1e-37,) if case.dims.get("huge") else (1.0, 1.3, 0.7)
    strengths = (repetition, (0.0, 0.6, -1.5), (0.0, 0.2, -0.4))
    chosen = (rng.choice(np.array(s, np.float32), rows) for s in strengths)
    several = case.dims.get("masks", 0)
    masks = np.stack([packed(rng.random(n) < rng.choice([0.0, 0.1, 0.9, 1.0])) for _ in range(max(1, several))])
    mask_row = rng.integers(-1, several, rows).astype(np.int32)
    own = rng.integers(tokens, size=rows).astype(np.int32)
    return logits, ids, own, end, listed, counts, biases, *chosen, mask_row, masks[:several]


def _strategy() -> Any:
    from hypothesis import strategies as st

    def case(n: int, tokens: int, rows: int, most: int, odd: int, masks: int) -> Case:
        return Case(AdjustSpec(n), {"T": tokens, "R": rows, "most": most, "odd": odd, "masks": masks})

    counts = st.integers(1, 9), st.integers(1, 6), st.integers(0, 70), st.integers(0, 1), st.integers(0, 3)
    return st.builds(case, st.integers(1, 3000), *counts)


_LISTS = (("list_end", "i32", "R"), ("list_ids", "i32", "L"), ("list_counts", "f32", "L"), ("list_biases", "f32", "L"))
_STRENGTHS = ("repetition", "presence", "frequency")

ADJUST = Op(
    "adjust",
    AdjustSpec,
    lambda s: (
        Param("logits", "f32", "R n"),
        Param("ids", "i32", "T"),
        Param("rows", "i32", "R"),
        *(Param(name, kind, axes) for name, kind, axes in _LISTS),  # type: ignore[arg-type]
        *(Param(name, "f32", "R") for name in _STRENGTHS),
        Param("mask_row", "i32", "R"),
        Param("masks", "i32", "M words"),
    ),
    lambda s: (Param("adjusted", "f32", "R n"),),
    reference=adjust_reference,
    make=_make,
    strategy=_strategy,
    cases=lambda: (
        [
            Case(AdjustSpec(n), {"T": t, "R": r, "most": most, "odd": odd, "masks": masks}, note)
            for n, t, r, most, odd, masks, note in (
                (1, 1, 1, 3, 0, 0, "one token"),
                (100, 7, 5, 12, 0, 0, ""),
                (33, 4, 3, 0, 0, 0, "no lists: each row's own token alone"),
                (8193, 4, 4, 64, 0, 2, "past a power of two"),
                (5001, 2, 2, MOST_LISTED, 0, 0, "long lists"),
                (77, 6, 6, 20, 1, 0, "infinities and NaN"),
                (97, 6, 8, 20, 1, 3, "masks, infinities and NaN"),
                (320, 4, 5, 0, 0, 4, "masks alone"),
            )
        ]
        + [Case(AdjustSpec(50), {"T": 3, "R": 3, "most": 20, "huge": 1}, "logits that would become infinite")]
    ),
)


def adjust(b: Builder, logits: Value, ids: Value, rows: Value) -> Value:
    """Logits `[R, n]` as they are drawn from; `ids` `[T]` and `rows` `[R]` say which token each row continues."""
    spec = AdjustSpec(int(logits.dims[1]))
    lists = (b.input(name) for name in ("list_end", "list_ids", "list_counts", "list_biases", *_STRENGTHS, "mask_row"))
    return b.emit(ADJUST, spec, logits, ids, rows, *lists, b.input("masks", spec.words))[0]
