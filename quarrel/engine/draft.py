"""Drafts of the next tokens by a second, smaller model of the same vocabulary (speculative decoding).

Its step has a cache of its own, in which each sequence has a shadow. When a sequence decodes, its shadow
runs what is new, then draws a few tokens ahead, all shadows together: with the sequence's own sampling and its own random
numbers, which are counted by position, so that where the two models agree they draw alike. The large model checks all
drafts in one step and draws its own token at each place, so the text is the one that it writes alone.

Wrong tokens lie in the shadow's cache behind the accepted ones, and are overwritten.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Tokens

from quarrel.engine.cache import Cache, CacheRules
from quarrel.engine.inputs import Inputs
from quarrel.engine.prefix import common_prefix
from quarrel.engine.results import FinishReason
from quarrel.engine.scheduler import Batch, Part
from quarrel.engine.sequence import Array, Sequence
from quarrel.errors import QuarrelError
from quarrel.ops.step import Pending, Step, StepOutputs

log = logging.getLogger(__name__)

MakeDrafter = Callable[[], "Drafter"]
"""Makes one, on the engine's thread; again when a step broke."""


class Shadow(Sequence):
    """A sequence as the draft model has seen it; `proposed` are its own tokens behind `base`."""

    keeps_prefix = True

    def __init__(self, owner: Sequence) -> None:
        super().__init__(owner.tokens, owner.length)
        self.owner = owner
        self.salt, self.seed, self.draws = owner.salt, owner.seed, owner.draws
        self.base = len(owner.tokens)
        self.proposed: list[int] = []

    def follow(self) -> None:
        """Takes over what the owner has drawn; tokens proposed otherwise count as not computed."""
        agreed = self.base + common_prefix(self.proposed, self.owner.tokens[self.base :])
        self.tokens += self.owner.tokens[len(self.tokens) :]
        self.computed = min(self.computed, agreed, len(self.tokens) - 1)
        self.base, self.proposed, self.drawn = len(self.tokens), [], 0

    def accept(self, outputs: StepOutputs, first: int, count: int, draft: Tokens[int]) -> int:
        raise AssertionError("shadows are in no batch of the engine")

    def end(self, reason: FinishReason, failure: QuarrelError | None = None) -> None:
        """Nobody waits for it."""


class Drafter:
    """The draft model's step and shadows. `n_vocab`: ids from there on are none of the large model's; the engine's thread
    alone calls it."""

    def __init__(self, step: Step, rules: CacheRules, n_vocab: int, own_vocab: int) -> None:
        assert not rules.recurrent, "a state cannot be taken back to where a draft was wrong"
        self.step = step
        self.cache = Cache(step.limits, step.copy_blocks, step.copy_states, rules)
        self._inputs = Inputs(step.limits, self.cache)
        self._n_vocab, self._own = n_vocab, own_vocab
        self._shadows: dict[Sequence, Shadow] = {}
        self._slots = list(range(step.limits.max_seqs - 1, -1, -1))

    def propose(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, tuple[int, ...]]:
        """Up to so many likely next tokens for some of these sequences. Where the draft model lags behind, by a long
        prompt, it catches up first, a step at a time."""
        for owner in [o for o in self._shadows if o.finished or o.slot < 0]:
            self._drop(owner)
        ahead = {shadow: most for owner, most in wanted.items() if (shadow := self._shadow(owner, most)) is not None}
        parts, drawing, left = [], {}, self.step.limits.max_tokens
        for shadow in sorted(ahead, key=lambda s: s.pending):
            count = min(shadow.pending, left)
            if count:
                parts.append(Part(shadow, shadow.computed, count, int(count == shadow.pending)))
                left -= count
                if parts[-1].rows:
                    drawing[shadow] = ahead[shadow]
        rounds: list[tuple[Pending, list[Shadow]]] = []
        while parts:
            pending = self.step.launch(self._inputs.of(Batch("tokens", tuple(parts))), "tokens")
            for part in parts:
                part.sequence.computed += part.count
            rounds.append((pending, list(drawing)))
            for row, shadow in enumerate(drawing):
                shadow.row, shadow.drawn = row, len(rounds)
            drawing = {shadow: most for shadow, most in drawing.items() if most > len(rounds)}
            parts = [Part(shadow, shadow.computed, 1, 1) for shadow in drawing]
        for pending, drew in rounds:
            drawn = pending.result().tokens
            assert drawn is not None
            for shadow, token in zip(drew, drawn.tolist()):
                shadow.proposed.append(token)
        return {shadow.owner: found for shadow in ahead if (found := self._valid(shadow.proposed))}

    def observe(self, owner: Sequence, start: int, rows: Array) -> None:
        """Rows of the large model's `stream`, of the owner's tokens from `start` on; a model of its own needs none."""

    def forget(self, owner: Sequence) -> None:
        """It will go on with other tokens in front."""
        if owner in self._shadows:
            self._drop(owner)

    def close(self) -> None:
        self.step.close()

    def _shadow(self, owner: Sequence, most: int) -> Shadow | None:
        """Up to date, with blocks for what it will run; None where there is no room for it."""
        limits = self.step.limits
        tokens = len(owner.tokens) + most - 1
        shadow = self._shadows.get(owner)
        new = [] if most <= 0 else owner.tokens[len(shadow.tokens) if shadow else 0 :]
        if most <= 0 or not self.cache.fits(tokens) or any(token >= self._own for token in new):
            return None
        if shadow is None:
            shadow = Shadow(owner)
            if not self._slots or not self.cache.allocate(shadow, self._slots[-1], (), 0):
                return None
            self._slots.pop()
            self._shadows[owner] = shadow
        else:
            shadow.follow()
            self.cache.commit(shadow)
        # One that lags behind runs no more than a step of its prompt now.
        end = tokens if shadow.pending <= limits.max_tokens else shadow.computed + limits.max_tokens
        if not self.cache.append(shadow, tokens, end):
            self._drop(owner)
            return None
        return shadow

    def _drop(self, owner: Sequence) -> None:
        shadow = self._shadows.pop(owner)
        shadow.follow()
        self._slots.append(shadow.slot)
        self.cache.free(shadow)

    def _valid(self, proposed: list[int]) -> tuple[int, ...]:
        wrong = (i for i, token in enumerate(proposed) if not 0 <= token < self._n_vocab)
        return tuple(proposed[: next(wrong, len(proposed))])
