"""The ggml tensor types, the size of their blocks, and the one formula that turns dimensions into bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType

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
    """In a file activations; here weights of folders with affine codes of 8 bits: as Q4_1, with a byte a code."""
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


_BYTES: Mapping[int, str] = MappingProxyType(
    {
        1: "F32 4 F16 2 I8 1 I16 2 I32 4 I64 8 F64 8 BF16 2",
        32: "Q4_0 18 Q4_1 20 Q5_0 22 Q5_1 24 Q8_0 34 Q8_1 36 IQ4_NL 18 MXFP4 17",
        256: "Q2_K 84 Q3_K 110 Q4_K 144 Q5_K 176 Q6_K 210 Q8_K 292 IQ2_XXS 66 IQ2_XS 74 IQ3_XXS 98 "
        "IQ1_S 50 IQ3_S 110 IQ2_S 82 IQ4_XS 136 IQ1_M 56 TQ1_0 54 TQ2_0 66",
        64: "NVFP4 36 Q2_0 18",
        128: "Q1_0 18",
    }
)
"""Types and the bytes of their blocks, by the elements of a block. As in the gguf package, which takes long to import and
lacks some; Q8_1's two float16 it counts as floats."""


def _formats() -> dict[GGMLType, BlockFormat]:
    found: dict[GGMLType, tuple[int, int]] = {}
    for elements, row in _BYTES.items():
        words = row.split()
        found |= {GGMLType[name]: (elements, int(size)) for name, size in zip(words[::2], words[1::2], strict=True)}
    return {kind: BlockFormat(kind, *found[kind]) for kind in GGMLType}


FORMATS: Mapping[GGMLType, BlockFormat] = MappingProxyType(_formats())


def ggml_type(number: int) -> GGMLType:
    """The type with this number in a file; GGUFError for one that is unknown, removed from ggml, or of activations."""
    if number == GGMLType.Q8_1:
        raise GGUFError("tensor type 9 (Q8_1) is a format of activations, which no model file stores: convert it again")
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
    from gguf.constants import LlamaFileType  # only here, for it takes long

    try:
        name: str = LlamaFileType(number).name
    except ValueError:
        return None
    return name.removeprefix("MOSTLY_").removeprefix("ALL_")
