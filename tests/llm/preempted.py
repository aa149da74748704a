"""Preempts running sequences on the engine's own thread, so that it does not matter how fast the caller is."""

from __future__ import annotations

import pytest

from quarrel.engine.engine import Engine


def preempt_after(monkeypatch: pytest.MonkeyPatch, tokens: int) -> list[int]:
    """Once a sequence has so many tokens of its answer, all that run are preempted, and rows of images are forgotten: once.
    How many sequences that were is in the list then."""
    advance, found = Engine.advance, list[int]()

    def advance_and_preempt(engine: Engine) -> bool:
        worked = advance(engine)
        running = [*engine.scheduler.running]
        if not found and any(len(s.tokens) - s.n_prompt >= tokens for s in running):
            engine.finish()
            for sequence in running:
                engine.scheduler.preempt(sequence)
            if engine.images is not None:
                engine.images._kept.clear()
            found.append(len(running))
        return worked

    monkeypatch.setattr(Engine, "advance", advance_and_preempt)
    return found
