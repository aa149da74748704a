"""From an address in a kernel's code to the line of Metal text, through the inlined calls around it (DWARF 4).

The formats: DWARF Debugging Information Format, version 4, sections 6.2 (line numbers) and 7.5 (entries).
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tools.metal_emulator.elf import elf_file


@dataclass(frozen=True)
class Frame:
    """A place in a text; `library` where the text is an included header."""

    file: str
    line: int
    library: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class _Inlined:
    low: int
    high: int
    depth: int
    call: Frame


class _Reader:
    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data, self.at = data, at

    def fixed(self, code: str) -> int:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return int(value)

    def uleb(self) -> int:
        value = shift = 0
        while True:
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    def sleb(self) -> int:
        start = self.at
        value = self.uleb()
        bits = 7 * (self.at - start)
        return value - (1 << bits) if value >> (bits - 1) else value

    def string(self) -> str:
        end = self.data.index(0, self.at)
        text = self.data[self.at : end].decode(errors="replace")
        self.at = end + 1
        return text


class DebugInfo:
    """The places of one shared object."""

    def __init__(self, path: Path) -> None:
        self._sections = elf_file(path).sections
        self._files: list[Frame] = []
        self._rows = self._read_lines()
        self._starts = [row[0] for row in self._rows]
        self._inlined = list(self._read_inlined())

    def frames(self, address: int) -> list[Frame]:
        """The line at an address and the calls that it was inlined through, innermost first; none if unknown."""
        at = bisect.bisect_right(self._starts, address) - 1
        # Code that stands for no line belongs to the line before it.
        while at > 0 and (row := self._rows[at][1]) is not None and row.line == 0:
            at -= 1
        row = self._rows[at][1] if at >= 0 else None
        if row is None:
            return []
        around = sorted((i for i in self._inlined if i.low <= address < i.high), key=lambda i: -i.depth)
        return [row] + [i.call for i in around]

    def _file(self, index: int, line: int) -> Frame:
        """A place; line 0 is code that stands for no line."""
        known = self._files[index - 1] if 0 < index <= len(self._files) else Frame("?", 0, True)
        return Frame(known.file, line, known.library)

    def _read_lines(self) -> list[tuple[int, Frame | None]]:
        """Address and place of every row, sorted; a None ends a run of code."""
        r = _Reader(self._sections.get(".debug_line", b""))
        rows: list[tuple[int, Frame | None]] = []
        while r.at < len(r.data):
            end = r.fixed("I") + r.at
            version = r.fixed("H")
            assert version == 4, f"line table version {version}"
            program = r.fixed("I") + r.at
            r.at += 3  # instruction length, operations, is_stmt
            line_base, line_range, opcode_base = r.fixed("b"), r.fixed("B"), r.fixed("B")
            operands = [r.fixed("B") for _ in range(opcode_base - 1)]
            directories = list(iter(r.string, ""))
            for name in iter(r.string, ""):
                directory = r.uleb()
                r.uleb(), r.uleb()
                library = directory > 0 and directories[directory - 1].startswith("/")
                self._files.append(Frame(name.rsplit("/", 1)[-1], 0, library or name.startswith("/")))
            r.at = program
            rows += self._run_line_program(r, end, line_base, line_range, opcode_base, operands)
        return sorted(rows, key=lambda row: (row[0], row[1] is not None))

    def _run_line_program(
        self, r: _Reader, end: int, line_base: int, line_range: int, opcode_base: int, operands: list[int]
    ) -> Iterator[tuple[int, Frame | None]]:
        address, file, line = 0, 1, 1
        while r.at < end:
            opcode = r.fixed("B")
            if opcode >= opcode_base:  # special: advances both and makes a row
                step = opcode - opcode_base
                address += step // line_range
                line += line_base + step % line_range
                yield address, self._file(file, line)
            elif opcode == 0:  # extended
                after = r.uleb() + r.at
                code = r.fixed("B")
                if code == 1:
                    yield address, None
                    address, file, line = 0, 1, 1
                elif code == 2:
                    address = r.fixed("Q")
                r.at = after
            elif opcode == 1:
                yield address, self._file(file, line)
            elif opcode == 2:
                address += r.uleb()
            elif opcode == 3:
                line += r.sleb()
            elif opcode == 4:
                file = r.uleb()
            elif opcode == 8:
                address += (255 - opcode_base) // line_range
            elif opcode == 9:
                address += r.fixed("H")
            else:
                for _ in range(operands[opcode - 1]):
                    r.uleb()

    def _read_inlined(self) -> Iterator[_Inlined]:
        r = _Reader(self._sections.get(".debug_info", b""))
        while r.at < len(r.data):
            end = r.fixed("I") + r.at
            version, abbreviations, _ = r.fixed("H"), r.fixed("I"), r.fixed("B")
            assert version == 4, f"debug info version {version}"
            shapes = self._read_abbreviations(abbreviations)
            base = depth = 0
            while r.at < end:
                code = r.uleb()
                if code == 0:
                    depth -= 1
                    continue
                tag, has_children, attributes = shapes[code]
                values = {name: self._read_value(r, form) for name, form in attributes}
                if tag == _COMPILE_UNIT:
                    base = values.get(_LOW_PC, 0)
                elif tag == _INLINED_SUBROUTINE:
                    call = self._file(values.get(_CALL_FILE, 0), values.get(_CALL_LINE, 0))
                    for low, high in self._ranges(values, base):
                        yield _Inlined(low, high, depth, call)
                depth += has_children

    def _ranges(self, values: Mapping[int, int], base: int) -> Iterator[tuple[int, int]]:
        if _RANGES not in values:
            yield values.get(_LOW_PC, 0), values.get(_LOW_PC, 0) + values.get(_HIGH_PC, 0)
            return
        r = _Reader(self._sections.get(".debug_ranges", b""), values[_RANGES])
        while True:
            low, high = r.fixed("Q"), r.fixed("Q")
            if low == high == 0:
                return
            if low == 2**64 - 1:
                base = high
            else:
                yield base + low, base + high

    def _read_abbreviations(self, at: int) -> dict[int, tuple[int, int, list[tuple[int, int]]]]:
        r = _Reader(self._sections[".debug_abbrev"], at)
        shapes = {}
        for code in iter(r.uleb, 0):
            tag, has_children = r.uleb(), r.fixed("B")
            attributes = []
            while True:
                name, form = r.uleb(), r.uleb()
                if name == form == 0:
                    break
                attributes.append((name, form))
            shapes[code] = tag, has_children, attributes
        return shapes

    def _read_value(self, r: _Reader, form: int) -> int:
        """Integers as they are; strings and blocks are stepped over."""
        if form in _FIXED_FORMS:
            return r.fixed(_FIXED_FORMS[form])
        if form == _SDATA:
            return r.sleb()
        if form in _ULEB_FORMS:
            return r.uleb()
        if form == _STRING:
            r.string()
        elif form == _EXPRLOC:
            length = r.uleb()
            r.at += length
        elif form != _FLAG_PRESENT:
            raise ValueError(f"debug info form {form:#x} is unknown")
        return 0


_COMPILE_UNIT, _INLINED_SUBROUTINE = 0x11, 0x1D
_LOW_PC, _HIGH_PC, _RANGES, _CALL_FILE, _CALL_LINE = 0x11, 0x12, 0x55, 0x58, 0x59
_SDATA, _STRING, _EXPRLOC, _FLAG_PRESENT = 0x0D, 0x08, 0x18, 0x19
_ULEB_FORMS = (0x0F, 0x15)  # udata, ref_udata
# addr, data2, data4, data8, data1, flag, strp, ref1, ref2, ref4, ref8, sec_offset, ref_addr, ref_sig8
_FIXED_FORMS = dict(zip((1, 5, 6, 7, 11, 12, 14, 17, 18, 19, 20, 23, 16, 32), "QHIQBBIBHIQIIQ"))


@cache
def debug_info(path: Path) -> DebugInfo:
    """The places of a cached shared object, whose content never changes."""
    return DebugInfo(path)
