"""Samplers one after the other, in an order that a request chose, as llama.cpp runs them.

Each looks at what the ones before it left, whose probabilities sum to 1 again:

    top_n_sigma  keeps logits >= max - n * standard deviation of all that are left
    temperature  logits / T; with a range, T = low + (high - low) * (entropy / log(count)) ** exponent, within range of T
    adaptive_p   (last) draws near a target probability: p becomes exp(5 - 10 d^2 / (1 + d)), d = |p - aim| / 0.3, where aim
                 is twice the target less the running average of what was drawn

and top_k, typical_p, top_p, min_p and XTC as in `quarrel.engine.chain`. top_n_sigma: arXiv:2411.07641. Adaptive-p:
llama.cpp #17927.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quarrel.engine.cuts import softmax, typical, without_top_choices
from quarrel.engine.params import SamplingParams
from quarrel.ops.sample import draw_finite, kept, over

Array = npt.NDArray[Any]
PEAK, SHARPNESS, WIDTH = 5.0, 10.0, 0.3


def top_n_sigma(x: Array, n: float) -> Array:
    """Mask of the logits within n standard deviations of the largest."""
    alive = x[x > -np.inf]
    mask: Array = x >= alive.max() - n * alive.std()
    return mask


def dynamic(x: Array, temperature: float, spread: float, exponent: float) -> float:
    """The temperature between `temperature` - spread and + spread that the entropy of the row chooses."""
    p = softmax(x)
    p = p[p > 0]
    low, high = max(0.0, temperature - spread), temperature + spread
    if len(p) < 2:
        return temperature
    share = float(-(p * np.log(p)).sum() / np.log(len(p)))
    return float(max(low + (high - low) * min(max(share, 0.0), 1.0) ** exponent, 1e-5))


class Ordered:
    """The samplers of one sequence; adaptive-p remembers what was drawn."""

    def __init__(self, params: SamplingParams) -> None:
        self._p = params
        # As if the target had been reached so far.
        self._weight = 1.0 / (1.0 - params.adaptive_decay)
        self._sum = max(params.adaptive_target, 0.0) * self._weight

    def draw(self, x: Array, uniform: float, xtc_uniform: float) -> int:
        """Which of these is drawn. x: float64 `[n]`, -inf or finite, at least one of them finite."""
        for name in self._p.order:
            x = self._cut(name, x, xtc_uniform)
        if "adaptive_p" in self._p.order:
            return self._adaptive(x, uniform)
        return draw_finite(x, int(x.argmax()), 1.0, 0, 1.0, 0.0, uniform)

    def _cut(self, name: str, x: Array, xtc_uniform: float) -> Array:
        p = self._p
        if name == "temperature":
            spread = p.dynatemp_range
            t = dynamic(x, p.temperature, spread, p.dynatemp_exponent) if spread else p.temperature
            return over(x - x.max(), t)
        mask = None
        if name == "top_n_sigma":
            mask = top_n_sigma(x, p.top_n_sigma)
        elif name == "top_k":
            mask = kept(softmax(x), p.top_k, 1.0, 0.0)
        elif name == "top_p":
            mask = kept(softmax(x), 0, p.top_p, 0.0)
        elif name == "min_p":
            mask = kept(softmax(x), 0, 1.0, p.min_p)
        elif name == "typical_p":
            mask = typical(softmax(x), p.typical_p)
        elif name == "xtc" and xtc_uniform < p.xtc_probability:
            mask = without_top_choices(softmax(x), p.xtc_threshold)
        return x if mask is None else np.where(mask, x, -np.inf)

    def _adaptive(self, x: Array, uniform: float) -> int:
        p = self._p
        shares = softmax(x)
        aim = min(max(2.0 * p.adaptive_target - self._sum / self._weight, 0.0), 1.0)
        d = np.abs(shares - aim) / WIDTH
        y = np.where(shares > 0, PEAK - SHARPNESS * d * d / (1.0 + d), -np.inf)
        at = draw_finite(y, int(y.argmax()), 1.0, 0, 1.0, 0.0, uniform)
        self._sum = float(shares[at]) + p.adaptive_decay * self._sum
        self._weight = 1.0 + p.adaptive_decay * self._weight
        return at
