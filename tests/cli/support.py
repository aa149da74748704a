"""A keyboard, a Ctrl-C key and a process for tests of the command line."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
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
    """Presses Ctrl-C behind so many chunks of the next stream. Its tokens wait for their reader, later ones a fifth of a
    second each: the key is pressed before the answer ends, on any machine."""
    real, accept = Stream.__next__, Generation.accept
    left, turns, first = [chunks], threading.Semaphore(chunks), list[Generation]()

    def next_(self: Stream) -> Chunk:
        left[0] -= 1
        if left[0] == -1:
            signal.raise_signal(signal.SIGINT)
        turns.release()
        return real(self)

    def in_turn(self: Generation, outputs: StepOutputs, start: int, count: int, draft: Tokens[int]) -> int:
        if not first:
            first.append(self)
        if first[0] is self:
            turns.acquire(timeout=0.2)
        return accept(self, outputs, start, count, draft)

    monkeypatch.setattr(Stream, "__next__", next_)
    monkeypatch.setattr(Generation, "accept", in_turn)
