"""Walks a GGUF header without trusting it: every count, length and offset is checked before anything is allocated.

The walk only finds where texts and arrays lie. So a file that is refused at its last byte has cost no more than the
pages it made us read, whatever sizes it claims.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from quarrel.errors import GGUFError
from quarrel.gguf.formats import MAX_DIMS, GGMLType, ggml_type, nbytes
from quarrel.gguf.values import CODES, SIZES, Packed, Scalar, ValueType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
ALIGNMENTS = (8, 1 << 16)

HEADER_BUDGET = 64 << 20
MAX_KEYS = 1 << 14
MAX_TENSORS = 1 << 16
MAX_KEY_BYTES = (1 << 16) - 1
MAX_NAME_BYTES = 127
# Of all string arrays of a file together: a vocabulary and its merges. The largest in use, Gemma's, has 0.8 million.
MAX_STRINGS = 2 << 20

_u32 = struct.Struct("<I")
_u64 = struct.Struct("<Q")
_TENSOR_FIELDS = {n: struct.Struct(f"<{n}QIQ") for n in range(1, MAX_DIMS + 1)}  # dimensions, type, offset


_PLACE = threading.Lock()


def read_at(descriptor: int, size: int, start: int) -> bytes:
    """Bytes of a file at a place; fewer where it ends before."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, size, start)
    with _PLACE:  # Windows: a descriptor has one place, which all threads move
        os.lseek(descriptor, start, os.SEEK_SET)
        return os.read(descriptor, size)


@dataclass(frozen=True)
class Span:
    """Where a string (count None) or an array lies in the file."""

    element: ValueType
    count: int | None
    start: int
    end: int

    def pack(self, descriptor: int) -> Packed:
        # Read, not copied from the mapping: those pages need not become resident a second time.
        data = read_at(descriptor, self.end - self.start, self.start)
        if len(data) != self.end - self.start:
            raise GGUFError("it was cut short while it was read")
        return Packed(self.element, self.count, data)


class TensorEntry(NamedTuple):
    """A tensor as the header states it; `offset` counts from the start of the data section."""

    name: str
    type: GGMLType
    dims: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    version: int
    alignment: int
    kinds: Mapping[str, ValueType]
    values: Mapping[str, Scalar | Span]
    tensors: tuple[TensorEntry, ...]  # by offset
    data_start: int


class _Walk:
    """A position in the header that cannot leave it."""

    def __init__(self, view: memoryview, file_size: int) -> None:
        self.view = view
        self.at = 0
        self.end = len(view)
        whole = self.end == file_size
        self.where = "the end of the file" if whole else f"the header limit of {HEADER_BUDGET >> 20} MiB"
        self.strings_left = MAX_STRINGS

    def take(self, size: int, what: str, key: str | None = None) -> int:
        """Steps over `size` bytes and returns where they start. `what`, of `key`, is for the refusal."""
        start = self.at
        if size > self.end - start:
            left = self.end - start
            of = "" if key is None else f" of {key!r}"
            raise GGUFError(f"{what}{of} at byte {start} needs {size} bytes, but {self.where} is {left} bytes away")
        self.at = start + size
        return start

    def u32(self, what: str, key: str | None = None) -> int:
        number: int = _u32.unpack_from(self.view, self.take(4, what, key))[0]
        return number

    def u64(self, what: str, key: str | None = None) -> int:
        number: int = _u64.unpack_from(self.view, self.take(8, what, key))[0]
        return number

    def name(self, what: str, longest: int) -> str:
        size = self.u64(f"the length of {what}")
        if not 1 <= size <= longest:
            raise GGUFError(f"{what} at byte {self.at} is {size} bytes long, wanted 1 to {longest}")
        start = self.take(size, what)
        try:
            return str(self.view[start : self.at], "utf-8")
        except UnicodeDecodeError as error:
            raise GGUFError(f"{what} at byte {start} is not UTF-8 ({error.reason})") from None

    def value_type(self, what: str, key: str) -> ValueType:
        number = self.u32(f"the {what} type", key)
        try:
            return ValueType(number)
        except ValueError:
            raise GGUFError(f"{key!r} has {what} type {number}, wanted 0 to {max(ValueType)}") from None

    def value(self, kind: ValueType, key: str) -> Scalar | Span:
        if kind is ValueType.ARRAY:
            return self.array(key)
        if kind is ValueType.STRING:
            size = self.u64("the length", key)
            start = self.take(size, "the text", key)
            return Span(kind, None, start, self.at)
        start = self.take(SIZES[kind], "the value", key)
        if kind is ValueType.BOOL:
            self.check_bools(key, start)
        scalar: Scalar = struct.unpack_from(CODES[kind], self.view, start)[0]
        return scalar

    def array(self, key: str) -> Span:
        element = self.value_type("element", key)
        count = self.u64("the length", key)
        if element is ValueType.ARRAY:
            raise GGUFError(f"{key!r} is an array of arrays, which no GGUF model uses and this reader refuses")
        start = self.at
        if element is ValueType.STRING:
            self.skip_strings(key, count)
        else:
            self.take(count * SIZES[element], f"{key!r} with {count} elements")
            if element is ValueType.BOOL:
                self.check_bools(key, start)
        return Span(element, count, start, self.at)

    def check_bools(self, key: str, start: int) -> None:
        largest = np.frombuffer(self.view[start : self.at], np.uint8).max(initial=0)
        if largest > 1:
            raise GGUFError(f"{key!r} holds {largest} as a boolean, wanted 0 or 1")

    def skip_strings(self, key: str, count: int) -> None:
        if count > self.strings_left:
            found = f"{key!r} claims {count} strings"
            if self.strings_left < MAX_STRINGS:
                found += f" behind {MAX_STRINGS - self.strings_left} of other arrays"
            raise GGUFError(f"{found}, more than the limit of {MAX_STRINGS} of a file")
        self.strings_left -= count
        # An empty string still has its length.
        if count * 8 > self.end - self.at:
            self.take(count * 8, f"{key!r} with {count} strings")
        view, at, unpack = self.view, self.at, _u64.unpack_from
        try:
            for _ in range(count):
                at += 8 + unpack(view, at)[0]
        except (struct.error, OverflowError):
            at = self.end + 1
        if at > self.end:
            raise GGUFError(f"a string of {key!r} runs past {self.where}")
        self.at = at


