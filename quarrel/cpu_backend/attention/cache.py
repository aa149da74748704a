"""The paged cache: arrays of one layer as they lie in memory, and a head's values as kernels load and store them.

A block of one head is one stretch of memory, which attention reads in order, `width` being head_dim values, or the bytes of
codes and of their float32 scale (`ops/kv.py`):

    keys    [C, n_kv, width, block_size]    sixteen keys' values in a dimension are a vector: scores transpose nothing
    values  [C, n_kv, block_size, width]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import F32, I8, I16, I32, Kernel, Val, vec
from quarrel.cpu_backend.runtime.vector import (
    F32x16,
    bf16_to_f32,
    f16_to_f32,
    f32_to_bf16,
    f32_to_f16,
    max_lanes,
    nearest,
    sum_lanes,
)
from quarrel.ops.contract import Array, KVArrays
from quarrel.ops.kv import FLOAT8, LEAST, TOP, KVType, decode, encode, scaled, stored
from quarrel.ops.program import KVLayer

Kind = Literal["float32", "float16", "bfloat16", "int8", "fp8", "fp8_e5m2"]
_WIDTH = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "fp8": 1, "fp8_e5m2": 1}
DECODED = {"int8": 1.0, "fp8": 256.0, "fp8_e5m2": 1.0}
"""What codes are multiplied by, beside their scale, as `decoded` gives them."""
LINE = 64
N = TypeVar("N", int, Val)


@dataclass(frozen=True)
class Cache:
    """Key and value arrays of one layer, views `[C, block_size, n_kv, width]` of what the module says."""

    k: np.ndarray
    v: np.ndarray
    kind: Kind

    @property
    def block_size(self) -> int:
        return int(self.k.shape[1])


def kind_of(type: KVType, exact: bool) -> Kind:
    """How a cache of this type stores values; `auto` follows the arithmetic."""
    return ("float32" if exact else "float16") if type == "auto" else type


def head_bytes(kind: Kind, dim: N) -> N:
    """From one head's values to the next head's."""
    return dim * _WIDTH[kind] + (4 if kind in TOP else 0)


def value_bytes(kind: Kind) -> int:
    return _WIDTH[kind]


def block_place(block: Val, head: Val, n_kv: int | Val, block_size: int | Val, each: int | Val) -> Val:
    """How many bytes from its start a layer's keys or values have a block of a head; a token's have `each` bytes."""
    return (block * n_kv + head) * (block_size * each)


def new_cache(layer: KVLayer, blocks: int, block_size: int, kind: Kind, values: KVArrays | None = None) -> Cache:
    """Zeroed (so that memory is only taken when written), or filled."""
    assert block_size % 16 == 0, f"blocks of {block_size} tokens"
    type = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}.get(kind, np.uint8)
    k_width, v_width = (head_bytes(kind, dim) // np.dtype(type).itemsize for dim in (layer.head_dim, layer.value_dim))
    k = _zeros((blocks, layer.n_kv, k_width, block_size), type).transpose(0, 3, 1, 2)
    v = _zeros((blocks, layer.n_kv, block_size, v_width), type).transpose(0, 2, 1, 3)
    for out, x in ((k, values.k), (v, values.v)) if values else ():
        dim = x.shape[-1]
        if kind in TOP:
            out[..., :dim], scale = encode(x, kind)  # type: ignore[arg-type]
            out[..., dim:] = scale[..., None].view(np.uint8)
        else:
            with np.errstate(over="ignore"):
                out[...] = stored(x, "bfloat16").view(np.uint32) >> 16 if kind == "bfloat16" else x
    return Cache(k, v, kind)


def _zeros(shape: tuple[int, ...], type: Any) -> np.ndarray:
    """From the start of a cache line on: large arrays of NumPy begin 16 bytes behind one, and heads of 64 and 128 values
    would touch a line more than they have."""
    size = math.prod(shape) * np.dtype(type).itemsize
    memory = np.zeros(size + LINE, np.uint8)
    skipped = -memory.ctypes.data % LINE
    return memory[skipped : skipped + size].view(type).reshape(shape)


def to_host(cache: Cache, type: KVType) -> KVArrays:
    """float32 values."""

    def values(x: np.ndarray) -> Array:
        if scaled(type):
            dim = x.shape[-1] - 4
            scale = np.ascontiguousarray(x[..., dim:]).view(np.float32)[..., 0]
            return decode(np.ascontiguousarray(x[..., :dim]), scale, type)
        return (x.astype(np.uint32) << 16).view(np.float32) if cache.kind == "bfloat16" else x.astype(np.float32)

    return KVArrays(values(cache.k), values(cache.v), type)


def load(k: Kernel, level: Level, kind: Kind, at: Val, dim: int, d: int, lanes: int = 16, scaled: bool = True) -> Val:
    """Values d .. d + lanes - 1 of the head at `at`, as float32; if not `scaled`, codes lack their scale."""
    values = decoded(k, level, kind, k.load(at, vec(raw_type(kind), lanes), _WIDTH[kind] * d))
    if kind not in TOP or not scaled:
        return values
    scale = head_scale(k, kind, at, dim)
    return values * (k.splat(scale, lanes) if lanes > 1 else scale)


def raw_type(kind: Kind) -> Any:
    """A value as it is stored."""
    return F32 if kind == "float32" else I16 if kind in ("float16", "bfloat16") else I8


def decoded(k: Kernel, level: Level, kind: Kind, raw: Val) -> Val:
    """What is stored as float32; codes still lack their head's scale."""
    if kind == "float32":
        return raw
    if kind == "bfloat16":
        return bf16_to_f32(raw)
    if kind == "int8":
        return raw.to(I32).to(F32)
    if kind == "fp8_e5m2":
        raw = raw.to(I16, unsigned=True) << 8
    elif kind == "fp8":
        raw = raw.to(I16) << 7 & 0xBF80
    return f16_to_f32(k, level, raw)


