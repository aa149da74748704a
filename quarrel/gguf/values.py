"""GGUF metadata values: their type numbers, and texts and arrays that stay packed until somebody reads them."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType

import numpy as np

Scalar = bool | int | float | str
Value = Scalar | list[bool] | list[int] | list[float] | list[str]


class ValueType(IntEnum):
    """The type number in front of every metadata value."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


# Fixed-size values only. struct and numpy share these codes, and agree on their sizes behind a "<".
CODES: Mapping[ValueType, str] = MappingProxyType(
    {
        ValueType.UINT8: "<B",
        ValueType.INT8: "<b",
        ValueType.UINT16: "<H",
        ValueType.INT16: "<h",
        ValueType.UINT32: "<I",
        ValueType.INT32: "<i",
        ValueType.FLOAT32: "<f",
        ValueType.BOOL: "<?",
        ValueType.UINT64: "<Q",
        ValueType.INT64: "<q",
        ValueType.FLOAT64: "<d",
    }
)
SIZES: Mapping[ValueType, int] = MappingProxyType({kind: struct.calcsize(code) for kind, code in CODES.items()})

_u64 = struct.Struct("<Q")


@dataclass(frozen=True, repr=False)
class Packed:
    """A string or an array as it stands in the file, already checked: `count` is None for a single string."""

    element: ValueType
    count: int | None
    data: bytes

    def decode(self) -> Value:
        if self.count is None:
            return self.data.decode("utf-8", "replace")
        if self.element is ValueType.STRING:
            return self._strings(self.count)
        values: list[bool] | list[int] | list[float] = np.frombuffer(self.data, CODES[self.element]).tolist()
        return values

    def _strings(self, count: int) -> list[str]:
        # Vocabularies hold pieces that are not UTF-8: surrogateescape keeps their bytes, so that
        # text.encode("utf-8", "surrogateescape") gives the file's bytes back.
        data, unpack, at = self.data, _u64.unpack_from, 0
        pieces = []
        for _ in range(count):
            start = at + 8
            at = start + unpack(data, at)[0]
            pieces.append(data[start:at].decode("utf-8", "surrogateescape"))
        return pieces
