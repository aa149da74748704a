"""The host's integers on their way to the device: one staging buffer, one copy a step, fixed addresses for a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from quarrel.errors import RequestError
from quarrel.ops.adjust import MOST_LISTED
from quarrel.ops.contract import Array, Value
from quarrel.ops.program import group_input
from quarrel.ops.step import Joined, Limits, Lists, SampleInputs, StepInputs, no_lists, no_masks
from quarrel.triton_backend.attention import fixed
from quarrel.triton_backend.attention.splits import (
    MOST_SPLITS,
    SEVERAL_SEQS,
    most_of_each,
    most_splits,
    split_keys,
    splits_of,
    splits_of_one,
)
from quarrel.triton_backend.runtime.arrays import Slot
from quarrel.triton_backend.runtime.launch import cdiv, power_of_two
from quarrel.triton_backend.runtime.rows import DeviceRows
from quarrel.triton_backend.runtime.site import Batch, Tables

_SAMPLE = ("temperature", "top_k", "top_p", "min_p", "uniform")
_ROW_LISTS = ("list_end", "repetition", "presence", "frequency")
_ENTRIES = ("list_ids", "list_counts", "list_biases")
_MASKS = "masks"
_FLOATS = ("temperature", "top_p", "min_p", "uniform", "repetition", "presence", "frequency", "list_counts", "list_biases")
_WIDE = ("stream", "per_layer", "patches", "images")
_HANDED_ON = ("stream", "per_layer")
_PINNED_ROWS = 512
"""Of what another stage hands on, in pinned memory: more of them are copied while the host waits, as all other rows are."""
_FURTHER = {"places": 0, "see_to": 0, "image_rows": -1}
"""What only programs with images read: rows of numbers, and integers of a token with what they are in one that is added."""
_NONE: Mapping[str, Any] = {}
_ALIGN = 4  # int32s: 16 bytes, so that kernels may load wide
_SMALL = 32
_AT_ONCE = 1 << 16
"""Up to so many integers go in one copy, tables of groups and what lies unused between them: 5 microseconds of the bus, and
each further copy costs the host more."""
_RING = 4
"""Batches on their way: the host fills one while the copies of those before may still wait for the device."""

_LEAST = 16
"""Tokens of a padded step."""
ADDED = 1
"""Sequences that there is room for beside those of a full step, for tokens that are added."""


def item_starts(
    query_start: Array, kv_len: Array, seqs: int = 0, same: bool = False, most: int = MOST_SPLITS, short: int = 0
) -> Array:
    """Where each sequence's items begin, `[S + 1]`: a split of keys each, of the sequences with one new token.

    `seqs`: sequences of the padded step, where the step is cut into splits by more than those that there are.
    `same`: of a deterministic step, whose splits lie at fixed keys (`attention/fixed.py`).
    `most`: splits of each, where there are few sequences; `short`: of one, of as few keys as may be.
    """
    if same:
        splits = np.where(np.diff(query_start) == 1, -(-kv_len // fixed.SPLIT), 0)
        return np.concatenate([[0], np.cumsum(splits)]).astype(np.int32)
    if len(kv_len) == 1 and seqs <= 1:
        one = int(query_start[1]) - int(query_start[0]) == 1
        return np.array([0, splits_of_one(int(kv_len[0]), most, short) if one else 0], np.int32)
    single = np.diff(query_start) == 1
    seqs = max(seqs, len(kv_len))
    splits = splits_of(kv_len, split_keys(seqs), most_of_each(seqs, most))
    return np.concatenate([[0], np.cumsum(np.where(single, splits, 0))]).astype(np.int32)


def item_bucket(items: int, seqs: int, most: int = MOST_SPLITS, splits: bool = True) -> int:
    """Items that a graph for so many sequences has programs for: beyond 16 splits a sequence they no longer grow. Without
    splits (`Batch.splits`) several sequences have one item each, at most."""
    if not splits and seqs >= SEVERAL_SEQS:
        return seqs
    most = most_of_each(seqs, most)
    places = (seqs * each for each in (min(4, most), min(16, most), most))
    return next((n for n in places if items <= n), power_of_two(items))


def most_items(limits: Limits) -> int:
    """Items of a step whose sequences share no block of the cache."""
    if limits.deterministic:
        return cdiv(limits.n_blocks * limits.block_size, fixed.SPLIT) + limits.max_seqs
    return most_splits(limits.n_blocks * limits.block_size, limits.max_seqs)


def batch_of(query_start: Array, kv_len: Array, rows: int, starts: Array | None = None) -> Batch:
    """The host's view of a batch; `starts` are its `item_starts`."""
    starts = item_starts(query_start, kv_len) if starts is None else starts
    tokens, seqs, items = int(query_start[-1]), len(kv_len), int(starts[-1])
    if seqs == 1:
        return Batch(tokens, 1, rows, tokens == 1, tokens > 1, items)
    new = np.diff(query_start)
    splits = bool((np.diff(starts) > 1).any())
    return Batch(tokens, seqs, rows, bool((new == 1).any()), bool((new > 1).any()), items, splits=splits)


