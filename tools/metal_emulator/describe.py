"""Findings in words: what was done to what, by whom, and what the rule is."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

from tools.metal_emulator.debug_info import Frame
from tools.metal_emulator.findings import Finding, Kind, ThreadId

_KINDS = tuple(Kind)
_WITHOUT_THREAD = (Kind.EMULATOR_LIMIT,)


class RawFinding(ctypes.Structure):
    """One msl_finding."""

    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("pc", ctypes.c_uint64),
        ("file", ctypes.c_char_p),
        ("line", ctypes.c_uint32),
        ("column", ctypes.c_uint32),
        ("object", ctypes.c_char_p),
        ("detail", ctypes.c_char_p),
        ("memory", ctypes.c_char_p),
        ("offset", ctypes.c_int64),
        ("bytes", ctypes.c_uint64),
        ("extent", ctypes.c_uint64),
        ("group", ctypes.c_uint64),
        ("thread", ctypes.c_uint32),
        ("has_other", ctypes.c_uint32),
        ("other_group", ctypes.c_uint64),
        ("other_thread", ctypes.c_uint32),
        ("mask", ctypes.c_uint32),
        ("live", ctypes.c_uint32),
    )


def describe(raw: RawFinding, groups: Sequence[int], frames: Sequence[Frame]) -> Finding:
    """One finding of the runtime; `groups` are the threadgroups per grid, `frames` its place and the calls around it."""
    kind = _KINDS[raw.kind]
    threads = []
    if raw.pc and kind not in _WITHOUT_THREAD:
        threads.append(_thread(raw.group, raw.thread, groups))
    if raw.has_other:
        threads.append(_thread(raw.other_group, raw.other_thread, groups))
    file, line = (frames[0].file, frames[0].line) if frames else ("", 0)
    if raw.file and not Path(_text(raw.file)).is_absolute():  # absolute: one of the emulator's headers
        file, line = _text(raw.file), raw.line
    calls = tuple(str(frame) for frame in frames[1:])
    return Finding(kind, file, line, _message(kind, raw, threads), tuple(threads), calls, raw.count)


def _thread(group: int, thread: int, groups: Sequence[int]) -> ThreadId:
    x, y = groups[0], groups[1]
    return ThreadId((group % x, group // x % y, group // x // y), thread)


def _text(raw: bytes | None) -> str:
    return raw.decode(errors="replace") if raw else ""


def _message(kind: Kind, raw: RawFinding, threads: Sequence[ThreadId]) -> str:
    name, detail, memory = _text(raw.object), _text(raw.detail), _text(raw.memory)
    by = f", by {threads[0]}" if threads else ""
    after = f", after {threads[1]}" if len(threads) > 1 else ""
    match kind:
        case Kind.RACE:
            return f"{detail} of byte {raw.offset} of {memory} '{name}'{by}{after}, with no barrier between"
        case Kind.WEAK_BARRIER:
            return (
                f"{detail} of byte {raw.offset} of {memory} '{name}'{by}{after}; the barrier between them "
                f"does not join both threads or does not name mem_{memory}"
            )
        case Kind.OUT_OF_BOUNDS:
            size = f" of {raw.bytes} bytes" if raw.bytes else ""
            where = (
                f"at offset {raw.offset} of {memory} '{name}' of {raw.extent} bytes" if name else "far from every buffer"
            )
            return f"{detail}{size} {where}{by}"
        case Kind.WRITE_TO_INPUT:
            return f"write of {raw.bytes} bytes at offset {raw.offset} of '{name}', which may only be read{by}"
        case Kind.UNINITIALISED:
            return f"read of byte {raw.offset} of {memory} '{name}' before any write{by}"
        case Kind.MISALIGNED:
            return f"access to {detail} at {raw.offset} bytes past a multiple of {raw.bytes}{by}"
        case Kind.DIVERGENT_SIMD:
            return f"{name} with lanes {raw.mask:08x} of the live lanes {raw.live:08x}; first is {threads[0]}"
        case Kind.DIVERGENT_BARRIER:
            return f"{name} while other threads wait at another barrier or in another round of a loop{by}"
        case Kind.MISSED_BARRIER:
            return f"{name} reached by {raw.mask} of {raw.live} threads, the others have returned; first is {threads[0]}"
        case Kind.ABSENT_LANE:
            return f"{name} reads lane {raw.offset}, which takes no part{by}"
        case Kind.THREADGROUP_MEMORY:
            return f"'{name}' brings threadgroup memory to {raw.bytes} bytes, over the {raw.extent} of Metal"
        case Kind.TIMEOUT:
            return f"not done after {raw.extent} ms{by}"
        case Kind.EMULATOR_LIMIT:
            return f"the emulator cannot run this: {name}, at most {raw.extent}"
        case _:
            return f"{detail}{by}"
