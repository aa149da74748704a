"""Sampling on the host, for requests that ask for more than the `sample` op draws; the drawing rule itself is the op's.

    logits    + logit_bias; stop tokens banned before min_tokens; penalties; DRY
    greedy    (temperature 0) the best of these
    mirostat  p = softmax(logits / temperature); keep surprise -log2 p <= mu; draw; mu -= eta * (surprise - tau)
    else      top_k; p = softmax(logits / temperature); typical_p; top_p and min_p as in the op; XTC; draw

Typical (Meister et al. 2023, arXiv:2202.00666) keeps the tokens whose surprise is closest to the entropy. XTC, with its
probability, removes all but the least likely of the tokens that reach its threshold. Mirostat 2: arXiv:2007.14966.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quarrel.engine.dry import Dry
from quarrel.engine.params import SamplingParams
from quarrel.engine.results import TokenLogprob
from quarrel.engine.text import Texts
from quarrel.ops.sample import draw_token, kept

Array = npt.NDArray[Any]


class HostChain:
    """The sampler of one sequence; mirostat and DRY remember what was drawn."""

    def __init__(self, params: SamplingParams, stop_ids: Collection[int], texts: Texts) -> None:
        self._p = params
        self._stop_ids = np.array(sorted(stop_ids), np.int64)
        self._bias_ids = np.array(list(params.logit_bias), np.int64)
        self._biases = np.array(list(params.logit_bias.values()), np.float64)
        self._mu = 2.0 * params.mirostat_tau
        self._dry = None
        if params.dry_multiplier and params.dry_last_n:
            p, breakers = params, params.dry_sequence_breakers
            self._dry = Dry(p.dry_multiplier, p.dry_base, p.dry_allowed_length, p.dry_last_n, breakers, texts.token_bytes)

    def draw(
        self,
        logits: Array,
        tokens: Sequence[int],
        generated: int,
        uniform: float,
        xtc_uniform: float,
        allowed: Array | None = None,
    ) -> int:
        """The next token from `logits` `[V]` after `tokens`, or -1 if none can be drawn. allowed: bool `[V]`."""
        x = _finite(logits)  # [V]
        self._adjust(x, tokens, generated)
        # A row is 100,000 numbers long, and what a grammar allows often a few: all that follows looks at those only.
        ids = None if allowed is None else np.flatnonzero(allowed)
        if ids is not None:
            x = x[ids]
        at = self._draw(x, uniform, xtc_uniform)
        return at if ids is None or at < 0 else int(ids[at])

    def _draw(self, x: Array, uniform: float, xtc_uniform: float) -> int:
        """Which of these is drawn, or -1."""
        p = self._p
        best = int(x.argmax()) if len(x) else -1
        if best < 0 or x[best] == -np.inf:
            return -1
        if p.temperature == 0.0:
            return best
        if p.mirostat:
            return self._mirostat(x, uniform)
        ids = None
        if 0 < p.top_k < len(x):
            # What is cut here is cut by the draw anyway; what is left are a few dozen.
            ids = np.flatnonzero(x >= np.partition(x, len(x) - p.top_k)[len(x) - p.top_k])
            x = x[ids]
        if p.typical_p < 1.0:
            x = np.where(typical(softmax(x / p.temperature), p.typical_p), x, -np.inf)
        top_p, min_p = p.top_p, p.min_p
        if xtc_uniform < p.xtc_probability:
            x = np.where(kept(softmax(x / p.temperature), p.top_k, top_p, min_p), x, -np.inf)
            x = np.where(without_top_choices(softmax(x / p.temperature), p.xtc_threshold), x, -np.inf)
            top_p, min_p = 1.0, 0.0
        at = draw_token(x, p.temperature, p.top_k, top_p, min_p, uniform)
        return at if ids is None else int(ids[at])

    def logprob(self, logits: Array, token: int) -> TokenLogprob:
        """The model's own log probability of `token`, and of the best alternatives."""
        assert self._p.logprobs is not None
        return token_logprob(logits, token, self._p.logprobs)

    def _adjust(self, x: Array, tokens: Sequence[int], generated: int) -> None:
        p = self._p
        if len(self._bias_ids):
            x[self._bias_ids] += self._biases
        if generated < p.min_tokens:
            x[self._stop_ids] = -np.inf
        if p.penalises:
            window = tokens if p.penalty_last_n < 0 else tokens[-p.penalty_last_n :]
            ids, counts = np.unique(np.array(window, np.int64), return_counts=True)
            seen = x[ids]
            seen = np.where(seen > 0, seen / p.repetition_penalty, seen * p.repetition_penalty)
            x[ids] = seen - counts * p.frequency_penalty - p.presence_penalty
        if self._dry is not None:
            ids, penalties = self._dry.penalties(tokens)
            x[ids] -= penalties

    def _mirostat(self, x: Array, uniform: float) -> int:
        y = x / self._p.temperature
        y -= y.max()
        surprise = (np.log(np.exp(y).sum()) - y) / np.log(2.0)  # -log2 p
        ids = np.flatnonzero(surprise <= max(self._mu, float(surprise.min())))
        at = draw_token(x[ids], self._p.temperature, 0, 1.0, 0.0, uniform)
        left = np.exp(y[ids])
        self._mu -= self._p.mirostat_eta * (float(-np.log2(left[at] / left.sum())) - self._p.mirostat_tau)
        return int(ids[at])


def token_logprob(logits: Array, token: int, top: int) -> TokenLogprob:
    """The log probability of `token` in a row of logits, and of the `top` best ones."""
    x = _finite(logits)
    x -= x.max()
    x -= np.log(np.exp(x).sum())
    count = min(top, len(x))
    best = np.flatnonzero(x >= np.partition(x, len(x) - count)[len(x) - count]) if count else np.empty(0, np.int64)
    best = best[np.argsort(-x[best], kind="stable")][:count]  # ids rise among equals
    return TokenLogprob(token, float(x[token]), tuple((int(i), float(x[i])) for i in best))


def _finite(logits: Array) -> Array:
    """A float64 copy, with -inf for all that is no finite number."""
    x: Array = logits.astype(np.float64)
    bad = ~np.isfinite(x)
    if bad.any():
        x[bad] = -np.inf
    return x


def softmax(x: Array) -> Array:
    """Probabilities of one row `[V]`; at least one entry is finite."""
    e = np.exp(x - x.max())
    p: Array = e / e.sum()
    return p


def typical(p: Array, mass: float) -> Array:
    """Mask of the tokens whose surprise is closest to the entropy, until their sum reaches `mass`; low ids first."""
    surprise = -np.log(np.where(p > 0, p, 1.0))
    away = np.where(p > 0, np.abs(surprise - (p * surprise).sum()), np.inf)
    order = np.argsort(away, kind="stable")
    count = int(np.searchsorted(np.cumsum(p[order]), mass)) + 1
    mask: Array = np.zeros(len(p), bool)
    mask[order[:count]] = True
    return mask


def without_top_choices(p: Array, threshold: float) -> Array:
    """Mask that leaves out all but the least likely of the tokens with `p >= threshold`, if there are two or more."""
    mask: Array = p > 0
    top = np.flatnonzero(mask & (p >= threshold))
    if len(top) > 1:
        spared = top[np.argmin(p[top])]
        mask[top] = False
        mask[spared] = True
    return mask
