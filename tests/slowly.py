"""Slows engines down, so that a test that interrupts an answer is in time on a busy machine."""

from __future__ import annotations

import time
from collections.abc import Sequence as Tokens

import pytest

from quarrel.child import spawn
from quarrel.engine.generation import Generation
from quarrel.ops.step import StepOutputs


def step_slowly(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.001) -> None:
    """A step takes so many seconds longer for each sequence."""
    accept = Generation.accept

    def slowly(self: Generation, outputs: StepOutputs, first: int, count: int, draft: Tokens[int]) -> int:
        time.sleep(seconds)
        return accept(self, outputs, first, count, draft)

    monkeypatch.setattr(Generation, "accept", slowly)


SLOW = """
import time
from quarrel.engine.engine import Engine
launch = Engine._launch
Engine._launch = lambda self, batch: time.sleep(0.02) or launch(self, batch)
"""
"""For `started_with`: a step takes 20 ms longer."""


def started_with(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Engines in processes of their own run this before their work."""
    monkeypatch.setattr(spawn, "_START", spawn._START.replace("main(int", code + "main(int"))
