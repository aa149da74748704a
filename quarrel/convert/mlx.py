"""Weights as MLX quantises them (mlx-lm, mlx-community): words of codes, and beside them scales and biases of groups.

A group's numbers are those of GGUF blocks: codes of up to 4 bits are Q4_1, of 5 bits Q5_1, of 6 and 8 bits Q8_1, which
no file has, mxfp4 and nvfp4 their namesakes. Only mxfp8 becomes floats of 16 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from quarrel.convert.config import Config
from quarrel.convert.floats import float32
from quarrel.convert.safetensors import Stored
from quarrel.errors import GGUFError, ModelError, UnsupportedModel
from quarrel.gguf import GGMLType

WORDS = ".weight"
SCALES, BIASES = ".scales", ".biases"
_MODES: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "affine": ((1, 2, 3, 4, 5, 6, 8), (32, 64, 128)),
    "mxfp4": ((4,), (32,)),
    "nvfp4": ((4,), (16,)),
    "mxfp8": ((8,), (32,)),
}
"""Bits and sizes of groups that MLX knows."""
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FOURS = np.concatenate([_E2M1, -_E2M1])


@dataclass(frozen=True)
class Coding:
    """How a weight `[.., n, k]` is stored: words `[.., n, k * bits / 32]`, scales and biases `[.., n, k / group]`."""

    mode: str
    bits: int
    group: int

    @property
    def biased(self) -> bool:
        return self.mode == "affine"

    def type(self, k: int) -> GGMLType:
        """What rows of `k` values become."""
        if self.mode == "affine":
            return GGMLType.Q4_1 if self.bits <= 4 else GGMLType.Q5_1 if self.bits == 5 else GGMLType.Q8_1
        if self.mode == "mxfp4":
            return GGMLType.MXFP4
        return GGMLType.NVFP4 if self.mode == "nvfp4" and k % 64 == 0 else GGMLType.BF16


HF_MXFP4 = Coding("mxfp4", 4, 32)
"""OpenAI's folders have the same codes, in bytes."""


def codings(c: Config, tensors: Mapping[str, Stored]) -> dict[str, Coding]:
    """By the names of quantised weights. Raises ModelError for what does not fit together."""
    found = {}
    for name, stored in tensors.items():
        base = name.removesuffix(WORDS)
        if stored.dtype == "U32" and name.endswith(WORDS) and base + SCALES in tensors:
            found[name] = coding = _said(c, base)
            for end in (SCALES, *((BIASES,) if coding.biased else ())):
                _check(name, stored, tensors.get(base + end), coding, base + end)
    return found


def _said(c: Config, base: str) -> Coding:
    said = c.get("quantization", "quantization_config")
    if not isinstance(said, dict):
        raise ModelError(f"{base} is quantised as MLX does it, but {c.path} has no quantization: download the model whole")
    own = said.get(base)
    entry = own if isinstance(own, dict) else said  # a layer's own entry takes nothing from the one for all
    mode = entry.get("mode") or ("mxfp4" if entry.get("quant_method") == "mxfp4" else "affine")
    if not isinstance(mode, str) or mode not in _MODES:
        raise UnsupportedModel(f"{c.path} has the quantization mode {str(mode)[:40]!r}, wanted {', '.join(_MODES)}")
    many, sizes = _MODES[mode]
    defaults = (4, 64) if mode == "affine" else (many[0], sizes[0])
    bits, group = entry.get("bits") or defaults[0], entry.get("group_size") or defaults[1]
    if bits not in many or group not in sizes:
        wanted = f"{', '.join(map(str, many))} bits in groups of {', '.join(map(str, sizes))}"
        raise UnsupportedModel(
            f"{c.path} has {base} in {str(bits)[:40]} bits and groups of {str(group)[:40]}, wanted {wanted} for {mode}"
        )
    return Coding(mode, bits, group)