def _bounds(values: Array) -> tuple[int, int]:
    """Least and greatest; a list is quicker than NumPy for a few."""
    if values.size <= _SMALL:
        flat = values.ravel().tolist()
        return min(flat), max(flat)
    return int(values.min()), int(values.max())


class _Places:
    """Where each input of a step of up to so many tokens, sequences and rows begins; the block tables come last but for the
    entries of lists."""

    def __init__(self, limits: Limits, most: int, hosts: Sequence[Array] = (), further: Mapping[str, int] = _NONE) -> None:
        """further: integers of a token that only some programs read, and how many of them."""
        tokens, seqs = min(most, limits.max_tokens), min(most, limits.max_seqs + ADDED)
        lengths = {
            "table_width": 1,
            "tokens": 1,
            "query_start": seqs + 1,
            "window_start": seqs + 1,
            "kv_len": seqs,
            "item_start": seqs + 1,
            "state_slots": seqs,
        }
        each = ("ids", "from_last", "positions", "slots", "adapter", "out_rows", *_SAMPLE, *_ROW_LISTS, "mask_row")
        lengths |= dict.fromkeys(each, tokens)
        groups = range(limits.window_groups + 1)
        lengths |= {group_input("slots", group): tokens for group in groups}
        lengths |= {name: each * tokens for name, each in further.items()}
        self.begin: dict[str, int] = {}
        end = 0
        for name, length in lengths.items():
            self.begin[name], end = end, end + cdiv(length, _ALIGN) * _ALIGN
        slots, table = (cdiv(length, _ALIGN) * _ALIGN for length in (tokens, seqs * limits.max_blocks_per_seq))
        self.tables = [end + group * table for group in groups]
        self.begin |= {group_input("block_table", group): begin for group, begin in enumerate(self.tables)}
        self.listed = end + len(groups) * table
        room = tokens * MOST_LISTED
        self.begin |= {name: self.listed + i * room for i, name in enumerate(_ENTRIES)}
        self.size = self.listed + len(_ENTRIES) * room
        self.arrays = [self._named(ints) for ints in hosts]
        # Those of groups follow each other: `[W, ..]`.
        shapes = ((self.begin.get(group_input("slots", 1), 0), slots), (end + table, table))
        self.windows = [
            [ints[begin : begin + (len(groups) - 1) * each].reshape(-1, each) for begin, each in shapes] for ints in hosts
        ]

    def _named(self, ints: Array) -> dict[str, Array]:
        reals = ints.view(np.float32)
        return {name: (reals if name in _FLOATS else ints)[begin:] for name, begin in self.begin.items()}


