"""Steps of an encoder in few shapes, so that captured graphs serve them.

A step has some 280 launches, which cost the host 6 ms, more than the device needs for 4096 tokens, and as much as the
tokenizing of a full step's texts. Steps up to SHORT are padded to a power of two of tokens, nearly full ones to all that
there are; the others, which padding would make longer than their launches, run as they are. Tokens that are added belong to
texts of their own: they change nobody's rows, and nobody reads theirs.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quarrel.ops.step import Limits, StepInputs
from quarrel.triton_backend.runtime import power_of_two

LEAST, SHORT = 16, 4096
_SLACK = 16
"""The part of a full step that may be missing: packed texts leave less than the longest one of them."""


def padded(inputs: StepInputs, limits: Limits) -> StepInputs | None:
    """The inputs in a shape that is captured, a power of two of texts and rows; None for those that run as they are."""
    tokens, seqs, rows = len(inputs.ids), len(inputs.kv_len), len(inputs.out_rows)
    most, texts = _tokens(tokens, limits.max_tokens), power_of_two(seqs + 1)
    if most is None or texts > limits.max_seqs or rows > seqs:
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


def _tokens(tokens: int, most: int) -> int | None:
    """How many tokens a step of so many is padded to."""
    if tokens >= most - max(1, most // _SLACK):
        return most
    short = max(LEAST, power_of_two(tokens))
    return short if short <= min(SHORT, most) else None
