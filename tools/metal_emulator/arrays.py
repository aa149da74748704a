"""Arrays on their way into a kernel and out of it: numpy's, MLX's, and bfloat16, which numpy does not have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quarrel.errors import RequestError


class BFloat16:
    """The type of BFloat16Array, for template arguments and output_dtypes without MLX."""

    def __repr__(self) -> str:
        return "bfloat16"


bfloat16 = BFloat16()


@dataclass(frozen=True)
class BFloat16Array:
    """bfloat16 numbers as their upper halves of float32: `bits` is uint16 of any shape."""

    bits: npt.NDArray[np.uint16]

    @classmethod
    def of(cls, values: npt.ArrayLike) -> BFloat16Array:
        """Rounds to nearest even; a NaN stays one."""
        wide = np.asarray(values, np.float32).view(np.uint32)
        rounded = (wide + 0x7FFF + (wide >> 16 & 1)) >> 16
        return cls(np.where((wide & 0x7FFFFFFF) > 0x7F800000, wide >> 16 | 0x40, rounded).astype(np.uint16))

    def float32(self) -> npt.NDArray[np.float32]:
        return (self.bits.astype(np.uint32) << 16).view(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.bits.shape


_METAL_NAMES = {
    "bool": "bool",
    "uint8": "uint8_t",
    "uint16": "uint16_t",
    "uint32": "uint32_t",
    "uint64": "uint64_t",
    "int8": "int8_t",
    "int16": "int16_t",
    "int32": "int32_t",
    "int64": "int64_t",
    "float16": "float16_t",
    "bfloat16": "bfloat16_t",
    "float32": "float",
}


def metal_name(dtype: Any) -> str:
    """What MLX calls a dtype in Metal text; takes numpy's, MLX's and bfloat16."""
    if isinstance(dtype, BFloat16):
        return "bfloat16_t"
    name = str(dtype).removeprefix("mlx.core.") if is_mlx(dtype) else np.dtype(dtype).name
    if name not in _METAL_NAMES:
        raise RequestError(f"a Metal kernel has no type for {name}; use one of {', '.join(_METAL_NAMES)}")
    return _METAL_NAMES[name]


def is_mlx(value: object) -> bool:
    return type(value).__module__.startswith("mlx.")


# What MLX makes of Python's own numbers.
_SCALAR_DTYPES: dict[type, type[np.generic]] = {bool: np.bool_, int: np.int32, float: np.float32}


@dataclass(frozen=True)
class KernelArray:
    """An input as the kernel sees it: its memory, and what the signature says of it."""

    data: npt.NDArray[Any]
    metal_type: str
    from_mlx: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def element_strides(self) -> tuple[int, ...]:
        return tuple(s // self.data.itemsize for s in self.data.strides)

    @property
    def address(self) -> int:
        return int(self.data.ctypes.data)

    @property
    def memory_bytes(self) -> int:
        """From the first element to the end of the last, gaps of a strided array included."""
        if self.data.size == 0:
            return 0
        if any(s < 0 for s in self.data.strides):
            raise RequestError("an input runs backwards through memory; make it contiguous before the call")
        span = sum((n - 1) * s for n, s in zip(self.data.shape, self.data.strides))
        return int(span + self.data.itemsize)


def kernel_array(value: Any, row_contiguous: bool) -> KernelArray:
    """An input argument: numpy array or scalar, BFloat16Array, or MLX array."""
    if isinstance(value, BFloat16Array):
        data, metal_type, mlx = value.bits, "bfloat16_t", False
    elif is_mlx(value):
        data, metal_type, mlx = _from_mlx(value), metal_name(value.dtype), True
    else:
        data = np.asarray(value, _SCALAR_DTYPES.get(type(value)))
        metal_type, mlx = metal_name(data.dtype), False
    # ascontiguousarray would make a scalar one-dimensional.
    if row_contiguous and not data.flags.c_contiguous:
        data = np.ascontiguousarray(data)
    return KernelArray(data, metal_type, mlx)


def _from_mlx(value: Any) -> npt.NDArray[Any]:
    import mlx.core as mx

    try:
        mx.eval(value)
    except ValueError as error:
        raise RequestError(
            "an emulated Metal kernel was called while MLX traces a function, but it needs the values of its inputs; "
            "keep the call outside mx.compile and mx.vmap, or switch mx.compile off (install() does)"
        ) from error
    return np.asarray(value.view(mx.uint16) if value.dtype == mx.bfloat16 else value)


def empty_output(shape: Sequence[int], dtype: Any, init_value: float | None) -> npt.NDArray[Any]:
    """Filled with `init_value`, or with ones in every bit: a NaN in every float format."""
    name = metal_name(dtype)
    carrier = {"float": "float32", "float16_t": "float16", "bfloat16_t": "uint16", "bool": "bool"}.get(name)
    out = np.empty(tuple(shape), carrier or name.removesuffix("_t"))
    if init_value is None:
        out.reshape(-1).view(np.uint8)[...] = 0xFF
    else:
        out[...] = BFloat16Array.of(init_value).bits if name == "bfloat16_t" else init_value
    return out


def to_caller(out: npt.NDArray[Any], dtype: Any, mlx: bool) -> Any:
    """An output in the caller's kind: MLX if any input was, BFloat16Array for bfloat16, else numpy."""
    bf16 = metal_name(dtype) == "bfloat16_t"
    if not mlx:
        return BFloat16Array(out) if bf16 else out
    import mlx.core as mx

    result = mx.array(out)
    return result.view(mx.bfloat16) if bf16 else result
