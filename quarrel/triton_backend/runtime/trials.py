"""Ways to compute that no GPU has checked and timed yet, off until one has.

QUARREL_TRIALS has those that shall be on, so that a run on a GPU can compare them with what there is; the interpreter has
them all, for the tests. One that has won leaves `quarrel.env.TRIALS`, and is what there is.

attention-ring: decode behind many keys by a ring of TMA copies (`attention/ring.py`).
"""

from __future__ import annotations

from quarrel.env import TRIALS, read_environment
from quarrel.triton_backend.runtime.launch import INTERPRETED

on = set(TRIALS if INTERPRETED else read_environment().trials)


def waits(name: str) -> bool:
    """Whether this way is still a trial, and off."""
    return name in TRIALS and name not in on
