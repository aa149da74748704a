"""A longer context than a model was made for: rope scaling that a caller asks for, as keys in place of the file's own.

linear  positions count `scale` times less
yarn    slow frequencies do, fast ones do not (see `rope.py`); the model was trained on `original` tokens
none    the file's own scaling is left out
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from quarrel.errors import RequestError, UnsupportedModel
from quarrel.gguf import Metadata
from quarrel.models.keys import MAX_CONTEXT
from quarrel.models.mixers import Attention, Parallel
from quarrel.models.spec import EncoderSpec, ModelSpec

Scaling = Literal["none", "linear", "yarn"]
SCALINGS: tuple[str, ...] = get_args(Scaling)
MAX_SCALE = 1024.0


@dataclass(frozen=True)
class RopeScaling:
    """What a caller asks for; None leaves it to the file, or, for the scale, to the context that is asked for.

    Raises RequestError for a value outside its range.
    """

    kind: Scaling | None = None
    scale: float | None = None
    original: int | None = None

    def __post_init__(self) -> None:
        if self.kind is not None and self.kind not in SCALINGS:
            raise RequestError(f"rope_scaling is {self.kind!r}, wanted one of {', '.join(SCALINGS)}", "rope_scaling")
        scale, original = self.scale, self.original
        sound = isinstance(scale, int | float) and not isinstance(scale, bool) and math.isfinite(scale)
        if scale is not None and not (sound and 1 <= scale <= MAX_SCALE):
            message = f"rope_scale is {scale!r}, wanted a number from 1 to {MAX_SCALE:g}: times the context"
            raise RequestError(message, "rope_scale")
        if scale is not None and self.kind == "none":
            message = f"rope_scaling is 'none' and rope_scale {scale:g}: leave one of them out"
            raise RequestError(message, "rope_scaling", "rope_scale")
        whole = isinstance(original, int) and not isinstance(original, bool)
        if original is not None and not (whole and 1 <= original <= MAX_CONTEXT):
            raise RequestError(f"yarn_orig_ctx is {original!r}, wanted tokens from 1 to {MAX_CONTEXT}", "yarn_orig_ctx")

    def __bool__(self) -> bool:
        return self != RopeScaling()

    def applied(self, metadata: Metadata, architecture: str, n_ctx: int | None) -> Metadata:
        """The keys as if the file had been written so. n_ctx: the context that is asked for, if it is."""
        names = {n: f"{architecture}.{n}" for n in ("context_length", "rope.scaling.type", "rope.scaling.factor")}
        key = f"{architecture}.rope.scaling.original_context_length"
        trained = metadata.int(names["context_length"], lo=1)
        had = metadata.str(names["rope.scaling.type"], "linear")
        kind = self.kind or ("yarn" if had == "yarn" else "linear")
        original = metadata.int(key, trained, lo=1) if self.original is None else self.original
        if self.original is not None and kind != "yarn":
            message = f"yarn_orig_ctx belongs to rope_scaling 'yarn', and it is {kind!r}: leave it out"
            raise RequestError(message, "yarn_orig_ctx", "rope_scaling")
        changed: dict[str, str | float | int] = {names["rope.scaling.type"]: kind, key: original}
        if (said := f"{architecture}.rope.scaling.yarn_attn_factor") in metadata:
            changed[said] = 0.0  # that of the file's own factor
        if kind == "none":
            return metadata.replaced({**changed, names["context_length"]: original, names["rope.scaling.factor"]: 1.0})
        scale = self.scale
        if scale is None and had == kind:
            scale = metadata.float(names["rope.scaling.factor"], 0.0) or None
        if scale is None and n_ctx is not None and n_ctx > original:
            scale = n_ctx / original
        if scale is None:
            raise RequestError(
                f"rope_scaling is {kind!r} without a rope_scale, for a model that was trained on {original} tokens: give"
                f" one such as 4, or an n_ctx above {original}",
                "rope_scaling",
                "rope_scale",
                "n_ctx",
            )
        longest = min(max(1, round(original * scale)), MAX_CONTEXT)
        return metadata.replaced({**changed, names["context_length"]: longest, names["rope.scaling.factor"]: float(scale)})


def check_scalable(spec: ModelSpec | EncoderSpec, longrope: bool) -> None:
    """Raises UnsupportedModel for a model whose positions are not rotations that can be scaled."""
    mixers = [spec.attention] if isinstance(spec, EncoderSpec) else [layer.mixer for layer in spec.layers]
    if longrope:
        message = "the model has frequencies of its own for long contexts (longrope): leave rope_scaling out"
        raise UnsupportedModel(message, "rope_scaling")
    parts = [part for m in mixers for part in (m.parts if isinstance(m, Parallel) else (m,))]
    if not any(isinstance(m, Attention) and m.rope is not None for m in parts):
        message = f"a model of this kind ({spec.architecture}) does not rotate: leave rope_scaling out"
        raise UnsupportedModel(message, "rope_scaling")
