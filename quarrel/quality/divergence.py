"""Statistics over scored tokens: perplexity, and how far from a reference. The definitions are llama-perplexity's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from quarrel.quality.base_file import FLOOR, log_softmax

Array = npt.NDArray[Any]
QUANTILES = (0.0, 0.01, 0.05, 0.1, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0)


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error."""

    value: float
    error: float


@dataclass(frozen=True)
class Divergence:
    """A model Q against a reference."""

    perplexity_base: Estimate
    ratio: Estimate
    """perplexity / reference's perplexity."""
    correlation: float
    """Of the two models' ln(perplexity) over tokens."""
    kld: Estimate
    kld_quantiles: dict[str, float]
    delta_p: Estimate
    """Change of the right token's probability."""
    delta_p_rms: float
    delta_p_quantiles: dict[str, float]
    same_top: Estimate
    """Share of positions where both find the same token likeliest."""


@dataclass
class Score:
    """Gathers negative log-likelihoods and, beside a reference, its own and the divergences."""

    nll: list[Array] = field(default_factory=list)
    base: list[Array] = field(default_factory=list)
    kld: list[Array] = field(default_factory=list)
    same: list[Array] = field(default_factory=list)

    def add(self, logits: Array, targets: Sequence[int], base: Array | None = None) -> None:
        """Rows of logits and the tokens that came; `base`: the reference's log-probabilities of the same rows."""
        own, at = log_softmax(logits), np.arange(len(targets))
        targets = np.asarray(targets)  # type: ignore[assignment]
        self.nll.append(-own[at, targets])
        if base is not None:
            self.base.append(-base[at, targets].astype(np.float64))
            known = base > -FLOOR
            gain = np.exp(base, dtype=np.float64, where=known, out=np.zeros(base.shape)) * (base - own)
            self.kld.append(np.where(known, gain, 0.0).sum(-1))
            self.same.append(own.argmax(-1) == base.argmax(-1))

    def __len__(self) -> int:
        return sum(map(len, self.nll))

    def perplexity(self) -> Estimate:
        """exp of the mean, and the first-order error of that."""
        return _exponential(np.concatenate(self.nll))

    def divergence(self) -> Divergence | None:
        """None without a reference."""
        if not self.base:
            return None
        nll, base, kld = (np.concatenate(part) for part in (self.nll, self.base, self.kld))
        delta = np.exp(-nll) - np.exp(-base)
        squares = _mean(delta**2)
        rms = math.sqrt(squares.value)
        return Divergence(
            perplexity_base=_exponential(base),
            ratio=_exponential(nll - base),
            correlation=float(np.corrcoef(nll, base)[0, 1]) if len(nll) > 1 and nll.std() and base.std() else 1.0,
            kld=_mean(kld),
            kld_quantiles=_quantiles(kld),
            delta_p=_mean(delta),
            delta_p_rms=rms,
            delta_p_quantiles=_quantiles(delta),
            same_top=_mean(np.concatenate(self.same).astype(np.float64)),
        )


def _mean(values: Array) -> Estimate:
    spread = float(values.std()) / math.sqrt(len(values) - 1) if len(values) > 1 else 0.0
    return Estimate(float(values.mean()), spread)


def _exponential(values: Array) -> Estimate:
    mean = _mean(values)
    # Beyond float range a perplexity means nothing.
    value = math.exp(min(mean.value, 700.0))
    return Estimate(value, mean.error * value)


def _quantiles(values: Array) -> dict[str, float]:
    return {f"{100 * q:g} %": float(np.quantile(values, q)) for q in QUANTILES}