class InputBuffer:
    """Every step input at its own place, by the size of the step: what is copied is no longer than what the step uses.

    Sizes are powers of two, so a graph, which is of one, finds its inputs at fixed addresses. Block tables have as many
    columns as the call brings.

    A ring of pinned buffers on the host, one buffer on the device: a copy runs in its turn, after the steps before it.
    """

    def __init__(self, limits: Limits, device: torch.device, inputs: Mapping[str, Value] = _NONE) -> None:
        """inputs: a program's."""
        self._limits = limits
        self.sees = "patches" in inputs
        """Whether it is a tower's."""
        self._stream: Array | None = None
        self._wide = {name: _width(inputs[name]) for name in _WIDE if name in inputs}
        self._further = {name: _width(inputs[name]) for name in _FURTHER if name in inputs}
        self._most = max(limits.max_tokens, limits.max_seqs + ADDED)
        size = _Places(limits, self._most, (), self._further).size
        pin = device.type == "cuda"
        self._hosts = [torch.zeros(size, dtype=torch.int32, pin_memory=pin) for _ in range(_RING if pin else 1)]
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._sent = [torch.cuda.Event() for _ in self._hosts] if pin else []
        self._turn = 0
        self._places: dict[int, _Places] = {}
        self._now = self._place(self._most)
        self.slots = {name: Slot(self._at(name)) for name in self._now.begin}
        self._rows = {
            name: Slot(torch.zeros(limits.max_tokens * width, dtype=torch.float32, device=device))
            for name, width in self._wide.items()
        }
        self._pinned = {
            name: [torch.zeros(_PINNED_ROWS * width, dtype=torch.float32, pin_memory=True) for _ in self._hosts]
            for name, width in self._wide.items()
            if pin and name in _HANDED_ON
        }
        self._words = words = _width(inputs[_MASKS]) if _MASKS in inputs else 0
        self._masks = Slot(torch.zeros(limits.max_seqs * words, dtype=torch.int32, device=device))
        self._sent_masks = [torch.zeros(limits.max_seqs * words, dtype=torch.int32, pin_memory=pin) for _ in self._hosts]
        self.nbytes = 4 * size + sum(slot.tensor.nbytes for slot in (*self._rows.values(), self._masks))
        self.last = Slot(torch.zeros(limits.max_tokens, dtype=torch.int32, device=device))
        """Tokens of the last launch that drew any."""
        tables = (self.slots[name] for name in ("item_start", "table_width", "from_last"))
        self.tables = Tables(*tables, self.last, self.slots["tokens"])

    def _place(self, most: int) -> _Places:
        if most not in self._places:
            self._places[most] = _Places(self._limits, most, [host.numpy() for host in self._hosts], self._further)
        return self._places[most]

    def _lay(self, most: int) -> None:
        """Every input where it is in a step of up to `most`."""
        if most != self._most:
            self._most, self._now = most, self._place(most)
            for name, slot in self.slots.items():
                slot.tensor = self._at(name)

    def slot(self, name: str) -> Slot:
        """Where a program finds an input."""
        if name == _MASKS:
            return self._masks
        return self._rows[name] if name in self._rows else self.slots[name]

    def _at(self, name: str) -> torch.Tensor:
        part = self._device[self._now.begin[name] :]
        return part.view(torch.float32) if name in _FLOATS else part

    def check(self, inputs: StepInputs, n_vocab: int, n_positions: int, last_rows: int) -> None:
        """Everything `StepInputs.check` looks at, and what these buffers add."""
        limits = self._limits
        tokens, rows, (seqs, width) = len(inputs.ids), len(inputs.out_rows), inputs.block_table.shape
        if not self._sound(inputs, tokens, seqs, width, n_vocab):
            inputs.check(limits, n_vocab)
        low, high = _bounds(inputs.positions)
        if low < 0 or high >= n_positions:
            raise RequestError(f"step inputs are unusable: positions {low} to {high}, wanted 0 to {n_positions - 1}")
        most = limits.max_tokens
        if rows > most:
            raise RequestError(f"step inputs are unusable: {rows} rows asked for of a step of at most {most} tokens")
        if seqs != len(inputs.kv_len) or width > limits.max_blocks_per_seq:
            raise RequestError(
                f"step inputs are unusable: a block table of {seqs} x {width} for {len(inputs.kv_len)} sequences"
                f" of at most {limits.max_blocks_per_seq} blocks"
            )
        slots = inputs.state_slots
        if slots is not None:
            low, high = _bounds(slots) if len(slots) else (0, 0)
            if len(slots) != seqs or low < 0 or high >= limits.states:
                raise RequestError(
                    f"step inputs are unusable: state slots {slots.tolist()} for {seqs} sequences,"
                    f" wanted one of 0 to {limits.states - 1} for each"
                )
        if inputs.from_last is not None and _bounds(inputs.from_last)[1] >= last_rows:
            raise RequestError(
                f"step inputs are unusable: from_last names row {inputs.from_last.max()} of {last_rows or 'none'} tokens"
            )
        sample = inputs.sample
        if sample is not None:
            found = {name: len(getattr(sample, name)) for name in _SAMPLE}
            if not inputs.masks_are_sound(limits.max_seqs, self._words):
                raise RequestError("step inputs are unusable: masks of tokens unlike the rows")
            if not inputs.lists_are_sound(n_vocab):
                raise RequestError("step inputs are unusable: lists of tokens unlike the rows, or too long")
            if set(found.values()) != {rows}:
                raise RequestError(f"step inputs are unusable: sampling controls of {found} for {rows} rows")

    def _sound(self, inputs: StepInputs, tokens: int, seqs: int, width: int, n_vocab: int) -> bool:
        """Whether `StepInputs.check` would pass, for one new token a sequence, as between two steps of decoding."""
        limits = self._limits
        if limits.n_adapters or inputs.adapter is not None or not inputs.has_groups(limits.window_groups):
            return False
        if not 0 < tokens == seqs <= min(_SMALL, limits.max_tokens, limits.max_seqs) or not inputs.out_rows.size:
            return False
        if inputs.query_start.tolist() != list(range(seqs + 1)) or not len(inputs.positions) == len(inputs.slots) == tokens:
            return False
        if inputs.from_last is not None and len(inputs.from_last) != tokens:
            return False
        wanted: list[tuple[Array, int, int]] = [
            (inputs.ids, 0, n_vocab),
            (inputs.slots, 0, limits.n_blocks * limits.block_size),
            (inputs.kv_len, 1, limits.block_size * width + 1),
            (inputs.block_table, 0, limits.n_blocks),
            (inputs.out_rows, 0, tokens),
        ]
        if inputs.window_slots is not None and inputs.window_tables is not None:
            wanted += [(inputs.window_slots, *wanted[1][1:]), (inputs.window_tables, *wanted[3][1:])]
        for values, least, stop in wanted:
            low, high = _bounds(values)
            if low < least or high >= stop:
                return False
        return True

    def send(self, inputs: StepInputs, padded: int = 0, starts: Array | None = None, tokens: int = 0) -> None:
        """Copies a batch and its `item_starts`; decode batches may be padded to so many tokens, sequences and rows.

        `tokens`: those that count of a batch that is padded already, else all.
        """
        if starts is None:
            starts = item_starts(inputs.query_start, inputs.kv_len)
        turn = self._turn
        self._turn = (turn + 1) % len(self._hosts)
        if self._sent:
            self._sent[turn].synchronize()
        counted, tokens, seqs = tokens or len(inputs.ids), len(inputs.ids), len(inputs.kv_len)
        self._lay(power_of_two(max(tokens, seqs, len(inputs.out_rows), padded)))
        put = self._now.arrays[turn]
        extra = max(padded - tokens, 0)
        _fill(put["ids"], inputs.ids, 0, padded)
        if inputs.from_last is None:
            put["from_last"][: tokens + extra] = -1
        else:
            _fill(put["from_last"], inputs.from_last, -1, padded)
        _fill(put["positions"], inputs.positions, 0, padded)
        _fill(put["out_rows"], inputs.out_rows, 0, padded)
        # Padding writes its keys to the block past the last, and reads none.
        _fill(put["slots"], inputs.slots, self._limits.n_blocks * self._limits.block_size, padded)
        _fill(put["kv_len"], inputs.kv_len, 0, padded)
        if inputs.state_slots is not None:
            _fill(put["state_slots"], inputs.state_slots, self._limits.states, padded)
        if inputs.adapter is not None:
            _fill(put["adapter"], inputs.adapter, 0, padded)
        put["query_start"][: seqs + 1] = inputs.query_start
        if inputs.window_start is not None:
            put["window_start"][: seqs + 1] = inputs.window_start
        put["item_start"][: seqs + 1] = starts
        if extra:
            put["query_start"][seqs + 1 : seqs + 1 + extra] = np.arange(tokens + 1, tokens + extra + 1)
            put["item_start"][seqs + 1 : seqs + 1 + extra] = starts[-1]
        for name, each in self._further.items():
            values = getattr(inputs, name)
            if values is None:
                raise RequestError(f"step inputs are unusable: no {name}, which the program reads")
            _fill(put[name], values.reshape(-1), _FURTHER[name], padded * each)
        sample = inputs.sample
        if sample is not None:
            for name in _SAMPLE:
                _fill(put[name], getattr(sample, name), 0, padded)
        lists, masks = (None, None) if sample is None else (sample.lists, sample.masks)
        if lists is not None or masks is not None:
            rows = len(inputs.out_rows)
            lists, of_rows = lists or no_lists(rows), (masks or no_masks(rows)).mask_row
            _fill(put["mask_row"], of_rows, -1, padded)
            for name in _ROW_LISTS:
                _fill(put[name], getattr(lists, name), lists.list_end[-1] if name == "list_end" else 0, padded)
            for name in _ENTRIES:
                put[name][: len(lists.list_ids)] = getattr(lists, name)
        width = inputs.block_table.shape[1]
        put["table_width"][0], put["tokens"][0] = width, counted
        put["block_table"][: seqs * width] = inputs.block_table.reshape(-1)
        if inputs.window_slots is not None and inputs.window_tables is not None:
            slots, tables = self._now.windows[turn]
            slots[:, :tokens] = inputs.window_slots
            slots[:, tokens : tokens + extra] = self._limits.n_blocks * self._limits.block_size
            tables[:, : seqs * width] = inputs.window_tables.reshape(len(tables), -1)
        # The rows of padding keep what was there: nobody reads a key of theirs.
        begins, ends = (0, *self._now.tables[1:]), [begin + seqs * width for begin in self._now.tables]
        for begin, end in zip(begins, ends) if ends[-1] > _AT_ONCE else [(0, ends[-1])]:
            self._device[begin:end].copy_(self._hosts[turn][begin:end], non_blocking=True)
        for name, slot in self._rows.items():
            values = getattr(inputs, name)
            if values is None:
                raise RequestError(f"step inputs are unusable: no {name}, which the program reads")
            if name == "images" and int(inputs.image_rows.max()) < 0:
                continue
            if isinstance(values, Joined):
                _join(slot.tensor, values)
                continue
            if isinstance(values, torch.Tensor):  # from another stage, and on this device
                slot.tensor[: values.numel()].copy_(values.view(-1))
                continue
            if self.sees and name == "stream":  # what the step before began with is there already
                if self._stream is not None and _begins(self._stream, values):
                    continue
                self._stream = values
            rows = torch.from_numpy(np.ascontiguousarray(values, np.float32).reshape(-1))
            if name in self._pinned and len(rows) <= len(self._pinned[name][turn]):
                rows = self._pinned[name][turn][: len(rows)].copy_(rows)
            slot.tensor[: len(rows)].copy_(rows, non_blocking=name in self._pinned)
        for name in () if lists is None else _ENTRIES:
            begin, end = self._now.begin[name], self._now.begin[name] + len(lists.list_ids)
            self._device[begin:end].copy_(self._hosts[turn][begin:end], non_blocking=True)
        if masks is not None:
            flat = torch.from_numpy(masks.masks.reshape(-1))
            self._sent_masks[turn][: len(flat)] = flat
            self._masks.tensor[: len(flat)].copy_(self._sent_masks[turn][: len(flat)], non_blocking=True)
        if self._sent:
            self._sent[turn].record()


