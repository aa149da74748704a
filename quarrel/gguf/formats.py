"""The ggml tensor types, the size of their blocks, and the one formula that turns dimensions into bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType

from gguf.constants import GGML_QUANT_SIZES, LlamaFileType

from quarrel.errors import GGUFError

MAX_DIMS = 4
# 2^48 elements of the widest type are 2^51 bytes: far above any file, far below the 2^63 of a kernel's index.
MAX_ELEMENTS = 1 << 48


class GGMLType(IntEnum):
    """Every tensor type of the current `enum ggml_type`, by its number in the file."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41
    Q2_0 = 42


# Numbers that ggml gave to layouts it no longer reads; a file holding one has to be made again.
REMOVED_TYPES: Mapping[int, str] = MappingProxyType(
    {
        4: "Q4_2",
        5: "Q4_3",
        31: "Q4_0_4_4",
        32: "Q4_0_4_8",
        33: "Q4_0_8_8",
        36: "IQ4_NL_4_4",
        37: "IQ4_NL_4_8",
        38: "IQ4_NL_8_8",
    }
)


@dataclass(frozen=True)
class BlockFormat:
    """The smallest unit of a type: so many elements in so many bytes."""

    type: GGMLType
    elements: int
    nbytes: int

    @property
    def bits_per_weight(self) -> float:
        return self.nbytes * 8 / self.elements


def _formats() -> dict[GGMLType, BlockFormat]:
    # What the gguf package lacks in some supported version, and Q8_1, whose two float16 it counts as floats.
    own = {
        GGMLType.Q8_1: (32, 36),
        GGMLType.NVFP4: (64, 36),
        GGMLType.Q1_0: (128, 18),
        GGMLType.Q2_0: (64, 18),
    }
    known = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
    return {kind: BlockFormat(kind, *(own.get(kind) or known[kind])) for kind in GGMLType}


FORMATS: Mapping[GGMLType, BlockFormat] = MappingProxyType(_formats())


def ggml_type(number: int) -> GGMLType:
    """The type with this number; GGUFError for one that is unknown or that ggml has removed."""
    try:
        return GGMLType(number)
    except ValueError:
        pass
    if number in REMOVED_TYPES:
        raise GGUFError(
            f"tensor type {number} ({REMOVED_TYPES[number]}) was removed from ggml:"
            " quantise the model again with a current llama.cpp"
        )
    raise GGUFError(f"tensor type {number} is unknown, wanted a type up to {max(GGMLType)} ({max(GGMLType).name})")


def nbytes(ggml_type: GGMLType, dims: Sequence[int]) -> int:
    """Bytes of a tensor with `dims` in GGUF order (fastest first). Python integers throughout: nothing can wrap.

    Raises GGUFError unless there are 1 to 4 dims, each at least 1, at most 2^48 elements, and whole blocks in a row.
    """
    if not 1 <= len(dims) <= MAX_DIMS:
        raise GGUFError(f"a tensor has {len(dims)} dimensions, wanted 1 to {MAX_DIMS}")
    elements = 1
    for dim in dims:
        if dim < 1:
            raise GGUFError(f"a tensor dimension is {dim}, wanted at least 1")
        elements *= dim
    if elements > MAX_ELEMENTS:
        raise GGUFError(f"a tensor of dimensions {list(dims)} has {elements} elements, more than the limit of 2^48")
    block = FORMATS[ggml_type]
    if dims[0] % block.elements:
        raise GGUFError(
            f"a {ggml_type.name} row has {dims[0]} elements, wanted a multiple of its block of {block.elements}"
        )
    return elements // block.elements * block.nbytes


def file_type(number: object) -> str | None:
    """What files with this `general.file_type` are called, such as Q4_K_M; None for a number that means nothing."""
    try:
        name: str = LlamaFileType(number).name
    except ValueError:
        return None
    return name.removeprefix("MOSTLY_").removeprefix("ALL_")
