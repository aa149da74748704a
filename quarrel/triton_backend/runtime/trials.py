"""Ways to compute that no GPU has checked and timed yet, off until one has.

QUARREL_TRIALS has those that shall be on, so that a run on a GPU can compare them with what there is; the interpreter has
them all, for the tests. One that has won leaves `quarrel.env.TRIALS`, and is what there is.

attention-ring: decode behind many keys by a ring of TMA copies (`attention/ring.py`).
joined-experts: a shared expert among the chosen ones of 2 to 32 rows (`experts/joined.py`).
ring-order: deterministic steps with four launches a layer fewer (`ring_order.py`): rows left in the order in which the ring
    reads them, query and key in one matrix, and attention that rotates and appends.
"""

from __future__ import annotations

from quarrel.env import TRIALS, read_environment
from quarrel.triton_backend.runtime.launch import INTERPRETED

on = set(TRIALS if INTERPRETED else read_environment().trials)