def _begins(whole: Array, part: Array) -> bool:
    """Whether they lie in one place, and the part is no longer; nobody writes to either."""
    same = whole.ctypes.data == part.ctypes.data and whole.strides == part.strides
    return same and whole.dtype == part.dtype == np.float32 and len(part) <= len(whole)


def _join(target: torch.Tensor, rows: Joined) -> None:
    """Copies rows to where a step reads them; those of a device stay on it."""
    at = 0
    for piece in rows.pieces:
        there = isinstance(piece, DeviceRows)
        given = piece.tensor if there else torch.from_numpy(np.ascontiguousarray(piece, np.float32))
        end = at + given.numel()
        target[at:end].view(given.shape).copy_(given, non_blocking=there)
        at = end


def _width(value: Value) -> int:
    """Numbers of a token."""
    return int(value.dims[1]) if len(value.dims) > 1 else 1


def _fill(target: Array, values: Array, filler: int, length: int) -> None:
    count = len(values)
    target[:count] = values
    if length > count:
        target[count:length] = filler


@dataclass(frozen=True)
class Padding:
    """Tokens that steps of prompts are padded to: a power of two up to `short`, a multiple of `stride` beyond."""

    short: int
    stride: int

    def tokens(self, tokens: int, most: int) -> int:
        """How many tokens a step of so many is padded to."""
        length = power_of_two(tokens) if tokens <= self.short else cdiv(tokens, self.stride) * self.stride
        return min(max(length, _LEAST), most)


