"""What the emulator wants to know of a shared object: its sections, its symbols, where its code lies."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_NO_BITS = 8  # a section without content in the file


@dataclass(frozen=True)
class ElfFile:
    """Addresses are those before loading."""

    sections: Mapping[str, bytes]
    symbols: Mapping[str, int]  # the dynamic ones
    code: range  # the .text section: the kernel's own instructions, no stubs of the linker


@cache
def elf_file(path: Path) -> ElfFile:
    """Reads a 64-bit little-endian ELF file, which a cached object is and stays."""
    data = path.read_bytes()
    offset, entry_size, count, names_index = struct.unpack_from("<Q10xHHH", data, 40)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, offset + i * entry_size) for i in range(count)]
    names = data[headers[names_index][4] :]
    sections = {}
    code = range(0)
    for name_at, kind, _, address, at, size, *_ in headers:
        name = names[name_at : names.index(0, name_at)].decode()
        sections[name] = data[at : at + size] if kind != _NO_BITS else b""
        if name == ".text":
            code = range(address, address + size)
    symbols = {}
    strings = sections.get(".dynstr", b"")
    for name_at, _, _, _, value, _ in struct.iter_unpack("<IBBHQQ", sections.get(".dynsym", b"")):
        symbols[strings[name_at : strings.index(0, name_at)].decode()] = value
    return ElfFile(sections, symbols, code)
