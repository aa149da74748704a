"""Steps that are run once while a model loads: to measure what its values reach, and to build its kernels.

MLX builds a Metal kernel when it is first evaluated. Kernels differ by how many rows a launch has (1, 2 or 4 that decode,
up to 32 of prompts, or more, on M5 256) and by whether both kinds share a step, never by what the rows are. What these
steps write to the cache is never read: a sequence reads its own keys.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quarrel.mlx_backend.linear.dense import LEAST_ROWS
from quarrel.mlx_backend.step import MlxStep
from quarrel.ops.contract import Array
from quarrel.ops.step import LIST_INPUTS, MASK_INPUTS, SampleInputs, StepInputs, Want

_KINDS = ((1,), (1, 1), (1, 1, 1, 1), (8,), (40,), (1, 8), (LEAST_ROWS,))
"""New tokens of each sequence of a step."""
_MEASURED = ((40,), (8,), (1,))
"""The first of these that fits is measured."""
_KNOWN = {"ids", "positions", "slots", "query_start", "kv_len", "block_table", "out_rows", "state_slots", *LIST_INPUTS}
_KNOWN |= {*MASK_INPUTS}
_KNOWN |= {"temperature", "top_k", "top_p", "min_p", "uniform"}


def warm(step: MlxStep, progress: Callable[[int, int], None]) -> None:
    """Runs them and waits; a program with other inputs than tokens (a tower, adapters) builds its kernels as it goes."""
    wants: list[Want] = ["tokens", "logprobs"]
    runs = [
        (want, inputs)
        for want in (w for w in wants if step.gives(w))
        for kind in (_KINDS if want == "tokens" else _KINDS[:1])
        if _takes_tokens(step) and (inputs := _inputs(step, kind)) is not None
    ]
    for done, (want, inputs) in enumerate(runs):
        progress(done, len(runs))
        step(inputs, want)


def largest(step: MlxStep) -> float:
    """What values reach with tokens from all over the vocabulary; infinite where one overflows, 0 if none can be tried."""
    for kind in _MEASURED if _takes_tokens(step) else ():
        ids = np.linspace(0, step.n_vocab - 1, sum(kind)).astype(np.int32)
        inputs = _inputs(step, kind, ids)
        if inputs is not None:
            return step.largest(inputs)
    return 0.0


def _takes_tokens(step: MlxStep) -> bool:
    return all(name.partition(".")[0] in _KNOWN for name in step.inputs) and "ids" in step.inputs


def _inputs(step: MlxStep, kind: tuple[int, ...], ids: Array | None = None) -> StepInputs | None:
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
        np.zeros(tokens, np.int32) if ids is None else ids,
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
