"""A batch as the arrays of a step. Between two steps of decoding this runs while a device waits, so there are no loops over
tokens in it, and the sampling controls of a sequence are entered once, in the row of its slot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from quarrel.engine import rng
from quarrel.engine.cache import Cache
from quarrel.engine.images import SightRules
from quarrel.engine.listed import Row, lists_of
from quarrel.engine.scheduler import Batch, Part
from quarrel.engine.sequence import Sequence
from quarrel.ops.step import Joined, Limits, Lists, Masks, Rows, SampleInputs, StepInputs, outputs_of

Array = npt.NDArray[Any]

_NO_ROWS: Mapping[bytes, Rows] = {}


class Inputs:
    """Fills the arrays. A step in which no row is wanted returns its last one: no backend has to handle an empty result."""

    def __init__(self, limits: Limits, cache: Cache, sight: SightRules | None = None) -> None:
        self._limits, self._cache, self._sight = limits, cache, sight
        self._none = np.zeros((1, sight.width if sight else 0), np.float32)
        self._slot_owners: list[Sequence | None] = [None] * limits.max_seqs
        self._controls = np.zeros((4, limits.max_seqs), np.float32)  # temperature, top_k, top_p, min_p
        self._seeds = np.zeros(limits.max_seqs, np.uint64)

    def of(self, batch: Batch, rows: Mapping[bytes, Rows] = _NO_ROWS) -> StepInputs:
        """rows: those of the images that lie in the batch, by digest."""
        inputs = self._texts(batch)
        return inputs if self._sight is None else self._images(self._sight, inputs, batch, rows)

    def _images(self, rules: SightRules, inputs: StepInputs, batch: Batch, rows: Mapping[bytes, Rows]) -> StepInputs:
        places, see_to = np.repeat(inputs.positions[:, None], rules.axes, 1), inputs.positions.copy()
        put, found, count = np.full(len(inputs.ids), -1, np.int32), list[Rows](), 0
        for part, first in zip(batch.parts, inputs.query_start.tolist()):
            sight, start, end = part.sequence.sight, part.start, part.start + part.count
            if sight is None:
                continue
            places[first : first + part.count] = sight.places(start, part.count)
            see_to[first : first + part.count] = sight.see_to(start, part.count)
            for image in sight.between(start, end):
                low, high = max(start, image.start), min(end, image.end)
                put[first + low - start : first + high - start] = np.arange(count, count + high - low)
                found.append(rows[image.digest][low - image.start : high - image.start])
                count += high - low
        # Rows that a device keeps are not fetched for this.
        images = Joined(found) if found else self._none
        return replace(inputs, places=places, see_to=see_to, image_rows=put, images=images)

    def _texts(self, batch: Batch) -> StepInputs:
        parts, size = batch.parts, self._limits.block_size
        slots = np.array([p.sequence.slot for p in parts], np.int32)
        first = np.array([p.start for p in parts], np.int32)
        counts = np.array([p.count for p in parts], np.int32)
        wanted = np.array([p.rows for p in parts], np.int32)
        lengths = first + counts
        starts = np.zeros(len(parts) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        owners = np.repeat(np.arange(len(parts)), counts)  # [T] which part
        positions = np.arange(starts[-1], dtype=np.int32) - np.repeat(starts[:-1] - first, counts)
        cache, grouped = self._cache, self._cache.rules.window_groups > 0
        blocks = cache.every_table[:, slots[owners], positions // size]  # [1 + W, T]
        places = blocks * np.int32(size) + positions % size
        tables = cache.every_table[:, slots, : cache.blocks_for(int(lengths.max()))]
        rows = _last_of_each(starts[1:], wanted)
        return StepInputs(
            ids=np.array(_ids(parts), np.int32),
            positions=positions,
            slots=places[0],
            query_start=starts,
            kv_len=lengths,
            block_table=tables[0],
            out_rows=rows if len(rows) else starts[-1:] - 1,
            sample=self._sample(batch, owners, positions, rows) if "tokens" in outputs_of(batch.want) else None,
            state_slots=slots,
            adapter=np.array([p.sequence.adapter for p in parts], np.int32)[owners] if self._limits.n_adapters else None,
            from_last=_from_last(parts, starts),
            window_slots=places[1:] if grouped else None,
            window_tables=tables[1:] if grouped else None,
        )

    def _sample(self, batch: Batch, owners: Array, positions: Array, rows: Array) -> SampleInputs:
        if not len(rows):
            return _GREEDY
        for part in batch.parts:
            if part.rows and self._slot_owners[part.sequence.slot] is not part.sequence:
                self._enter(part.sequence)
        slots = np.array([p.sequence.slot for p in batch.parts])[owners[rows]]
        temperature, top_k, top_p, min_p = self._controls[:, slots]
        uniform = rng.uniforms(self._seeds[slots], positions[rows] + 1)
        lists, masks = _lists(batch.parts), _masks(batch.parts)
        return SampleInputs(temperature, top_k.astype(np.int32), top_p, min_p, uniform, lists, masks)

    def leave(self, s: Sequence) -> None:
        """Its seed will be another."""
        if self._slot_owners[s.slot] is s:
            self._slot_owners[s.slot] = None

    def _enter(self, s: Sequence) -> None:
        self._slot_owners[s.slot] = s
        self._seeds[s.slot] = rng.mixed(s.seed)
        # What the host samples is greedy here, the quickest.
        self._controls[:, s.slot] = Sequence.draws if s.want == "logits" else s.draws


def _lists(parts: tuple[Part, ...]) -> Lists | None:
    """Biases and penalties of each row; None where there are none."""
    if not any(p.rows and p.sequence.listed for p in parts):
        return None
    rows: list[Row] = []
    for part in parts:
        s, end = part.sequence, part.start + part.count
        rows += [(s.listed, s.tokens, part.draft, end - i) for i in range(part.rows - 1, -1, -1)]
    return lists_of(rows)


def _masks(parts: tuple[Part, ...]) -> Masks | None:
    """Of the rows that follow a grammar; None where no row does."""
    found = [part.sequence.mask() if part.rows else None for part in parts]
    masks = [mask for mask in found if mask is not None]
    if not masks:
        return None
    rows = np.cumsum([mask is not None for mask in found]) - 1
    mask_row = np.where([mask is not None for mask in found], rows, -1)
    return Masks(np.repeat(mask_row, [part.rows for part in parts]).astype(np.int32), np.stack(masks))


def _from_last(parts: tuple[Part, ...], starts: Array) -> Array | None:
    """The row of the launch before for each token that it draws; such a token is the only one of its part."""
    rows = [p.sequence.row if p.sequence.drawn else -1 for p in parts]
    if max(rows) < 0:
        return None
    last: Array = np.full(starts[-1], -1, np.int32)
    last[starts[1:] - 1] = rows
    return last


def _ids(parts: tuple[Part, ...]) -> list[int]:
    """Of all tokens; 0 for one that is on the device only."""
    ids: list[int] = []
    for part in parts:
        tokens, end = part.sequence.tokens, part.start + part.count - len(part.draft)
        if part.count == 1:
            ids.append(tokens[part.start] if part.start < len(tokens) else 0)
        else:
            ids += tokens[part.start : end]
            ids += [0] * (end - max(part.start, len(tokens)))
            ids += part.draft
    return ids


def _last_of_each(ends: Array, counts: Array) -> Array:
    """Indices of the last `counts[i]` before `ends[i]`, in order."""
    total = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=total[1:])
    rows: Array = np.arange(total[-1], dtype=np.int32) + np.repeat(ends - total[1:], counts).astype(np.int32)
    return rows


_ONE, _ZERO = np.ones(1, np.float32), np.zeros(1, np.float32)
_GREEDY = SampleInputs(_ZERO, np.zeros(1, np.int32), _ONE, _ZERO, _ZERO)
