"""What the cache keeps of keys and values.

    auto               the backend's own: its compute type, or float16
    float16, bfloat16  each value rounded to nearest
    int8, fp8          a code a value and a float32 scale for each token and head:  value = code * amax / top

    amax = max |x| over the head's values,  code = round(x * (top / amax)),  all in float32, ties to even
    int8: whole numbers, top = 127.  fp8: E4M3 (4 bits of exponent, 3 of mantissa), top = 448, its largest

A scale for a token and head, and not for each block of 32 values, because it leaves the products alone: it multiplies a
score, or a weight of the softmax, once, where smaller blocks would multiply every value. It costs 4 bytes a head: 8.25 bits
a value with 128 values to a head. Rows whose amax is below 1e-30 are zeros; one that holds a NaN or an infinity is all NaN.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
KVType = Literal["auto", "float16", "bfloat16", "int8", "fp8"]
KV_TYPES: tuple[KVType, ...] = ("auto", "float16", "bfloat16", "int8", "fp8")
TOP = {"int8": 127.0, "fp8": 448.0}
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
        code = np.rint(y) if type == "int8" else _e4m3(y)
        value: Array = (code * (most * np.float32(1 / top))).astype(np.float32)
        return np.where(np.isfinite(most), value, np.float32(np.nan))


def _e4m3(y: Array) -> Array:
    """The nearest value of E4M3, ties to even."""
    exponent = np.maximum(np.frexp(y)[1] - 1, -6)
    step = np.ldexp(np.float32(1), exponent - 3)
    value: Array = np.clip(np.rint(y / step) * step, -448, 448)
    return value


def step_of(values: Array, type: KVType) -> Array:
    """How far apart neighbouring values of the cache are at each of `values`: what another rounding may differ by."""
    if not scaled(type):
        return np.zeros_like(values)
    unit = np.abs(values).max(-1, keepdims=True) / np.float32(TOP[type])
    if type == "int8":
        return np.broadcast_to(unit, values.shape)
    with np.errstate(all="ignore"):
        # In units of the codes: an eighth of the power of two at or below one; subnormal ones are all as far apart.
        code = np.fmax(np.abs(values) / unit * np.float32(1 + 1e-6), np.float32(2**-6))
        step: Array = np.ldexp(unit, np.frexp(code)[1] - 4)
    return step


def head_bytes(type: KVType, head_dim: int, own: int) -> int:
    """Bytes of one head's keys of one token; `own` are the bytes of a value of the backend's own type."""
    width = {"auto": own, "float16": 2, "bfloat16": 2}.get(type)
    return head_dim * width if width is not None else head_dim + 4


def encode(x: Array, type: KVType) -> tuple[Array, Array]:
    """Codes `[.., head_dim]` uint8 and scales `[..]` float32 of `int8` and `fp8`."""
    x = np.asarray(x, np.float32)
    with np.errstate(all="ignore"):
        most = np.abs(x).max(-1, keepdims=True)
        top = np.float32(TOP[type])
        y = np.nan_to_num(x * np.where(most > LEAST, top / most, np.float32(0)))
        scale = np.where(np.isfinite(most), most * np.float32(1 / top), np.float32(np.nan))[..., 0]
    if type == "int8":
        return np.rint(y).astype(np.int8).view(np.uint8), scale
    # A value of E4M3 over 256 is one of float16, with its bits seven places further up.
    bits = (_e4m3(y) / 256).astype(np.float16).view(np.uint16)
    return ((bits >> 7 & 0x7F) | (bits >> 8 & 0x80)).astype(np.uint8), scale


def decode(codes: Array, scale: Array, type: KVType) -> Array:
    """The values of `encode`'s codes, float32."""
    if type == "int8":
        values = codes.view(np.int8).astype(np.float32)
    else:
        wide = codes.astype(np.uint16)
        values = ((wide & 0x7F) << 7 | (wide & 0x80) << 8).view(np.float16).astype(np.float32) * 256
    out: Array = values * scale[..., None]
    return out
