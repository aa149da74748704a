"""Full steps of an encoder, all of one shape, so that a captured graph serves them.

A step has some 250 launches, which cost the host more than the tokenizing of its texts. Tokens that are missing become a
text of their own, and further texts are empty: they change nobody's rows, and nobody reads theirs.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quarrel.ops.step import Limits, StepInputs
from quarrel.triton_backend.runtime import power_of_two

_SLACK = 16
"""The part of a step that may be missing: packed texts leave less than the longest one of them."""


def padded(inputs: StepInputs, limits: Limits) -> StepInputs | None:
    """The inputs as those of a full step, a power of two of texts and rows; None for a step that is not nearly full."""
    tokens, seqs, rows = len(inputs.ids), len(inputs.kv_len), len(inputs.out_rows)
    most, texts = limits.max_tokens, power_of_two(seqs + 1)
    if tokens < most - max(1, most // _SLACK) or texts > limits.max_seqs or rows > seqs:
        return None
    return replace(
        inputs,
        ids=np.pad(inputs.ids, (0, most - tokens)),
        positions=np.pad(inputs.positions, (0, most - tokens)),
        slots=np.pad(inputs.slots, (0, most - tokens)),
        query_start=np.pad(inputs.query_start, (0, texts - seqs), constant_values=most),
        kv_len=np.pad(inputs.kv_len, (0, texts - seqs)),
        block_table=np.zeros((texts, 1), np.int32),
        out_rows=np.pad(inputs.out_rows, (0, texts - rows)),
    )
