"""What the engine's cache has to know of a model: whether it keeps state, how far back it looks, how many copies fit."""

from __future__ import annotations

from dataclasses import replace

from quarrel.engine import CacheRules
from quarrel.llm.plan import state_bytes
from quarrel.ops.program import Program
from quarrel.ops.step import Limits

SNAPSHOTS = 48
"""Copies of recurrent state beside those in use: the ends of as many prompts and answers."""
SNAPSHOT_SHARE = 0.25
"""Of the memory that is left over, what they may take."""


def cache_rules(program: Program, reuse: bool, kept_blocks: int | None = None) -> CacheRules:
    """A window counts where every layer has one, or where those that have one have blocks of their own. kept_blocks: how
    many may be kept that nobody uses."""
    windows = [layer.window for layer in program.caches]
    window = program.window or (max(windows) if windows and all(windows) else 0)
    return CacheRules(reuse, bool(program.states), window, kept_blocks, program.window_groups)


def with_snapshots(limits: Limits, program: Program, spare: int, reuse: bool, most: int | None = None) -> Limits:
    """The limits with slots for copies of recurrent state, as far as what the plan leaves over goes, and `most` bytes."""
    if not (program.states and reuse):
        return limits
    room = int(SNAPSHOT_SHARE * spare)
    fitting = (room if most is None else min(room, most)) // max(1, state_bytes(program))
    return replace(limits, n_states=limits.max_seqs + min(SNAPSHOTS, fitting))
