"""Headers byte by byte, for files that no writer would write."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from quarrel.gguf import GGMLType, ValueType


def u32(number: int) -> bytes:
    return struct.pack("<I", number)


def u64(number: int) -> bytes:
    return struct.pack("<Q", number)


def text(value: str | bytes, length: int | None = None) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return u64(len(data) if length is None else length) + data


def key(name: str | bytes, kind: int, payload: bytes) -> bytes:
    return text(name) + u32(kind) + payload


def array(name: str, element: int, count: int, payload: bytes) -> bytes:
    return key(name, ValueType.ARRAY, u32(element) + u64(count) + payload)


def tensor(
    name: str | bytes, dims: Sequence[int], kind: int = GGMLType.F32, offset: int = 0, n_dims: int | None = None
) -> bytes:
    n = len(dims) if n_dims is None else n_dims
    return text(name) + u32(n) + b"".join(map(u64, dims)) + u32(kind) + u64(offset)


def file(
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_tensors: int | None = None,
    n_keys: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A file of these parts, its counts right unless they are given, its data aligned."""
    header = magic + u32(version) + u64(len(tensors) if n_tensors is None else n_tensors)
    header += u64(len(keys) if n_keys is None else n_keys) + b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + data
