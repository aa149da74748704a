"""The block formats that kernels read as they are: a file each, and a line each here. Any other is dequantised at load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from quarrel.gguf import GGMLType
from quarrel.triton_backend.formats.floats import BF16, F16, F32
from quarrel.triton_backend.formats.iq4 import IQ4_NL, IQ4_XS
from quarrel.triton_backend.formats.layout import BlockFormat
from quarrel.triton_backend.formats.mxfp4 import MXFP4
from quarrel.triton_backend.formats.nvfp4 import NVFP4
from quarrel.triton_backend.formats.q2_k import Q2_K
from quarrel.triton_backend.formats.q3_k import Q3_K
from quarrel.triton_backend.formats.q4_0 import Q4_0, Q5_0
from quarrel.triton_backend.formats.q4_1 import Q4_1, Q5_1
from quarrel.triton_backend.formats.q4_k import Q4_K, Q5_K
from quarrel.triton_backend.formats.q6_k import Q6_K
from quarrel.triton_backend.formats.q8_0 import Q8_0
from quarrel.triton_backend.formats.q8_1 import Q8_1
from quarrel.triton_backend.formats.tq2_0 import TQ2_0
from quarrel.triton_backend.runtime.arrays import Packed, Planes

NATIVE: Mapping[GGMLType, BlockFormat] = {
    f.type: f
    for f in (
        F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q8_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4,
        NVFP4, TQ2_0,
    )
}  # fmt: skip


class _ByName:
    """The formats, by the names that kernels are given."""

    def __init__(self, formats: Mapping[GGMLType, BlockFormat]) -> None:
        self.formats = {f.type.name: f for f in formats.values()}

    def __deepcopy__(self, memo: Any) -> _ByName:
        """Triton copies the globals of a kernel, to notice a change."""
        return self

    def __repr__(self) -> str:
        """Enters the key of every kernel that decodes weights."""
        return repr(list(self.formats.values()))


_BY_NAME: tl.constexpr = tl.constexpr(_ByName(NATIVE))


@triton.constexpr_function
def format_of(name):  # type: ignore[no-untyped-def]
    """The format, in a kernel: `format_of(FORMAT).decode(...)` calls its function, chosen as the kernel is compiled."""
    return _BY_NAME.value.formats[name]


@triton.constexpr_function
def word_columns(name):  # type: ignore[no-untyped-def]
    """Columns to a word of codes that a matvec reads, in a kernel."""
    return _BY_NAME.value.formats[name].dots.word


@triton.constexpr_function
def entry_columns(name):  # type: ignore[no-untyped-def]
    """Columns to an entry of the plane of codes as a matvec reads it, in a kernel."""
    dots = _BY_NAME.value.formats[name].dots
    return dots.entry or dots.word


@triton.constexpr_function
def is_contiguous(name):  # type: ignore[no-untyped-def]
    """See `Float16.contiguous`, in a kernel."""
    return _BY_NAME.value.formats[name].float16.contiguous


@triton.constexpr_function
def upper_bits(name):  # type: ignore[no-untyped-def]
    """Upper bits of a code, in a kernel: words of them to a block of 32."""
    bits = _BY_NAME.value.formats[name].bits
    return 0 if bits is None else bits.count


@triton.constexpr_function
def tops(name):  # type: ignore[no-untyped-def]
    """Entries of the plane of tops for 256 columns, in a kernel."""
    top = _BY_NAME.value.formats[name].top
    return 0 if top is None else top.count


@triton.constexpr_function
def byte_scales(name):  # type: ignore[no-untyped-def]
    """Whether a block's scales are one byte, in a kernel; else they are two."""
    scale = _BY_NAME.value.formats[name].scale
    return scale.count * scale.dtype.itemsize == 1


def by_name(name: str) -> BlockFormat:
    """The format that a packed weight says it has."""
    return NATIVE[GGMLType[name]]


FLOATS = tuple(f.type.name for f in NATIVE.values() if f.dots is not None and f.dots.word == 1)
"""Formats of which a matvec reads float activations."""
INTEGERS = tuple(f.type.name for f in NATIVE.values() if f.dots is not None and f.dots.word > 1)
"""Formats of which a matvec reads int8x2 activations."""
FRAGMENTS = tuple(f.type.name for f in NATIVE.values() if f.fragments is not None)
"""Formats that tensor cores read from registers."""
RING = tuple(f.type.name for f in NATIVE.values() if f.ring is not None)
"""Formats that are decoded from tiles in shared memory."""


def matvec_planes(weight: Packed) -> Planes:
    """The planes of a weight in the words that a matvec loads."""
    dots = by_name(weight.format).dots
    assert dots is not None, weight.format
    views = [p if t is None else p.view(t) for p, t in zip(weight.planes, dots.views, strict=True)]
    # An absent plane is the first one again.
    return Planes(*(views[0] if p is weight.planes.codes else v for p, v in zip(weight.planes, views, strict=True)))


def has_matvec(type: GGMLType, k: int) -> bool:
    """Whether one row has a matvec with a weight of this format and row length."""
    return type.name in FLOATS or (type.name in INTEGERS and k % 32 == 0)
