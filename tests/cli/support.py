"""A keyboard, a Ctrl-C key and a process for tests of the command line."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence as Tokens
from pathlib import Path

import pytest

from quarrel.engine import Chunk, Stream
from quarrel.engine.generation import Generation
from quarrel.ops.step import StepOutputs

ROOT = Path(__file__).resolve().parents[2]
GREEDY = ("--temp", "0", "-n", "12", "--backend", "cpu")
"""Twelve letters of the tiny model, always the same."""


def typed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Puts a text on standard input."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def spawn(*arguments: str, **environment: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "quarrel", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def interrupt_after(monkeypatch: pytest.MonkeyPatch, chunks: int) -> None:
    """Presses Ctrl-C behind so many chunks of the next stream; a token takes a millisecond, so it comes in time."""
    real = Stream.__next__
    left = [chunks]

    def next_(self: Stream) -> Chunk:
        left[0] -= 1
        if left[0] == -1:
            signal.raise_signal(signal.SIGINT)
        return real(self)

    monkeypatch.setattr(Stream, "__next__", next_)
    step_slowly(monkeypatch)


def step_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes a millisecond longer for each sequence."""
    accept = Generation.accept

    def slowly(self: Generation, outputs: StepOutputs, first: int, count: int, draft: Tokens[int]) -> int:
        time.sleep(0.001)
        return accept(self, outputs, first, count, draft)

    monkeypatch.setattr(Generation, "accept", slowly)
