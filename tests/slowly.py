"""An engine slow enough that whoever interrupts an answer comes in time, also on a machine where he waits for his turn."""

from __future__ import annotations

import time
from collections.abc import Sequence as Tokens

import pytest

from quarrel.engine.generation import Generation
from quarrel.ops.step import StepOutputs


def step_slowly(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.001) -> None:
    """A step takes so much longer for each sequence."""
    accept = Generation.accept

    def slowly(self: Generation, outputs: StepOutputs, first: int, count: int, draft: Tokens[int]) -> int:
        time.sleep(seconds)
        return accept(self, outputs, first, count, draft)

    monkeypatch.setattr(Generation, "accept", slowly)