ENCODER, PROMPTS = Padding(4096, 2048), Padding(256, 256)


def padded_prompts(inputs: StepInputs, limits: Limits, padding: Padding) -> StepInputs | None:
    """A step of prompts or texts in a shape that is captured; None where it wants more rows than there are sequences.

    A step has some 250 to 600 launches, which cost the host 6 to 30 ms: as much as the device needs for 500 tokens of a 7B
    model, or for 10,000 of an encoder. Tokens that are added belong to sequences of their own, without keys: they change no
    other rows, and nobody reads theirs. What they write to a cache or a state goes to a block and a slot past the last.
    """
    tokens, seqs, rows = len(inputs.ids), len(inputs.kv_len), len(inputs.out_rows)
    most = padding.tokens(tokens, limits.max_tokens)
    least = seqs + (most > tokens)
    padded = max(least, min(power_of_two(least), limits.max_seqs))
    if padded > min(limits.max_seqs + ADDED, limits.max_tokens) or rows > padded:
        return None
    outs = min(power_of_two(max(rows, 1)), padded)
    more, added = most - tokens, padded - seqs
    ends = np.minimum(tokens + cdiv(more, max(added, 1)) * np.arange(1, added + 1), most)
    beyond = limits.n_blocks * limits.block_size

    def pad(values: Array | None, count: int, filler: int = 0) -> Any:
        """With so many more along the last axis; nothing of nothing."""
        if values is None or not count:
            return values
        return np.pad(values, ((0, 0),) * (values.ndim - 1) + ((0, count),), constant_values=filler)

    def pad_starts(starts: Array) -> Array:
        return np.concatenate([starts, ends]).astype(np.int32)

    def pad_rows(table: Array | None) -> Any:
        """With a row for each sequence that is added."""
        return None if table is None else np.pad(table, ((0, 0),) * (table.ndim - 2) + ((0, added), (0, 0)))

    def pad_tokens(values: Array | None, filler: int) -> Any:
        """With so many tokens more, whatever there is of each."""
        if values is None:
            return None
        return np.concatenate([values, np.full((more, *values.shape[1:]), filler, values.dtype)])

    sample = inputs.sample
    if sample is not None:
        controls = {name: pad(getattr(sample, name), outs - rows) for name in _SAMPLE}
        masks = sample.masks and replace(sample.masks, mask_row=pad(sample.masks.mask_row, outs - rows, -1))
        sample = SampleInputs(**controls, lists=sample.lists and _padded_lists(sample.lists, outs - rows), masks=masks)
    return StepInputs(
        ids=pad(inputs.ids, more),
        positions=pad(inputs.positions, more),
        slots=pad(inputs.slots, more, beyond),
        query_start=pad_starts(inputs.query_start),
        window_start=None if inputs.window_start is None else pad_starts(inputs.window_start),
        kv_len=pad(inputs.kv_len, added),
        block_table=pad_rows(inputs.block_table),
        out_rows=pad(inputs.out_rows, outs - rows),
        sample=sample,
        state_slots=pad(inputs.state_slots, added, limits.states),
        adapter=pad(inputs.adapter, more),
        from_last=pad(inputs.from_last, more, -1),
        window_slots=pad(inputs.window_slots, more, beyond),
        window_tables=pad_rows(inputs.window_tables),
        **{name: getattr(inputs, name) for name in _WIDE},
        **{name: pad_tokens(getattr(inputs, name), filler) for name, filler in _FURTHER.items()},
    )


def _padded_lists(lists: Lists, rows: int) -> Lists:
    """With so many rows more, whose lists are empty."""
    fillers = {name: lists.list_end[-1] if name == "list_end" else 0 for name in _ROW_LISTS}
    padded = {name: np.pad(getattr(lists, name), (0, rows), constant_values=last) for name, last in fillers.items()}
    return replace(lists, **padded)
