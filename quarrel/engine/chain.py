"""Sampling on the host, for requests that ask for more than the `sample` op draws; the drawing rule itself is the op's.

    logits    + logit_bias; stop tokens banned before min_tokens; penalties; DRY
    greedy    (temperature 0) the best of these
    mirostat  p = softmax(logits / temperature); keep surprise -log2 p <= mu; draw; mu -= eta * (surprise - tau).
              Version 1 keeps as many as have a mean surprise of mu if the p fall by a power of their rank
    ordered   (`samplers`, or one that only llama.cpp's order has) as in `quarrel.engine.ordered`
    else      top_k; p = softmax(logits / temperature); typical_p; top_p and min_p as in the op; XTC; draw

Typical (Meister et al. 2023, arXiv:2202.00666) keeps the tokens whose surprise is closest to the entropy. XTC, with its
probability, removes all but the least likely of the tokens that reach its threshold. Mirostat: arXiv:2007.14966.

A row is 100,000 numbers long. Where only the most likely can be drawn (greedy, or with a top_k), only those are looked at
and what has a bias, a ban or a penalty: the same numbers, so the same token, in a tenth of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quarrel.engine.cuts import softmax, typical, without_top_choices
from quarrel.engine.dry import Dry
from quarrel.engine.ordered import Ordered
from quarrel.engine.params import SamplingParams
from quarrel.engine.results import TokenLogprob
from quarrel.engine.text import Texts
from quarrel.ops.adjust import penalised
from quarrel.ops.sample import draw_finite, draw_token, kept, over

Array = npt.NDArray[Any]
Change = tuple[Array, Callable[[Array, Any], Array]]
"""Token ids, and what becomes of the logits of some of them: which, is said by an index into the ids."""
SPARE = 4
"""A model that follows a grammar likes what it allows: so many times as many as are drawn from hold enough of that."""
FEW = 32
"""A grammar that allows less than one in so many tokens leaves a row that is short enough."""


class HostChain:
    """The sampler of one sequence; mirostat and DRY remember what was drawn."""

    def __init__(self, params: SamplingParams, stop_ids: Collection[int], texts: Texts) -> None:
        self._p = params
        self._stop_ids = np.array(sorted(stop_ids), np.int64)
        self._bias_ids = np.array(list(params.logit_bias), np.int64)
        self._biases = np.array(list(params.logit_bias.values()), np.float64)
        self._mu = 2.0 * params.mirostat_tau
        self._counts = Counts(params.penalty_last_n)
        self._ordered = Ordered(params) if params.order else None
        self._dry = None
        if params.dries:
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
        peaks: Peaks | None = None,
    ) -> int:
        """The next token from `logits` `[V]` after `tokens`, or -1 if none can be drawn. allowed: bool `[V]`. peaks: of the
        logits, if there are any already."""
        changes = self._changes(tokens, generated)
        ids = self._likely(logits, changes, allowed, peaks)
        if ids is None and allowed is not None:
            ids = np.flatnonzero(allowed)
        x = _finite(logits if ids is None else logits[ids])
        for wanted, change in changes:
            if ids is None:
                x[wanted] = change(x[wanted], slice(None))
            elif len(ids):
                at = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
                there = ids[at] == wanted
                x[at[there]] = change(x[at[there]], there)
        drawn = self._draw(x, uniform, xtc_uniform)
        return drawn if ids is None or drawn < 0 else int(ids[drawn])

    def _likely(self, logits: Array, changes: Sequence[Change], allowed: Array | None, peaks: Peaks | None) -> Array | None:
        """Ids, ascending, among which are all that can be drawn; None if that takes a look at all of them."""
        p = self._p
        if p.temperature and (p.mirostat or not p.top_k or p.order[:1] not in ((), ("top_k",))):
            return None
        if allowed is not None and np.count_nonzero(allowed) < len(logits) // FEW:
            return None
        # Whatever a change makes of its token, so many others are left that are as likely as the last one drawn from.
        count = (p.top_k if p.temperature else 1) + sum(len(wanted) for wanted, _ in changes)
        peaks = peaks or Peaks(logits)
        ids = peaks.largest(count if allowed is None else SPARE * count)
        if allowed is not None and (ids is None or np.count_nonzero(allowed[ids]) < count):
            ids = Peaks(np.where(allowed, logits, np.float32(-np.inf))).largest(count)
        if ids is None:
            return None
        if changes:
            ids = np.concatenate([ids, *(wanted for wanted, _ in changes)])
            ids.sort()
            ids = ids[np.append(True, ids[1:] != ids[:-1])]
        return ids if allowed is None else ids[allowed[ids]]

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
        if self._ordered is not None:
            return self._ordered.draw(x, uniform, xtc_uniform)
        ids = None
        if 0 < p.top_k < len(x):
            # What is cut here is cut by the draw anyway; what is left are a few dozen.
            ids = np.flatnonzero(x >= np.partition(x, len(x) - p.top_k)[len(x) - p.top_k])
            x = x[ids]
        if p.typical_p < 1.0:
            x = np.where(typical(softmax(x, p.temperature), p.typical_p), x, -np.inf)
        top_p, min_p = p.top_p, p.min_p
        if xtc_uniform < p.xtc_probability:
            x = np.where(kept(softmax(x, p.temperature), p.top_k, top_p, min_p), x, -np.inf)
            x = np.where(without_top_choices(softmax(x, p.temperature), p.xtc_threshold), x, -np.inf)
            top_p, min_p = 1.0, 0.0
        at = draw_finite(x, int(x.argmax()), p.temperature, p.top_k, top_p, min_p, uniform)
        return at if ids is None else int(ids[at])

    def logprob(self, logits: Array, token: int, peaks: Peaks | None = None) -> TokenLogprob:
        """The model's own log probability of `token`, and of the best alternatives."""
        assert self._p.logprobs is not None
        return token_logprob(logits, token, self._p.logprobs, peaks)

    def _changes(self, tokens: Sequence[int], generated: int) -> list[Change]:
        p = self._p
        changes: list[Change] = []
        if len(self._bias_ids):
            changes.append((self._bias_ids, lambda x, some: x + self._biases[some]))
        if generated < p.min_tokens:
            changes.append((self._stop_ids, lambda x, some: np.full_like(x, -np.inf)))
        if p.penalises:
            ids, counts = self._counts.of(tokens)

            strengths = p.repetition_penalty, p.presence_penalty, p.frequency_penalty
            changes.append((ids, lambda x, some: penalised(x, counts[some], *strengths)))
        if self._dry is not None:
            carried, penalties = self._dry.penalties(tokens)
            changes.append((carried, lambda x, some: x - penalties[some]))
        return [change for change in changes if len(change[0])]

    def _mirostat(self, x: Array, uniform: float) -> int:
        y = over(x - x.max(), self._p.temperature)
        surprise = (np.log(np.exp(y).sum()) - y) / np.log(2.0)  # -log2 p
        if self._p.mirostat == 1:
            ids = np.sort(np.argsort(-y, kind="stable")[: _ranks(y, self._mu)])
        else:
            ids = np.flatnonzero(surprise <= max(self._mu, float(surprise.min())))
        at = draw_token(x[ids], self._p.temperature, 0, 1.0, 0.0, uniform)
        left = np.exp(y[ids])
        self._mu -= self._p.mirostat_eta * (float(-np.log2(left[at] / left.sum())) - self._p.mirostat_tau)
        return int(ids[at])


