"""The runtime's side of a launch, by ctypes; the structures mirror runtime/api.h field by field."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tools.metal_emulator.build import ENTRY
from tools.metal_emulator.debug_info import Frame, debug_info
from tools.metal_emulator.describe import RawFinding, describe
from tools.metal_emulator.elf import elf_file
from tools.metal_emulator.findings import Finding
from tools.metal_emulator.settings import Settings


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("host", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("writable", ctypes.c_uint32),
        ("initialised", ctypes.c_uint32),
    )


class _Request(ctypes.Structure):
    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("code_low", ctypes.c_uint64),
        ("code_high", ctypes.c_uint64),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("buffer_count", ctypes.c_uint32),
        ("grid", ctypes.c_uint32 * 3),
        ("threadgroup", ctypes.c_uint32 * 3),
        ("workers", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
        ("strict", ctypes.c_uint32),
        ("flush_subnormals", ctypes.c_uint32),
        ("alignment", ctypes.c_uint32),
        ("timeout_ms", ctypes.c_uint32),
    )


class _Statistics(ctypes.Structure):
    _fields_ = (
        ("simd_operations", ctypes.c_uint64),
        ("partial_simd_operations", ctypes.c_uint64),
        ("barriers", ctypes.c_uint64),
        ("switches", ctypes.c_uint64),
        ("threadgroup_bytes", ctypes.c_uint64),
        ("nanoseconds", ctypes.c_uint64),
    )


@dataclass(frozen=True)
class BoundBuffer:
    """One buffer of a launch; `address` None leaves it unbound."""

    name: str
    address: int | None
    bytes: int
    writable: bool
    initialised: bool


@dataclass(frozen=True)
class Statistics:
    """Of one launch. `partial_simd_operations` had fewer lanes than were alive."""

    simd_operations: int = 0
    partial_simd_operations: int = 0
    barriers: int = 0
    switches: int = 0
    threadgroup_bytes: int = 0
    nanoseconds: int = 0


# The runtime keeps one launch at a time, and its signal handlers belong to the process.
_LAUNCHING = threading.Lock()


class LoadedKernel:
    """A built kernel in this process."""

    def __init__(self, path: Path) -> None:
        # Kernels call the C library's mathematics, which not every Python is linked with.
        ctypes.CDLL("libm.so.6", mode=ctypes.RTLD_GLOBAL)
        self._path = path
        self._library = ctypes.CDLL(str(path))
        self._launch = self._library.msl_launch
        self._launch.argtypes = (ctypes.POINTER(_Request), ctypes.POINTER(_Statistics))
        self._findings = self._library.msl_findings
        self._findings.restype = ctypes.POINTER(RawFinding)
        self._entry = ctypes.cast(self._library[ENTRY], ctypes.c_void_p).value or 0
        elf = elf_file(path)
        self._base = self._entry - elf.symbols[ENTRY]
        self._code = elf.code

    def launch(
        self,
        buffers: Sequence[BoundBuffer],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        settings: Settings,
    ) -> tuple[list[Finding], Statistics]:
        bound = (_Buffer * len(buffers))(
            *(_Buffer(b.address, b.bytes, b.name.encode(), b.writable, b.initialised) for b in buffers)
        )
        request = _Request(
            self._entry,
            self._base + self._code.start,
            self._base + self._code.stop,
            bound,
            len(buffers),
            (ctypes.c_uint32 * 3)(*grid),
            (ctypes.c_uint32 * 3)(*threadgroup),
            settings.worker_count(),
            settings.seed,
            settings.strict,
            settings.flush_subnormals,
            settings.alignment,
            int(settings.timeout_s * 1000),
        )
        statistics = _Statistics()
        with _LAUNCHING:
            count = self._launch(ctypes.byref(request), ctypes.byref(statistics))
            raw = self._findings()
            groups = tuple(-(-g // min(g, t)) for g, t in zip(grid, threadgroup))
            findings = [describe(raw[i], groups, self._frames(raw[i].pc)) for i in range(count)]
        return findings, Statistics(*(getattr(statistics, name) for name, _ in _Statistics._fields_))

    def _frames(self, pc: int) -> list[Frame]:
        """The kernel's own lines at a return address."""
        if not pc:
            return []
        frames = debug_info(self._path).frames(pc - 1 - self._base)
        return [frame for frame in frames if not frame.library and frame.file != "entry"]


@cache
def load_kernel(path: Path) -> LoadedKernel:
    """Each object once in a process."""
    return LoadedKernel(path)