def head_scale(k: Kernel, kind: Kind, at: Val, dim: int) -> Val:
    """What codes of the head at `at`, as `decoded` gives them, are multiplied by."""
    return k.load(at, F32, dim) * DECODED[kind]


Put = Callable[[Val, Val], None]
"""Stores a vector or one of a head's values, as its cache has them, from a dimension on."""


def rounded(k: Kernel, level: Level, kind: Kind, x: Val) -> Val:
    """float32 values as a cache without codes has them, to nearest even."""
    if kind == "float32":
        return x
    if kind == "float16":
        return f32_to_f16(k, level, x)
    return f32_to_bf16(k, x)


def store_codes(k: Kernel, kind: Kind, x: Val, dim: Val, put: Put) -> None:
    """A head of `dim` float32 values at x as codes and, behind them, their scale."""
    whole = dim & -16
    wide, one = k.var(k.zero(F32x16)), k.var(k.f32(0.0))
    bad_wide, bad_one = k.var(k.zero(F32x16)), k.var(k.f32(0.0))
    with k.range(0, whole, 16) as i:
        v = k.load(x + (i << 2), F32x16)
        wide.v, bad_wide.v = k.maximum(k.fabs(v), wide.v), bad_wide.v + v * 0.0
    with k.range(whole, dim) as i:
        v = k.load(x + (i << 2), F32)
        one.v, bad_one.v = k.maximum(k.fabs(v), one.v), bad_one.v + v * 0.0
    top = TOP[kind]
    most = k.maximum(max_lanes(k, wide.v), one.v)
    inverse = k.select(most > LEAST, top / most, 0.0)
    # What is not finite makes the scale NaN, so it shows in every result.
    scale = most * (1.0 / top) + (sum_lanes(bad_wide.v) + bad_one.v)
    put(scale.bitcast(vec(I8, 4)), dim)
    with k.range(0, whole, 16) as i:
        put(_codes(k, kind, k.load(x + (i << 2), F32x16) * k.splat(inverse, 16)), i)
    with k.range(whole, dim) as i:
        put(_codes(k, kind, k.load(x + (i << 2), F32) * inverse), i)


def _codes(k: Kernel, kind: Kind, y: Val) -> Val:
    if kind == "int8":
        return nearest(y).to(I8)
    f = FLOAT8[kind]
    bits = y.bitcast(vec(I32, y.lanes))
    size = bits & 0x7FFFFFFF
    normal = ((size + (f.half + (size >> f.shift & 1))) >> f.shift) - f.bias
    # Adding so much lets the float unit round a subnormal code into the low bits.
    small = (size.bitcast(y.type) + f.magic).bitcast(bits.type) - f.magic_bits
    code = k.select(size < f.normal, small, normal)
    return (k.select(code > f.top, f.top, code) | (bits >> 24 & 0x80)).to(I8)
