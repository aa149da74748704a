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
        freq = yarn(freq, base, factor, original, truncate=truncate)
        magnitude = (1.0 + 0.1 * math.log(factor)) * keys.float("rope.scaling.attn_factor", 1.0, lo=0.0)
    elif kind == "linear":
        freq = freq / factor
    elif kind != "none":
        raise UnsupportedModel(f"rope.scaling.type is {kind!r}; Quarrel knows none, linear, yarn and factor tensors")
    return Rope(style, n_rot, _table(freq), magnitude)


def plain(base: float, n_rot: int) -> np.ndarray:
    """f_i, float64."""
    return np.asarray(base ** (-2.0 * np.arange(n_rot // 2) / n_rot))


def yarn(freq: np.ndarray, base: float, factor: float, original: int, *, truncate: bool = True) -> np.ndarray:
    """Blends slow frequencies by `1 / factor`; the ramp runs from 32 rotations within `original` tokens to 1."""
    n_rot = 2 * len(freq)

    def correction(rotations: float) -> float:
        return n_rot * math.log(original / (2 * math.pi * rotations)) / (2 * math.log(base))

    low, high = correction(32.0), correction(1.0)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(0.0, low), min(n_rot - 1.0, high)
    ramp = np.clip((np.arange(len(freq)) - low) / max(0.001, high - low), 0.0, 1.0)
    return np.asarray(freq * ((1.0 - ramp) + ramp / factor))


def table(base: float, n_rot: int, style: Literal["norm", "neox"]) -> Rope:
    """Unscaled rotation, as Gemma 3's sliding layers use."""
    return Rope(style, n_rot, _table(plain(base, n_rot)))


def _factors(tensors: Tensors, name: str, n_rot: int) -> np.ndarray:
    factors = np.array(tensors.floats(name))
    if len(factors) != n_rot // 2 or not np.isfinite(factors).all() or (factors <= 0).any():
        wanted = f"the key rope.dimension_count asks for {n_rot // 2} positive ones"
        raise ModelError(f"the tensor {name} holds {len(factors)} values, but {wanted}: the file contradicts itself")
    return factors


def _table(freq: np.ndarray) -> tuple[float, ...]:
    return tuple(float(f) for f in freq.astype(np.float32))
