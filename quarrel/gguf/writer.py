"""Writes GGUF files: for tests, for the tools, and for exporting. Tensor data may be made one piece at a time."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from quarrel.errors import GGUFError
from quarrel.gguf.formats import FORMATS, GGMLType, nbytes
from quarrel.gguf.header import DEFAULT_ALIGNMENT, MAGIC, VERSIONS
from quarrel.gguf.quantize import quantize
from quarrel.gguf.values import CODES, Value, ValueType

Pieces = np.ndarray | Iterable[np.ndarray]


@dataclass(frozen=True)
class _Tensor:
    name: str
    type: GGMLType
    dims: tuple[int, ...]
    make: Callable[[], Pieces]


class GGUFWriter:
    """Collects keys and tensors, then writes them in the order they were added.

    A tensor given as a callable is made when its turn comes and dropped again, so a file may be far larger than memory.
    """

    def __init__(self, *, version: int = VERSIONS[-1], alignment: int = DEFAULT_ALIGNMENT) -> None:
        self.version = version
        self.alignment = alignment
        self._keys: dict[str, bytes] = {}
        self._tensors: dict[str, _Tensor] = {}
        if alignment != DEFAULT_ALIGNMENT:
            self.add("general.alignment", alignment)

    def add(self, key: str, value: Value | Sequence[Any] | np.ndarray | np.generic, kind: ValueType | None = None) -> None:
        """Adds a key; `kind` is the type of the value, or of an array's elements, and inferred where it is None.

        Inferred: integers become UINT32 (INT32 within arrays, as llama.cpp reads them) or the first of INT32, UINT64 and
        INT64 that holds them; floats become FLOAT32. An empty array needs `kind`.
        """
        if key in self._keys:
            raise GGUFError(f"the key {key!r} was added before")
        if isinstance(value, np.ndarray | np.generic):
            value = value.tolist()
        if isinstance(value, bool | int | float | str):
            kind = _infer([value], ValueType.UINT32) if kind is None else kind
            self._keys[key] = struct.pack("<I", kind) + _encode(kind, [value])
            return
        if not isinstance(value, Sequence):
            raise GGUFError(f"the key {key!r} got {value!r}, which is neither a value nor an array of them")
        items = list(value)
        if kind is None:
            if not items:
                raise GGUFError(f"the array {key!r} is empty, so the kind of its elements must be given")
            kind = _infer(items, ValueType.INT32)
        self._keys[key] = struct.pack("<IIQ", ValueType.ARRAY, kind, len(items)) + _encode(kind, items)

    def add_tensor(
        self,
        name: str,
        data: np.ndarray | Callable[[], Pieces],
        ggml_type: GGMLType | None = None,
        shape: Sequence[int] | None = None,
    ) -> None:
        """Adds a tensor: float data [..., k], quantised to `ggml_type` (F32 if None); or uint8 data, its raw blocks
        [..., row_bytes]; or a callable that returns raw blocks, whole or in consecutive pieces, which needs `shape`
        [..., k]."""
        if name in self._tensors:
            raise GGUFError(f"the tensor {name!r} was added before")
        if isinstance(data, np.ndarray):
            raw = data
            if data.dtype != np.uint8:
                ggml_type = GGMLType.F32 if ggml_type is None else ggml_type
                raw = quantize(data, ggml_type)
            if ggml_type is None:
                raise GGUFError(f"the raw tensor {name!r} was added without a type")
            block = FORMATS[ggml_type]
            shape = (*raw.shape[:-1], raw.shape[-1] // block.nbytes * block.elements)
            make: Callable[[], Pieces] = lambda: raw  # noqa: E731 (a def here would need a name that says nothing)
        else:
            if ggml_type is None or shape is None:
                raise GGUFError(f"the tensor {name!r} is made later, so its type and shape must be given now")
            make = data
        dims = tuple(int(n) for n in reversed(shape))
        nbytes(ggml_type, dims)  # refuses impossible shapes here, where the mistake is
        self._tensors[name] = _Tensor(name, ggml_type, dims, make)

    def write(self, target: str | os.PathLike[str] | BinaryIO) -> int:
        """Writes the file and returns its size. A path appears only when its file is complete."""
        if not isinstance(target, str | os.PathLike):
            return self._write(target)
        path = Path(target)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            with part.open("wb") as stream:
                size = self._write(stream)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        return size

    def layout(self) -> tuple[bytes, dict[str, int]]:
        """The bytes before the data, and where in the file each tensor begins: for writers that fill it in parallel."""
        header = self._header()
        at, starts = len(header), {}
        for tensor in self._tensors.values():
            at += -at % self.alignment
            starts[tensor.name] = at
            at += nbytes(tensor.type, tensor.dims)
        return header, starts

    def _write(self, stream: BinaryIO) -> int:
        header = self._header()
        stream.write(header)
        at = len(header)
        for tensor in self._tensors.values():
            at += stream.write(bytes(-at % self.alignment))
            wanted = nbytes(tensor.type, tensor.dims)
            written = 0
            made = tensor.make()
            for piece in (made,) if isinstance(made, np.ndarray) else made:
                if piece.dtype != np.uint8:
                    raise GGUFError(f"the tensor {tensor.name!r} was made of {piece.dtype}, wanted raw uint8 blocks")
                written += stream.write(np.ascontiguousarray(piece).data)
            if written != wanted:
                raise GGUFError(f"the tensor {tensor.name!r} was made {written} bytes long, wanted {wanted}")
            at += written
        # ggml reads the last tensor's padding too, where it reads all data at once, as of an importance matrix.
        return at + stream.write(bytes(-at % self.alignment if self._tensors else 0))

    def _header(self) -> bytes:
        parts = [MAGIC, struct.pack("<IQQ", self.version, len(self._tensors), len(self._keys))]
        for key, value in self._keys.items():
            parts += [_string(key), value]
        offset = 0
        for tensor in self._tensors.values():
            offset += -offset % self.alignment
            n = len(tensor.dims)
            parts += [_string(tensor.name), struct.pack(f"<I{n}QIQ", n, *tensor.dims, tensor.type, offset)]
            offset += nbytes(tensor.type, tensor.dims)
        return b"".join(parts)


def _infer(items: Sequence[Any], first: ValueType) -> ValueType:
    if all(isinstance(item, bool) for item in items):
        return ValueType.BOOL
    if all(isinstance(item, str) for item in items):
        return ValueType.STRING
    if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        low, high = min(items), max(items)
        for kind in (first, ValueType.INT32, ValueType.UINT64, ValueType.INT64):
            bits = 32 if kind in (ValueType.UINT32, ValueType.INT32) else 64
            signed = kind in (ValueType.INT32, ValueType.INT64)
            if (-(1 << bits - 1) if signed else 0) <= low and high < 1 << (bits - 1 if signed else bits):
                return kind
        raise GGUFError(f"no 64-bit type holds all integers from {low} to {high}")
    if all(isinstance(item, int | float) and not isinstance(item, bool) for item in items):
        return ValueType.FLOAT32
    raise GGUFError("metadata values are booleans, integers, floats or strings, and arrays hold one kind of them")


def _encode(kind: ValueType, items: Sequence[Any]) -> bytes:
    if kind is ValueType.STRING:
        return b"".join(map(_string, items))
    try:
        return struct.pack(f"<{len(items)}{CODES[kind][1]}", *items)
    except struct.error as error:
        raise GGUFError(f"a value does not fit {kind.name}: {error}") from None


def _string(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data
