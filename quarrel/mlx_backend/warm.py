"""Steps of every kind of rows, run once while a model loads: MLX builds a Metal kernel when it is first evaluated.

Kernels differ by how many rows a launch has (1, 2 or 4 that decode, up to 32 of prompts or more) and by whether both kinds
share a step, never by what the rows are. What these steps write to the cache is never read: a sequence reads its own keys.
"""

from __future__ import annotations

import numpy as np

from quarrel.mlx_backend.step import MlxStep
from quarrel.ops.step import LIST_INPUTS, SampleInputs, StepInputs, Want

_KINDS = ((1,), (1, 1), (1, 1, 1, 1), (8,), (40,), (1, 8))
"""New tokens of each sequence of a step."""
_KNOWN = {"ids", "positions", "slots", "query_start", "kv_len", "block_table", "out_rows", "state_slots", *LIST_INPUTS}
_KNOWN |= {"temperature", "top_k", "top_p", "min_p", "uniform"}


def warm(step: MlxStep) -> None:
    """Runs them and waits; a program with other inputs than tokens (a tower, adapters) builds its kernels as it goes."""
    if any(name.partition(".")[0] not in _KNOWN for name in step.inputs):
        return
    wants: list[Want] = ["tokens", "logprobs"]
    for want in (w for w in wants if step.gives(w)):
        for kind in _KINDS if want == "tokens" else _KINDS[:1]:
            inputs = _inputs(step, kind)
            if inputs is not None:
                step(inputs, want)


def _inputs(step: MlxStep, kind: tuple[int, ...]) -> StepInputs | None:
    """A batch of sequences that begin, each in blocks of its own; None where the step has no room for it."""
    limits, tokens, seqs = step.limits, sum(kind), len(kind)
    width = -(-max(kind) // limits.block_size)
    if tokens > limits.max_tokens or seqs > limits.max_seqs or width > limits.max_blocks_per_seq:
        return None
    if seqs * width > limits.n_blocks:
        return None
    new = np.array(kind, np.int32)
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    table = np.arange(seqs * width, dtype=np.int32).reshape(seqs, width)
    positions = np.concatenate([np.arange(n) for n in kind]).astype(np.int32)
    slots = (np.repeat(table[:, 0], new) * limits.block_size + positions).astype(np.int32)
    zero = np.zeros(seqs, np.float32)
    greedy = SampleInputs(zero, np.zeros(seqs, np.int32), np.ones(seqs, np.float32), zero, zero)
    groups = limits.window_groups
    return StepInputs(
        np.zeros(tokens, np.int32),
        positions,
        slots,
        starts,
        new,
        table,
        (starts[1:] - 1).astype(np.int32),
        greedy,
        state_slots=np.arange(seqs, dtype=np.int32),
        window_slots=np.stack([slots] * groups) if groups else None,
        window_tables=np.stack([table] * groups) if groups else None,
    )