HEAD = 100
"""Ranks by which version 1 of mirostat estimates how fast probabilities fall."""


def _ranks(logits: Array, mu: float) -> int:
    """How many of the most likely mirostat 1 keeps: if p falls as rank ** -s, so many have a mean surprise of mu bits."""
    head = np.partition(logits, -HEAD)[-HEAD:] if len(logits) > HEAD else logits
    head = np.sort(head[np.isfinite(head)])[::-1]
    if len(head) < 2:
        return 1
    ranks = np.arange(1, len(head))
    falls = np.log((ranks + 1) / ranks)
    s = max(float((falls * -np.diff(head)).sum() / (falls**2).sum()), 1e-3)
    over = s - 1 if abs(s - 1) > 1e-9 else 1e-9
    with np.errstate(over="ignore"):
        k = np.float64(over * 2.0**mu / (1 - float(len(logits)) ** -over)) ** (1 / s)
    return int(min(max(k, 1), len(logits)))


class Counts:
    """How often each token is among the last ones, kept up as tokens come. last: of so many, -1 is all."""

    def __init__(self, last: int) -> None:
        self._last, self._first, self._end = last, 0, 0
        self._seen: dict[int, int] = {}

    def of(self, tokens: Sequence[int]) -> tuple[Array, Array]:
        """Ids and counts."""
        seen, end = self._seen, len(tokens)
        first = 0 if self._last < 0 else max(0, end - self._last)
        if first > self._end or end < self._end:
            seen.clear()
            self._end = self._first = first
        for token in tokens[self._end : end]:
            seen[token] = seen.get(token, 0) + 1
        for token in tokens[self._first : first]:
            seen[token] -= 1
            if not seen[token]:
                del seen[token]
        self._first, self._end = first, end
        return np.fromiter(seen, np.int64, len(seen)), np.fromiter(seen.values(), np.int64, len(seen))


