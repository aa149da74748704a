"""What the cache keeps of keys and values.

    auto               the backend's own: its compute type, or float16
    float16, bfloat16  each value rounded to nearest
    int8, fp8, fp8_e5m2   a code a value and a float32 scale for each token and head:  value = code * amax / top

    amax = max |x| over the head's values,  code = round(x * (top / amax)),  all in float32, ties to even
    int8: whole numbers, top = 127.  fp8: E4M3 (4 bits of exponent, 3 of mantissa), top = 448, its largest
    fp8_e5m2: E5M2 (5 and 2), top = 57344, its largest: half as fine, but values down to 2^-32 of the head's largest are not
    zero, where E4M3 ends at 2^-18

A scale for a token and head, and not for each block of 32 values, because it leaves the products alone: it multiplies a
score, or a weight of the softmax, once, where smaller blocks would multiply every value. It costs 4 bytes a head: 8.25 bits
a value with 128 values to a head. Rows whose amax is below 1e-30 are zeros; one that holds a NaN or an infinity is all NaN.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
KVType = Literal["auto", "float16", "bfloat16", "int8", "fp8", "fp8_e5m2"]
KV_TYPES: tuple[KVType, ...] = ("auto", "float16", "bfloat16", "int8", "fp8", "fp8_e5m2")
TOP = {"int8": 127.0, "fp8": 448.0, "fp8_e5m2": 57344.0}


class Float8(NamedTuple):
    """An 8-bit float: its bits of mantissa, the exponent of its smallest normal number, and the code of its largest."""

    mantissa: int
    least: int
    top: int

    @property
    def shift(self) -> int:
        """Bits of a float32's mantissa that a code has not."""
        return 23 - self.mantissa

    @property
    def half(self) -> int:
        """What rounds these away, with the last bit that stays: ties to even."""
        return (1 << (self.shift - 1)) - 1

    @property
    def bias(self) -> int:
        """Of the shifted bits of a float32, what is too much."""
        return (126 + self.least) << self.mantissa

    @property
    def normal(self) -> int:
        """The bits of the smallest normal number as a float32."""
        return (127 + self.least) << 23

    @property
    def magic(self) -> float:
        """A float32 whose last bit is worth a subnormal code."""
        return 2.0 ** (self.least - self.mantissa + 23)

    @property
    def magic_bits(self) -> int:
        return (127 + self.least - self.mantissa + 23) << 23


FLOAT8 = {"fp8": Float8(3, -6, 0x7E), "fp8_e5m2": Float8(2, -14, 0x7B)}
LEAST = 1e-30


def scaled(type: KVType) -> bool:
    """Whether codes and scales are kept."""
    return type in TOP


def stored(x: Array, type: KVType) -> Array:
    """`[.., n_kv, head_dim]` float32 as it comes back from the cache, float32."""
    x = np.asarray(x, np.float32)
    if type == "auto":
        return x
    if type == "float16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float32)
    if type == "bfloat16":
        bits = x.view(np.uint32)
        rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) & 0xFFFF0000).view(np.float32)
        out: Array = np.where(np.isnan(x), x, rounded)
        return out
    with np.errstate(all="ignore"):
        most = np.abs(x).max(-1, keepdims=True)
        top = np.float32(TOP[type])
        y = x * np.where(most > LEAST, top / most, np.float32(0) * most)
        code = np.rint(y) if type == "int8" else _float8(y, type)
        value: Array = (code * (most * np.float32(1 / top))).astype(np.float32)
        return np.where(np.isfinite(most), value, np.float32(np.nan))


def _float8(y: Array, type: KVType) -> Array:
    """The nearest value of an 8-bit float, ties to even."""
    mantissa, least, _ = FLOAT8[type]
    exponent = np.maximum(np.frexp(y)[1] - 1, least)
    step = np.ldexp(np.float32(1), exponent - mantissa)
    value: Array = np.clip(np.rint(y / step) * step, -TOP[type], TOP[type])
    return value


def step_of(values: Array, type: KVType) -> Array:
    """How far apart neighbouring values of the cache are at each of `values`: what another rounding may differ by."""
    if not scaled(type):
        return np.zeros_like(values)
    unit = np.abs(values).max(-1, keepdims=True) / np.float32(TOP[type])
    if type == "int8":
        return np.broadcast_to(unit, values.shape)
    with np.errstate(all="ignore"):
        # In units of the codes: an eighth or a quarter of the power of two at or below one; subnormal ones are all as far
        # apart.
        mantissa, least, _ = FLOAT8[type]
        code = np.fmax(np.abs(values) / unit * np.float32(1 + 1e-6), np.float32(2.0**least))
        step: Array = np.ldexp(unit, np.frexp(code)[1] - 1 - mantissa)
    return step


def head_bytes(type: KVType, head_dim: int, own: int) -> int:
    """Bytes of one head's keys of one token; `own` are the bytes of a value of the backend's own type."""
    width = {"auto": own, "float16": 2, "bfloat16": 2}.get(type)
    return head_dim * width if width is not None else head_dim + 4


def encode(x: Array, type: KVType) -> tuple[Array, Array]:
    """Codes `[.., head_dim]` uint8 and scales `[..]` float32 of a type with scales."""
    x = np.asarray(x, np.float32)
    with np.errstate(all="ignore"):
        most = np.abs(x).max(-1, keepdims=True)
        top = np.float32(TOP[type])
        y = np.nan_to_num(x * np.where(most > LEAST, top / most, np.float32(0)))
        scale = np.where(np.isfinite(most), most * np.float32(1 / top), np.float32(np.nan))[..., 0]
    if type == "int8":
        return np.rint(y).astype(np.int8).view(np.uint8), scale
    value = _float8(y, type)
    if type == "fp8_e5m2":
        return (value.astype(np.float16).view(np.uint16) >> 8).astype(np.uint8), scale
    # A value of E4M3 over 256 is one of float16, with its bits seven places further up.
    bits = (value / 256).astype(np.float16).view(np.uint16)
    return ((bits >> 7 & 0x7F) | (bits >> 8 & 0x80)).astype(np.uint8), scale


def decode(codes: Array, scale: Array, type: KVType) -> Array:
    """The values of `encode`'s codes, float32."""
    if type == "int8":
        values = codes.view(np.int8).astype(np.float32)
    elif type == "fp8_e5m2":
        values = (codes.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    else:
        wide = codes.astype(np.uint16)
        values = ((wide & 0x7F) << 7 | (wide & 0x80) << 8).view(np.float16).astype(np.float32) * 256
    out: Array = values * scale[..., None]
    return out
