"""The integers of a step, made as the engine makes them: a prompt in pieces, a batch that decodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from quarrel.ops.contract import Array
from quarrel.ops.step import Limits, SampleInputs, StepInputs

STRIDE = 7919  # a prime: ids that do not repeat soon, and spread over the vocabulary and the experts


class Layout:
    """Where sequences lie in the cache: sequence s owns the blocks from `s * width` on and the state slot s."""

    def __init__(self, limits: Limits, vocab: int) -> None:
        self.limits, self.vocab = limits, vocab

    def ids(self, start: int, count: int, sequence: int = 0) -> Array:
        """The same text for the same sequence, wherever it is cut."""
        at = np.arange(start, start + count, dtype=np.int64)
        return ((at + 131 * sequence + 1) * STRIDE % self.vocab).astype(np.int32)

    def width(self, batch: int) -> int:
        """Blocks of each of so many sequences."""
        return min(self.limits.max_blocks_per_seq, self.limits.n_blocks // batch)

    def step(self, parts: Sequence[tuple[int, int, int]], batch: int, from_last: bool = False) -> StepInputs:
        """Parts are (sequence, first token, count); the last row of each is an output row. `from_last`: ids are the tokens
        that the launch before drew, row by row."""
        size, width = self.limits.block_size, self.width(batch)
        counts = np.array([count for *_, count in parts])
        ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        positions = np.concatenate([np.arange(a, a + n, dtype=np.int32) for _, a, n in parts])
        owner = np.repeat([s for s, *_ in parts], counts)
        lengths = np.array([a + n for _, a, n in parts], np.int32)
        used = -(-int(lengths.max()) // size)
        table = (np.arange(used) + width * np.array([s for s, *_ in parts])[:, None]).astype(np.int32)
        rows = len(parts)
        one, zero = np.ones(rows, np.float32), np.zeros(rows, np.float32)
        return StepInputs(
            ids=np.concatenate([self.ids(a, n, s) for s, a, n in parts]),
            positions=positions,
            slots=(owner * width * size + positions).astype(np.int32),
            query_start=ends,
            kv_len=lengths,
            block_table=table,
            out_rows=ends[1:] - 1,
            sample=SampleInputs(zero, np.zeros(rows, np.int32), one, zero, one / 2),
            state_slots=np.array([s for s, *_ in parts], np.int32),
            from_last=np.arange(rows, dtype=np.int32) if from_last else None,
        )

    def prefill(self, start: int, count: int, batch: int = 1) -> Iterator[StepInputs]:
        """So many tokens of each sequence, in steps as full as they may be."""
        left = [(s, start, count) for s in range(batch)]
        while left:
            room, parts = self.limits.max_tokens, []
            while left and room:
                s, at, n = left.pop(0)
                parts.append((s, at, min(n, room)))
                room -= min(n, parts[-1][2])
                if n > parts[-1][2]:
                    left.insert(0, (s, at + parts[-1][2], n - parts[-1][2]))
            yield self.step(parts, batch)

    def decode(self, at: int, batch: int, from_last: bool) -> StepInputs:
        """Token `at` of each sequence."""
        return self.step([(s, at, 1) for s in range(batch)], batch, from_last)
