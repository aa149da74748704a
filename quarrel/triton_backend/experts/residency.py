"""Which experts are on the device: those that were used most lately, of all layers that share its slots.

An expert's use decays by half in `HALF_LIFE` steps. Between two steps the least used residents give way to the most used
others, where that surely pays: a move costs about what the host needs for `COST` uses, and counts of a fair choice differ
by chance, by the root of their sum. A step moves a bounded number of bytes. The same choices give the same moves.
"""

from __future__ import annotations

import numpy as np

from quarrel.ops.contract import Array

HALF_LIFE = 256
"""Steps."""
COST = 16.0
"""Uses: staged and unpacked on the device, an expert takes about so often as long as one product with it on the host."""
DEVIATIONS = 4.0
"""Of the difference of two counts: the extremes of hundreds of equally used experts lie so far apart."""
STEP_BYTES = 16 << 20
"""A move of more waits for as many steps as its bytes need."""


class Residency:
    """Which of `count` experts have one of `slots` slots; at first, as many of every layer."""

    def __init__(self, count: int, slots: int, expert_bytes: int, step_bytes: int = STEP_BYTES) -> None:
        self.expert_in = np.arange(slots) * count // max(1, slots)
        """`[slots]`, the expert in each slot."""
        self.slot_of = np.full(count, -1, np.int32)
        """`[count]`, -1 for those in host memory."""
        self.slot_of[self.expert_in] = np.arange(slots)
        self._bytes, self._step_bytes, self._left = expert_bytes, step_bytes, 0
        self._uses = np.zeros(count)
        self._decay = 0.5 ** (1 / HALF_LIFE)

    def use(self, experts: Array) -> None:
        """Counts these experts, each as often as it is named."""
        self._uses += np.bincount(experts, minlength=len(self._uses))

    def moves(self) -> list[tuple[int, int]]:
        """Ends a step: slots and the experts that come to them, from now on."""
        self._left = min(self._left + self._step_bytes, max(self._step_bytes, self._bytes))
        made: list[tuple[int, int]] = []
        uses, most = self._uses, self._left // self._bytes
        missing = np.flatnonzero(self.slot_of < 0)
        if most and missing.size and self.expert_in.size and _pays(uses[missing].max(), uses[self.expert_in].min()):
            hottest = missing[np.argsort(-uses[missing], kind="stable")[:most]]
            coldest = np.argsort(uses[self.expert_in], kind="stable")[:most]
            pairs = [(int(s), int(e)) for s, e in zip(coldest, hottest) if _pays(uses[e], uses[self.expert_in[s]])]
            for slot, expert in pairs:
                self.slot_of[self.expert_in[slot]] = -1
                self.slot_of[expert], self.expert_in[slot] = slot, expert
            made = pairs
            self._left -= len(made) * self._bytes
        uses *= self._decay
        return made


def _pays(hot: float, cold: float) -> bool:
    # A decayed count varies by half of what a plain one of its size does.
    return bool(hot - cold > COST + DEVIATIONS * np.sqrt((hot + cold) / 2))