def token_logprob(logits: Array, token: int, top: int, peaks: Peaks | None = None) -> TokenLogprob:
    """The log probability of `token` in a row of logits, and of the `top` best ones."""
    peaks = peaks or Peaks(logits)
    finite = np.isfinite(peaks.top)
    x = logits if finite else _finite(logits)
    most = peaks.top if finite else x.max()
    powers = np.subtract(x, most, dtype=np.float64)
    total = np.log(np.exp(powers, out=powers).sum())
    count = min(top, len(x))
    best = peaks.largest(count) if count else np.empty(0, np.int64)
    if best is None:
        best = np.flatnonzero(x >= np.partition(x, len(x) - count)[len(x) - count])
    best = best[np.argsort(-x[best], kind="stable")][:count]  # ids rise among equals
    logprobs = (x[best].astype(np.float64) - most - total).tolist()
    return TokenLogprob(token, float(np.float64(x[token]) - most - total), tuple(zip(best.tolist(), logprobs)))


def _finite(logits: Array) -> Array:
    """A float64 copy, with -inf for all that is no finite number."""
    x: Array = logits.astype(np.float64)
    bad = ~np.isfinite(x)
    if bad.any():
        x[bad] = -np.inf
    return x


DEPTH = 32
"""Numbers of a group: of 128,000 logits 4,000 maxima are left (16 is no quicker, 64 takes three times as long)."""
LEAST = 4096
"""Rows shorter than that are looked at as a whole."""


class Peaks:
    """The largest of a row `[V]`, found by the maxima of small groups: few candidates are ever drawn from.

    Number i belongs to group i % width, so that the maxima are 31 comparisons of long rows. If the `count` largest maxima
    reach down to `edge`, at least so many numbers are as large, and all of them lie in groups whose maximum is.
    """

    def __init__(self, row: Array) -> None:
        self._row, self._width = row, len(row) // DEPTH if len(row) >= LEAST else 0
        if self._width:
            whole = self._width * DEPTH
            self._groups, rest = row[:whole].reshape(DEPTH, self._width), row[whole:]
            self._tops = self._groups.max(0)
            # What is left belongs to the first groups, and is looked at in any case.
            np.maximum(self._tops[: len(rest)], rest, out=self._tops[: len(rest)])
        self.top = float((self._tops if self._width else row).max()) if len(row) else float("-inf")
        """The largest; NaN if there is one."""

    def largest(self, count: int) -> Array | None:
        """Ids, ascending, of all that reach some value, which `count` of them at least do. None where that would be too
        many, or some are infinite or no numbers."""
        if not 0 < count <= self._width // 2 or not np.isfinite(self.top):
            return None
        edge = np.partition(self._tops, self._width - count)[self._width - count]
        if edge == -np.inf:
            return None
        groups = np.flatnonzero(self._tops >= edge)
        depth, at = np.divmod(np.flatnonzero(self._groups[:, groups] >= edge), len(groups))
        ids: Array = depth * self._width + groups[at]
        whole = self._width * DEPTH
        return ids if whole == len(self._row) else np.append(ids, whole + np.flatnonzero(self._row[whole:] >= edge))
