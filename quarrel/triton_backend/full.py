"""Steps of an encoder in few shapes, so that captured graphs serve them.

A step has some 250 launches, which cost the host 6 ms, what the device needs for 10,000 tokens. Steps are padded to a power
of two of tokens, long ones to a multiple of STRIDE. Tokens that are added belong to texts of their own: they change no
other rows, and nobody reads theirs.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quarrel.ops.step import Limits, StepInputs
from quarrel.triton_backend.runtime import power_of_two

LEAST, SHORT, STRIDE = 16, 4096, 2048


def padded(inputs: StepInputs, limits: Limits) -> StepInputs | None:
    """The inputs in a shape that is captured, a power of two of texts; None where more rows are wanted than texts."""
    tokens, seqs, rows = len(inputs.ids), len(inputs.kv_len), len(inputs.out_rows)
    most, texts = _tokens(tokens, limits.max_tokens), power_of_two(seqs + 1)
    if texts > min(limits.max_seqs, limits.max_tokens) or rows > seqs:
        return None
    added = texts - seqs
    each = -(-(most - tokens) // added)
    return replace(
        inputs,
        ids=np.pad(inputs.ids, (0, most - tokens)),
        positions=np.pad(inputs.positions, (0, most - tokens)),
        slots=np.pad(inputs.slots, (0, most - tokens)),
        query_start=np.concatenate([inputs.query_start, np.minimum(tokens + each * np.arange(1, added + 1), most)]),
        kv_len=np.pad(inputs.kv_len, (0, added)),
        block_table=np.zeros((texts, 1), np.int32),
        out_rows=np.pad(inputs.out_rows, (0, texts - rows)),
    )


def _tokens(tokens: int, most: int) -> int:
    """How many tokens a step of so many is padded to."""
    length = power_of_two(tokens) if tokens <= SHORT else -(-tokens // STRIDE) * STRIDE
    return min(max(length, LEAST), most)
