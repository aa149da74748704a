"""Drafts by the block that a model brings to predict further tokens (multi-token prediction; DeepSeek-V3, 2024).

The block reads a token's embedding and what the model made of the token before, its `stream`, and says what comes after
both. It is a step of its own with a cache of its own. Rows of the model's stream run through it as they come, prompts too;
when a sequence decodes, the block goes on from its own stream, a token at a time, as far as is asked.

Where rows are missing, behind a prefix that another sequence has computed, the block begins anew: it sees less, and what it
guesses is verified all the same. Wrong tokens lie in its cache behind the rows of the model, and are overwritten.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace

import numpy as np

from quarrel.engine import rng
from quarrel.engine.cache import CacheRules
from quarrel.engine.draft import Drafter, Shadow
from quarrel.engine.scheduler import Batch, Part
from quarrel.engine.sequence import Array, Sequence
from quarrel.ops.step import Step, StepOutputs

BACKLOG = 32
"""Rows of a sequence that may wait until it is drafted for; more of them, as of a prompt, run at once."""


class _Behind(Shadow):
    """A sequence as the block has it: its tokens from behind `first` on."""

    keeps_prefix = False

    def __init__(self, owner: Sequence, first: int) -> None:
        Sequence.__init__(self, owner.tokens[first + 1 :], max(1, owner.length - first))
        self.owner, self.first = owner, first
        self.seed, self.draws = owner.seed, owner.draws


@dataclass
class _Known:
    """Rows of the stream that have not run yet; there is each from position `first` on."""

    first: int
    rows: Array
    shadow: _Behind | None = None

    @property
    def end(self) -> int:
        """The position behind the last row."""
        return self.first + (self.shadow.computed if self.shadow else 0) + len(self.rows)


class BlockDrafter(Drafter):
    """The block's step and shadows; the engine's thread alone calls it."""

    def __init__(self, step: Step, rules: CacheRules, n_vocab: int) -> None:
        super().__init__(step, rules, n_vocab, n_vocab)
        self._known: dict[Sequence, _Known] = {}

    def observe(self, owner: Sequence, start: int, rows: Array) -> None:
        known = self._known.get(owner)
        if known is not None and not known.first <= start <= known.end:
            self.forget(owner)
            known = None
        if known is None:
            known = self._known[owner] = _Known(start, rows)
        else:
            known.rows = np.concatenate([known.rows, rows[known.end - start :]])
        if len(known.rows) > BACKLOG and not self._read(owner, known):
            self.forget(owner)

    def propose(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, tuple[int, ...]]:
        for owner in [o for o in self._known if o.finished or o.slot < 0]:
            self.forget(owner)
        parts, rows, left = [], [], self.step.limits.max_tokens
        found: dict[_Behind, list[int]] = {}
        for owner, most in wanted.items():
            known = self._known.get(owner)
            if known is None or known.end != len(owner.tokens) - 1 or not len(known.rows) or not left:
                continue
            if len(known.rows) > left and not self._read(owner, known):
                continue
            shadow = self._up_to_date(owner, known, most)
            if shadow is not None:
                parts.append(Part(shadow, shadow.computed, len(known.rows), 1))
                rows.append(known.rows)
                left -= len(known.rows)
                shadow.computed += len(known.rows)
                known.rows = known.rows[:0]
                found[shadow] = []
        while parts:
            outputs = self._launch(parts, rows)
            assert outputs.tokens is not None
            assert outputs.stream is not None
            shadows, parts, rows = [part.sequence for part in parts], [], []
            for drew, token, row in zip(shadows, outputs.tokens.tolist(), outputs.stream):
                assert isinstance(drew, _Behind)
                if not 0 <= token < self._n_vocab:
                    continue
                found[drew].append(token)
                if len(found[drew]) < wanted[drew.owner]:
                    drew.tokens.append(token)
                    parts.append(Part(drew, len(drew.tokens) - 1, 1, 1))
                    rows.append(row[None])
        for shadow in found:
            del shadow.tokens[shadow.computed :]
        return {shadow.owner: tuple(tokens) for shadow, tokens in found.items() if tokens}

    def _read(self, owner: Sequence, known: _Known) -> bool:
        """Runs all rows but the last, behind which something will be drawn; False if there is no room for them."""
        while len(known.rows) > 1:
            count = min(len(known.rows) - 1, self.step.limits.max_tokens)
            shadow = self._up_to_date(owner, known, 1)
            if shadow is None:
                return False
            self._launch([Part(shadow, shadow.computed, count, 0)], [known.rows[:count]])
            shadow.computed += count
            known.rows = known.rows[count:]
        return True

    def _up_to_date(self, owner: Sequence, known: _Known, most: int) -> _Behind | None:
        """The shadow, with the owner's tokens, and blocks for so many further ones; None where there is no room."""
        count = len(owner.tokens) - known.first - 1
        if count <= 0 or not self.cache.fits(count + most):
            return None
        if known.shadow is None:
            shadow = _Behind(owner, known.first)
            if not self._slots or not self.cache.allocate(shadow, self._slots[-1], (), 0):
                return None
            self._slots.pop()
            known.shadow = shadow
        shadow = known.shadow
        shadow.tokens += owner.tokens[known.first + 1 + len(shadow.tokens) :]
        return shadow if self.cache.append(shadow, count + most) else None

    def _launch(self, parts: Rows[Part], rows: Rows[Array]) -> StepOutputs:
        inputs = self._inputs.of(Batch("tokens", tuple(parts)))
        inputs = replace(inputs, stream=np.concatenate(rows))
        drawing = [part for part in parts if part.rows]
        if drawing:
            assert inputs.sample is not None
            # The number of the token that the model will draw there, which is further on for the model.
            places = [part.sequence.first + part.start + part.count + 1 for part in drawing]  # type: ignore[attr-defined]
            seeds = np.array([rng.mixed(part.sequence.seed) for part in drawing], np.uint64)
            uniform = rng.uniforms(seeds, np.array(places, np.int32))
            inputs = replace(inputs, sample=replace(inputs.sample, uniform=uniform))
        return self.step.launch(inputs, "tokens").result()

    def forget(self, owner: Sequence) -> None:
        known = self._known.pop(owner, None)
        if known is not None and (shadow := known.shadow) is not None:
            self._slots.append(shadow.slot)
            self.cache.free(shadow)
