"""What every backend's step must tell of the rows that it draws."""

from __future__ import annotations

from typing import Any

import numpy as np

from quarrel.ops.logprobs import MOST_LOGPROBS, LogprobsSpec, logprobs_reference
from quarrel.ops.step import Step, StepInputs


def check_log_probabilities(step: Step, inputs: StepInputs) -> None:
    """Those of the step's own logits, with the logits and without."""
    every: Any = step(inputs, "all")
    told: Any = step(inputs, "logprobs")
    want, best = logprobs_reference(LogprobsSpec(every.logits.shape[1], MOST_LOGPROBS), every.logits, every.tokens)
    assert told.logits is None
    for outputs in (every, told):
        assert np.array_equal(outputs.tokens, every.tokens)
        assert np.array_equal(outputs.best, best)
        assert np.allclose(outputs.logprobs, want, rtol=0, atol=1e-5)
