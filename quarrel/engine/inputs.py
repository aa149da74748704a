"""A batch as the arrays of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quarrel.engine.generation import Generation
from quarrel.engine.scheduler import Batch, Part
from quarrel.ops.step import Limits, SampleInputs, StepInputs


def step_inputs(batch: Batch, limits: Limits) -> StepInputs:
    """Fills the arrays. A step in which no row is wanted asks for its last one: no backend has to know an empty result."""
    parts, size = batch.parts, limits.block_size
    starts = np.cumsum([0, *(p.count for p in parts)]).astype(np.int32)
    ids = [t for p in parts for t in p.sequence.tokens[p.start : p.start + p.count]]
    positions = [i for p in parts for i in range(p.start, p.start + p.count)]
    slots = [p.sequence.blocks[i // size] * size + i % size for p in parts for i in range(p.start, p.start + p.count)]
    rows = [r for p, end in zip(parts, starts[1:]) for r in range(int(end) - p.rows, int(end))]
    lengths = [p.start + p.count for p in parts]
    return StepInputs(
        ids=np.array(ids, np.int32),
        positions=np.array(positions, np.int32),
        slots=np.array(slots, np.int32),
        query_start=starts,
        kv_len=np.array(lengths, np.int32),
        block_table=_table([p.sequence.blocks[: -(-n // size)] for p, n in zip(parts, lengths)]),
        out_rows=np.array(rows or [len(ids) - 1], np.int32),
        sample=_sample(parts) if batch.want == "tokens" else None,
        state_slots=np.array([p.sequence.slot for p in parts], np.int32),
    )


def _table(blocks: Sequence[Sequence[int]]) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    table = np.zeros((len(blocks), max(map(len, blocks))), np.int32)
    for row, held in zip(table, blocks):
        row[: len(held)] = held
    return table


def _sample(parts: Sequence[Part]) -> SampleInputs:
    drawn = [p.sequence for p in parts if p.rows]
    rows = [_row(s) for s in drawn if isinstance(s, Generation)] or [(0.0, 0, 1.0, 0.0, 0.0)]
    temperature, top_k, top_p, min_p, uniform = zip(*rows)
    return SampleInputs(
        temperature=np.array(temperature, np.float32),
        top_k=np.array(top_k, np.int32),
        top_p=np.array(top_p, np.float32),
        min_p=np.array(min_p, np.float32),
        uniform=np.array(uniform, np.float32),
    )


def _row(s: Generation) -> tuple[float, int, float, float, float]:
    p = s.request.params
    return p.temperature, p.top_k, p.top_p, p.min_p, s.uniform()
