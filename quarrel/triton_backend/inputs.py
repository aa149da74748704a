"""The host's integers on their way to the device: one staging buffer, one copy a step, fixed addresses for a graph."""

from __future__ import annotations

import numpy as np
import torch

from quarrel.errors import RequestError
from quarrel.ops.contract import Array
from quarrel.ops.step import Limits, StepInputs
from quarrel.triton_backend.attention import most_splits, splits_of
from quarrel.triton_backend.runtime import Live, Slot, Work, cdiv

_SAMPLE = ("temperature", "top_k", "top_p", "min_p", "uniform")
_FLOATS = ("temperature", "top_p", "min_p", "uniform")
_ALIGN = 4  # int32s: 16 bytes, so that kernels may load wide


def item_starts(query_start: Array, kv_len: Array) -> Array:
    """Where each sequence's items begin, `[S + 1]`: a split of keys each, of the sequences with one new token."""
    single = np.diff(query_start) == 1
    return np.concatenate([[0], np.cumsum(np.where(single, splits_of(kv_len), 0))]).astype(np.int32)


def most_items(limits: Limits) -> int:
    """Items of a step whose sequences share no block of the cache."""
    return most_splits(limits.n_blocks * limits.block_size, limits.max_seqs)


def live_counts(query_start: Array, kv_len: Array, rows: int) -> Live:
    """The host's view of a batch."""
    new = np.diff(query_start)
    items = int(item_starts(query_start, kv_len)[-1])
    return Live(int(query_start[-1]), len(kv_len), rows, bool((new == 1).any()), bool((new > 1).any()), items)


class InputBuffer:
    """Every step input at its own place; the block table comes last, with as many columns as the call brings."""

    def __init__(self, limits: Limits, device: torch.device) -> None:
        self._limits = limits
        tokens, seqs = limits.max_tokens, limits.max_seqs
        lengths = {"table_width": 1, "query_start": seqs + 1, "kv_len": seqs, "item_start": seqs + 1, "state_slots": seqs}
        lengths |= dict.fromkeys(("ids", "positions", "slots", "out_rows", *_SAMPLE), tokens)
        self._begin: dict[str, int] = {}
        end = 0
        for name, length in lengths.items():
            self._begin[name], end = end, end + cdiv(length, _ALIGN) * _ALIGN
        self._begin["block_table"] = end
        size = end + seqs * limits.max_blocks_per_seq
        pin = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=pin)
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._sent = torch.cuda.Event() if pin else None
        self._ints = self._host.numpy()
        self._reals = self._ints.view(np.float32)
        self.nbytes = 4 * size
        self.slots = {name: Slot(self._at(name)) for name in self._begin}
        self.work = Work(self.slots["item_start"], self.slots["table_width"])

    def _at(self, name: str) -> torch.Tensor:
        part = self._device[self._begin[name] :]
        return part.view(torch.float32) if name in _FLOATS else part

    def check(self, inputs: StepInputs, n_vocab: int, n_positions: int) -> None:
        """Everything `StepInputs.check` looks at, and what these buffers add."""
        inputs.check(self._limits, n_vocab)
        if inputs.positions.min() < 0 or inputs.positions.max() >= n_positions:
            low, high = inputs.positions.min(), inputs.positions.max()
            raise RequestError(f"step inputs are unusable: positions {low} to {high}, wanted 0 to {n_positions - 1}")
        rows, (seqs, width) = len(inputs.out_rows), inputs.block_table.shape
        most = self._limits.max_tokens
        if rows > most:
            raise RequestError(f"step inputs are unusable: {rows} rows asked for of a step of at most {most} tokens")
        if seqs != len(inputs.kv_len) or width > self._limits.max_blocks_per_seq:
            raise RequestError(
                f"step inputs are unusable: a block table of {seqs} x {width} for {len(inputs.kv_len)} sequences"
                f" of at most {self._limits.max_blocks_per_seq} blocks"
            )
        slots = inputs.state_slots
        if slots is not None and (len(slots) != seqs or slots.min() < 0 or slots.max() >= self._limits.states):
            raise RequestError(
                f"step inputs are unusable: state slots {slots.tolist()} for {seqs} sequences,"
                f" wanted one of 0 to {self._limits.states - 1} for each"
            )
        if inputs.sample is not None:
            found = {name: len(getattr(inputs.sample, name)) for name in _SAMPLE}
            if set(found.values()) != {rows}:
                raise RequestError(f"step inputs are unusable: sampling controls of {found} for {rows} rows")

    def send(self, inputs: StepInputs, padded: int = 0) -> None:
        """Copies a batch to the device; decode batches may be padded to so many tokens, sequences and rows."""
        if self._sent is not None:
            self._sent.synchronize()
        tokens, seqs = len(inputs.ids), len(inputs.kv_len)
        extra = max(padded - tokens, 0)
        starts = item_starts(inputs.query_start, inputs.kv_len)
        for name in ("ids", "positions", "out_rows"):
            self._put(name, getattr(inputs, name), 0, padded)
        # Padding writes its keys to the block past the last, and reads none.
        self._put("slots", inputs.slots, self._limits.n_blocks * self._limits.block_size, padded)
        self._put("kv_len", inputs.kv_len, 0, padded)
        if inputs.state_slots is not None:
            self._put("state_slots", inputs.state_slots, self._limits.states, padded)
        self._put("query_start", np.concatenate([inputs.query_start, np.arange(tokens + 1, tokens + extra + 1)]), 0)
        self._put("item_start", np.concatenate([starts, np.full(extra, starts[-1])]), 0)
        if inputs.sample is not None:
            for name in _SAMPLE:
                self._put(name, getattr(inputs.sample, name), 0, padded)
        width = inputs.block_table.shape[1]
        self._put("table_width", np.array([width]), 0)
        self._put("block_table", inputs.block_table.reshape(-1), 0)
        used = self._begin["block_table"] + (seqs + extra) * width
        self._device[:used].copy_(self._host[:used], non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    def _put(self, name: str, values: Array, filler: int, length: int = 0) -> None:
        at = self._begin[name]
        target = self._reals if name in _FLOATS else self._ints
        target[at : at + len(values)] = values
        target[at + len(values) : at + max(length, len(values))] = filler
