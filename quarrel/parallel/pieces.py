"""The micro-batches of a step: consecutive rows, a long prompt's among several, and their results as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from quarrel.ops.contract import Array
from quarrel.ops.step import LIST_INPUTS, Lists, SampleInputs, StepInputs, StepOutputs, Want

ROWS = 64
"""Fewest rows of a micro-batch: every one reads all weights of a stage again, which rows of a prompt make up for."""
_ROW, _SEQ = ("ids", "positions", "slots", "adapter"), ("block_table", "state_slots")


@dataclass(frozen=True)
class Piece:
    """A micro-batch. rows: which of the step's results are its own; none of them if it is the beginning of a prompt."""

    inputs: StepInputs
    want: Want
    rows: Array


def pieces(inputs: StepInputs, want: Want, most: int, least: int = ROWS) -> list[Piece]:
    """The step in up to `most` micro-batches of at least `least` rows; ids must be known (`with_ids`)."""
    tokens = len(inputs.ids)
    count = max(1, min(most, tokens // least))
    # A mean is of all rows of a sequence, and a token of an image sees those behind it.
    if want == "mean" or inputs.see_to is not None or inputs.image_rows is not None or inputs.places is not None:
        count = 1
    if count == 1:
        return [Piece(inputs, want, np.arange(len(inputs.out_rows)))]
    return [_piece(inputs, want, i * tokens // count, (i + 1) * tokens // count) for i in range(count)]


def _piece(inputs: StepInputs, want: Want, first: int, end: int) -> Piece:
    starts, ends = inputs.query_start[:-1], inputs.query_start[1:]
    seqs = np.flatnonzero((ends > first) & (starts < end))
    rows = np.flatnonzero((inputs.out_rows >= first) & (inputs.out_rows < end))
    cut = {name: a[first:end] for name in _ROW if (a := getattr(inputs, name)) is not None}
    cut |= {name: a[seqs] for name in _SEQ if (a := getattr(inputs, name)) is not None}
    if inputs.window_slots is not None and inputs.window_tables is not None:
        cut |= {"window_slots": inputs.window_slots[:, first:end], "window_tables": inputs.window_tables[:, seqs]}
    made = replace(
        inputs,
        **cut,
        query_start=np.append(np.maximum(starts[seqs], first) - first, end - first).astype(np.int32),
        kv_len=(inputs.kv_len[seqs] - np.maximum(ends[seqs] - end, 0)).astype(np.int32),
        out_rows=inputs.out_rows[rows] - first if rows.size else np.asarray([end - first - 1], np.int32),
        sample=None if inputs.sample is None or not rows.size else _sample(inputs.sample, rows),
    )
    return Piece(made, want if rows.size else "hidden", rows)


def _sample(sample: SampleInputs, rows: Array) -> SampleInputs:
    cut = {f.name: getattr(sample, f.name)[rows] for f in fields(sample) if f.name not in ("lists", "masks")}
    masks = sample.masks and replace(sample.masks, mask_row=sample.masks.mask_row[rows])
    return SampleInputs(**cut, lists=None if sample.lists is None else _lists(sample.lists, rows), masks=masks)


def _lists(lists: Lists, rows: Array) -> Lists:
    begins = np.append(np.int32(0), lists.list_end[:-1])
    entries = np.concatenate([np.arange(begins[r], lists.list_end[r]) for r in rows])
    cut = {}
    for name in LIST_INPUTS:
        array = getattr(lists, name)
        cut[name] = array[entries] if name in ("list_ids", "list_counts", "list_biases") else array[rows]
    cut["list_end"] = np.cumsum(lists.list_end[rows] - begins[rows]).astype(np.int32)
    return Lists(**cut)


def joined(parts: Sequence[Piece], outputs: Sequence[StepOutputs]) -> StepOutputs:
    """The results of the whole step, row by row where it had them."""
    if len(parts) == 1:
        return outputs[0]
    order = np.argsort(np.concatenate([part.rows for part in parts]))
    found = [out for part, out in zip(parts, outputs, strict=True) if part.rows.size]
    whole: dict[str, Array] = {}
    for name in ("tokens", "logits", "hidden", "logprobs", "best"):
        if getattr(found[0], name) is not None:
            whole[name] = np.concatenate([getattr(out, name) for out in found])[order]
    streams = [out.stream for out in outputs if out.stream is not None]  # of every token
    if streams:
        whole["stream"] = np.concatenate(streams)
    return StepOutputs(**whole)