def _check(name: str, words: Stored, beside: Stored | None, coding: Coding, wanted: str) -> None:
    if beside is None:
        raise ModelError(f"the tensor {name} is quantised, and there is no {wanted}: download the model whole")
    floats = beside.dtype in ("F32", "F16", "BF16")
    fits = words.shape[:-1] == beside.shape[:-1] and len(words.shape) > 1
    if (
        not (fits and words.shape[-1] * 32 == beside.shape[-1] * coding.group * coding.bits)
        or floats is not coding.biased
        or not (floats or beside.dtype == "U8")
    ):
        raise ModelError(
            f"the tensor {wanted} is {beside.dtype} {list(beside.shape)}, which does not fit {name} {list(words.shape)}"
            f" in {coding.bits} bits and groups of {coding.group}: config.json tells of another model, or a file is damaged"
        )


def to_values(coding: Coding, codes: np.ndarray, scales: np.ndarray, biases: np.ndarray | None) -> np.ndarray:
    """float32 [n, k] of bytes of codes [n, k * bits / 8] and of what lies beside them [n, k / group]."""
    fields = _fields(codes, coding.bits)
    if coding.mode == "affine":
        assert biases is not None
        numbers, factors, added = fields.astype(np.float32), scales, np.repeat(biases, coding.group, -1)
    else:
        numbers = float32(fields, "F8_E4M3") if coding.mode == "mxfp8" else np.take(_FOURS, fields)
        exponents = scales.astype(np.int32) - 127
        powers: np.ndarray = np.ldexp(np.float32(1), exponents)
        factors, added = float32(scales, "F8_E4M3") if coding.mode == "nvfp4" else powers, np.zeros(1, np.float32)
    result: np.ndarray = numbers * np.repeat(factors, coding.group, -1) + added
    return result


def to_blocks(coding: Coding, codes: np.ndarray, scales: np.ndarray, biases: np.ndarray | None) -> np.ndarray:
    """The same as GGUF's blocks, uint8 [n, bytes of a row]; for codings whose type is one of blocks."""
    if coding.mode == "mxfp4":
        return _mxfp4(codes, scales)
    fields = _fields(codes, coding.bits)
    n = len(fields)
    if coding.mode == "nvfp4":
        sixteens = fields.reshape(n, -1, 4, 2, 8)
        packed = (sixteens[..., 0, :] | sixteens[..., 1, :] << 4).reshape(n, -1, 32)
        return np.concatenate([scales.reshape(n, -1, 4), packed], -1).reshape(n, -1)
    assert biases is not None
    both = np.stack([_half(scales), _half(biases)], -1)  # [n, groups, 2]
    parts = [np.repeat(both, coding.group // 32, 1).view(np.uint8)]
    if coding.bits > 5:
        return np.concatenate([*parts, fields.reshape(n, -1, 32)], -1).reshape(n, -1)
    pairs = fields.reshape(n, -1, 2, 16)
    if coding.bits == 5:
        parts.append(np.packbits(fields.reshape(n, -1, 32) >> 4, axis=-1, bitorder="little"))
        pairs = pairs & 15
    parts.append(pairs[:, :, 0] | pairs[:, :, 1] << 4)
    return np.concatenate(parts, -1).reshape(n, -1)


def _mxfp4(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Codes [n, k / 2] in pairs of neighbours and exponents [n, k / 32] -> ggml's blocks [n, k / 32 * 17], which pair an
    element with the one 16 further."""
    pairs = codes.reshape(len(codes), -1, 16)
    values = np.stack([pairs & 15, pairs >> 4], -1).reshape(*pairs.shape[:2], 32)
    blocks = np.concatenate([scales[..., None], values[..., :16] | values[..., 16:] << 4], -1)
    return blocks.reshape(len(codes), -1)


def _half(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        half: np.ndarray = x.astype(np.float16)
    if (np.isinf(half) & np.isfinite(x)).any():
        raise GGUFError(f"a scale is {np.abs(x).max():g}, and blocks hold at most 65504")
    return half


def _fields(codes: np.ndarray, bits: int) -> np.ndarray:
    """Bytes to whole numbers, the lowest bits first."""
    if bits == 8:
        return codes
    if bits == 4:
        return np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)
    each = np.unpackbits(codes, axis=-1, bitorder="little").reshape(len(codes), -1, bits)
    fields: np.ndarray = (each << np.arange(bits, dtype=np.uint8)).sum(-1, dtype=np.uint8)
    return fields
