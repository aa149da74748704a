"""Rope frequencies from a file's keys: plain, linear, YaRN, Llama 3 factors, longrope factors.

f_i = base^(-2i / n_rot), then divided by the file's factors and by the linear factor, or blended by YaRN
YaRN (Peng et al. 2023): f_i * ((1 - y_i) + y_i / factor), magnitude 1 + 0.1 ln(factor)
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from quarrel.errors import ModelError, UnsupportedModel
from quarrel.models.keys import Keys
from quarrel.models.spec import Rope
from quarrel.models.tensors import Tensors


def rope_from(
    keys: Keys,
    tensors: Tensors,
    style: Literal["norm", "neox"],
    head_dim: int,
    n_ctx: int,
    *,
    truncate: bool = True,
) -> Rope:
    """The rotation of layers that follow the file's general rope keys. `n_ctx` is the context that will be used.

    `truncate` rounds the bounds of YaRN's ramp outwards to whole frequencies.
    """
    n_rot = keys.int("rope.dimension_count", head_dim, lo=2, hi=head_dim)
    if n_rot % 2:
        raise ModelError(f"rope.dimension_count is {n_rot}, which is odd; rotation works on pairs, convert the model again")
    base = keys.float("rope.freq_base", 10000.0, lo=1.0)
    freq = plain(base, n_rot)
    kind = keys.str("rope.scaling.type", "linear")
    factor = keys.float("rope.scaling.factor", keys.float("rope.scale_linear", 1.0), lo=0.0) or 1.0
    magnitude = 1.0
    if "rope_factors_long.weight" in tensors:
        long = n_ctx > keys.int("rope.scaling.original_context_length", lo=1)
        freq = freq / _factors(tensors, f"rope_factors_{'long' if long else 'short'}.weight", n_rot)
        return Rope(style, n_rot, _table(freq), keys.float("rope.scaling.attn_factor", 1.0, lo=0.0))
    if "rope_freqs.weight" in tensors:
        freq = freq / _factors(tensors, "rope_freqs.weight", n_rot)
    if kind == "yarn":
        original = keys.int("rope.scaling.original_context_length", keys.int("context_length"), lo=1)
        turns = (
            keys.float("rope.scaling.yarn_beta_fast", 32.0, lo=0.0),
            keys.float("rope.scaling.yarn_beta_slow", 1.0, lo=0.0),
        )
        freq = yarn(freq, base, factor, original, turns, truncate=truncate)
        magnitude = _magnitude(keys, factor)
    elif kind == "linear":
        freq = freq / factor
    elif kind != "none":
        raise UnsupportedModel(f"rope.scaling.type is {kind!r}; Quarrel knows none, linear, yarn and factor tensors")
    return Rope(style, n_rot, _table(freq), magnitude)


def plain(base: float, n_rot: int) -> np.ndarray:
    """f_i, float64."""
    return np.asarray(base ** (-2.0 * np.arange(n_rot // 2) / n_rot))


def yarn(
    freq: np.ndarray,
    base: float,
    factor: float,
    original: int,
    turns: tuple[float, float] = (32.0, 1.0),
    *,
    truncate: bool = True,
) -> np.ndarray:
    """Blends slow frequencies by `1 / factor`; the ramp runs between two numbers of rotations within `original` tokens."""
    n_rot = 2 * len(freq)

    def correction(rotations: float) -> float:
        return n_rot * math.log(original / (2 * math.pi * rotations)) / (2 * math.log(base))

    low, high = (correction(max(count, 1e-6)) for count in turns)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(0.0, low), min(n_rot - 1.0, high)
    ramp = np.clip((np.arange(len(freq)) - low) / max(0.001, high - low), 0.0, 1.0)
    return np.asarray(freq * ((1.0 - ramp) + ramp / factor))


def _magnitude(keys: Keys, factor: float) -> float:
    """1 + 0.1 ln(factor), over the same with the file's multiplier of the logarithm, if any; or what the file says."""
    log, multiplier = 0.1 * math.log(max(1.0, factor)), keys.float("rope.scaling.yarn_log_multiplier", 0.0, lo=0.0)
    usual = (1.0 + log) / (1.0 + multiplier * log)
    said = keys.float("rope.scaling.yarn_attn_factor", 0.0, lo=0.0)
    return (said or usual) * keys.float("rope.scaling.attn_factor", 1.0, lo=0.0)


def unscaled(keys: Keys, full: Rope, default: float | None = None) -> Rope:
    """The rotation of layers with a window, where no context scaling applies: by their own base, or else by the default,
    the general one if there is none."""
    default = keys.float("rope.freq_base", 10000.0, lo=1.0) if default is None else default
    return Rope(full.style, full.n_rot, _table(plain(keys.float("rope.freq_base_swa", default, lo=1.0), full.n_rot)))


def _factors(tensors: Tensors, name: str, n_rot: int) -> np.ndarray:
    factors = np.array(tensors.floats(name))
    if len(factors) != n_rot // 2 or not np.isfinite(factors).all() or (factors <= 0).any():
        wanted = f"the key rope.dimension_count asks for {n_rot // 2} positive ones"
        raise ModelError(f"the tensor {name} holds {len(factors)} values, but {wanted}: the file contradicts itself")
    return factors


def _table(freq: np.ndarray) -> tuple[float, ...]:
    return tuple(float(f) for f in freq.astype(np.float32))