def read_header(view: memoryview, file_size: int) -> Header:
    """Parses and checks a whole header. `view` is the file, or its first HEADER_BUDGET bytes; raises GGUFError."""
    walk = _Walk(view, file_size)
    version = _version(walk)
    n_tensors = walk.u64("the tensor count")
    n_keys = walk.u64("the key count")
    if n_tensors > MAX_TENSORS:
        raise GGUFError(f"the header claims {n_tensors} tensors, more than the limit of {MAX_TENSORS}")
    if n_keys > MAX_KEYS:
        raise GGUFError(f"the header claims {n_keys} metadata keys, more than the limit of {MAX_KEYS}")
    kinds: dict[str, ValueType] = {}
    values: dict[str, Scalar | Span] = {}
    for _ in range(n_keys):
        key = walk.name("a metadata key", MAX_KEY_BYTES)
        if key in values:
            raise GGUFError(f"the key {key!r} appears twice")
        kind = walk.value_type("value", key)
        value = values[key] = walk.value(kind, key)
        kinds[key] = value.element if isinstance(value, Span) else kind
    alignment = _alignment(values)
    names: set[str] = set()
    tensors = []
    for _ in range(n_tensors):
        tensor = _tensor(walk)
        if tensor.name in names:
            raise GGUFError(f"the tensor {tensor.name!r} appears twice")
        names.add(tensor.name)
        tensors.append(tensor)
    tensors.sort(key=lambda tensor: tensor.offset)
    data_start = -(-walk.at // alignment) * alignment
    _check_places(tensors, data_start, alignment, file_size)
    return Header(version, alignment, kinds, values, tuple(tensors), data_start)


def _other(magic: bytes) -> str:
    """What to do with a file of another kind."""
    if magic == bytes(4):
        return ", it was not copied or downloaded whole"
    pytorch, safetensors = magic == b"PK\x03\x04" or magic[:1] == b"\x80", magic[3:] == b"\0"
    return ", name the folder that it is in" if safetensors else ", take the model in safetensors" if pytorch else ""


def _version(walk: _Walk) -> int:
    start = walk.take(len(MAGIC), "the magic")
    magic = bytes(walk.view[start : walk.at])
    if magic != MAGIC:
        raise GGUFError(f"the first four bytes are {magic!r}, not {MAGIC!r}: this is not a GGUF file{_other(magic)}")
    version = walk.u32("the version")
    if version in VERSIONS:
        return version
    if version and not version & 0xFFFF:
        raise GGUFError("the file is big-endian: convert it to little-endian with llama.cpp's gguf_convert_endian.py")
    raise GGUFError(f"the GGUF version is {version}, wanted 2 or 3: convert the model again with a current llama.cpp")


def _alignment(values: Mapping[str, Scalar | Span]) -> int:
    low, high = ALIGNMENTS
    match values.get("general.alignment", DEFAULT_ALIGNMENT):
        case bool():
            shown = "a boolean"
        case int(alignment):
            if low <= alignment <= high and not alignment & (alignment - 1):
                return alignment
            shown = str(alignment)
        case _:
            shown = "no integer"
    raise GGUFError(f"general.alignment is {shown}, wanted a power of two from {low} to {high}")


def _tensor(walk: _Walk) -> TensorEntry:
    name = walk.name("a tensor name", MAX_NAME_BYTES)
    try:
        n_dims = walk.u32("the dimension count")
        if not 1 <= n_dims <= MAX_DIMS:
            raise GGUFError(f"it claims {n_dims} dimensions, wanted 1 to {MAX_DIMS}")
        fields = _TENSOR_FIELDS[n_dims]
        start = walk.take(fields.size, "what its dimensions, type and offset")
        *dims, number, offset = fields.unpack_from(walk.view, start)
        kind = ggml_type(number)
        return TensorEntry(name, kind, tuple(dims), offset, nbytes(kind, dims))
    except GGUFError as error:
        raise GGUFError(f"the tensor {name!r} is malformed: {error}") from None


def _check_places(tensors: list[TensorEntry], data_start: int, alignment: int, file_size: int) -> None:
    free = 0
    before = ""
    for tensor in tensors:  # by offset, so only neighbours can overlap
        if tensor.offset % alignment:
            raise GGUFError(
                f"the tensor {tensor.name!r} starts at offset {tensor.offset}, wanted a multiple of {alignment}"
            )
        if tensor.offset < free:
            raise GGUFError(
                f"the tensor {tensor.name!r} at offset {tensor.offset} overlaps {before!r}, which ends at {free}"
            )
        free = tensor.offset + tensor.nbytes
        before = tensor.name
        if data_start + free > file_size:
            raise GGUFError(
                f"the tensor {tensor.name!r} ends at byte {data_start + free}, but the file has {file_size}:"
                " it is cut short, download or copy it again"
            )
