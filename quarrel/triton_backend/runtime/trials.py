"""Experimental kernels, off unless QUARREL_TRIALS names them; the interpreter has them all on, for the tests.

One that a GPU has found right and faster leaves `quarrel.env.TRIALS` and is always on.

attention-ring: decode behind many keys by a ring of TMA copies (`attention/ring.py`).
"""

from __future__ import annotations

from quarrel.env import TRIALS, read_environment
from quarrel.triton_backend.runtime.launch import INTERPRETED

on = set(TRIALS if INTERPRETED else read_environment().trials)


def waits(name: str) -> bool:
    """Whether this one is experimental still, and off."""
    return name in TRIALS and name not in on
