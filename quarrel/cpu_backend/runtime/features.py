"""What the CPU can do, reduced to one choice: the feature level that every kernel of a process is emitted for."""

from __future__ import annotations

import functools
import os
import platform
from dataclasses import dataclass
from typing import Literal

import llvmlite.binding as llvm

from quarrel.errors import ConfigError

Dot = Literal["vnni512", "vnni256", "maddubs", "sdot", "plain"]
"""How four products of bytes are summed: AVX-512 VNNI, AVX-VNNI, AVX2 multiply-adds, NEON sdot, or plain vector IR."""


ARCH = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())


@dataclass(frozen=True)
class Level:
    """One way to emit kernels. `cpu` and `features` are LLVM's; two levels never share a cached kernel."""

    name: str
    arch: str
    cpu: str
    features: str
    dot: Dot
    float16: bool
    """Conversions of float16 are instructions; without them they are emitted as integer arithmetic."""
    registers: int
    """512-bit vectors that the register file holds."""
    bfloat16: bool = False
    """Products of bfloat16 are summed in pairs by one instruction."""


_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd", "avx512vnni", "avx512vbmi", "avx2", "fma", "f16c")
_NEEDS = {
    "avx512bf16": (*_AVX512, "avx512bf16"),
    "avx512vnni": _AVX512,
    "avxvnni": ("avx2", "fma", "f16c", "avxvnni"),
    "avx2": ("avx2", "fma", "f16c"),
    "neon": ("neon", "dotprod"),
    "generic": (),
}
LEVELS = {
    level.name: level
    for level in (
        Level("avx512bf16", "x86_64", "x86-64-v4", "+avx512vnni,+avx512vbmi,+avx512bf16", "vnni512", True, 32, True),
        Level("avx512vnni", "x86_64", "x86-64-v4", "+avx512vnni,+avx512vbmi", "vnni512", True, 32),
        Level("avxvnni", "x86_64", "x86-64-v3", "+avxvnni", "vnni256", True, 8),
        Level("avx2", "x86_64", "x86-64-v3", "", "maddubs", True, 8),
        Level("neon", "aarch64", "generic", "+neon,+dotprod,+fullfp16", "sdot", True, 8),
        Level("generic", ARCH, "x86-64" if ARCH == "x86_64" else "generic", "", "plain", False, 4),
    )
}
"""Every level there is, best first within an architecture."""


@functools.cache
def host_features() -> frozenset[str]:
    """LLVM's names of what this CPU has."""
    found = {name for name, on in llvm.get_host_cpu_features().items() if on}
    # Some systems report no features on Arm; macOS machines all have these.
    if platform.machine() == "arm64" and platform.system() == "Darwin":
        found |= {"neon", "dotprod"}
    return frozenset(found)


@functools.cache
def levels() -> tuple[Level, ...]:
    """Every level that this machine can run, best first."""
    have = host_features()
    return tuple(level for name, level in LEVELS.items() if level.arch == ARCH and have.issuperset(_NEEDS[name]))


def level(name: str | None = None) -> Level:
    """The level of this name, or the best one."""
    if name is None:
        return levels()[0]
    for candidate in levels():
        if candidate.name == name:
            return candidate
    raise ConfigError(f"CPU level {name!r} cannot run here: use one of {', '.join(c.name for c in levels())}")


def threads(count: int | None = None) -> int:
    """Worker threads: `count`, or the cores that this process may use, one per physical core."""
    return count or len({siblings(cpu) for cpu in allowed_cores()})


def allowed_cores() -> list[int]:
    """The numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def siblings(cpu: int) -> str:
    """A name that the hyper-threads of one core share; the CPU's own number where the system does not say."""
    try:
        with open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") as file:
            return file.read().strip()
    except OSError:
        return str(cpu)
