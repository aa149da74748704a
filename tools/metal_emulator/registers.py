"""How many threads of a kernel an Apple GPU runs in one threadgroup: the fewer, the more registers a thread takes.

The table is that of Mesa's driver for M1 and M2 (src/asahi/compiler). Apple's compiler is not here to say what a kernel
takes, so that the estimate is what ptxas gives the same text, and a quarter more.
"""

from __future__ import annotations

from functools import cache

from quarrel.errors import BackendUnavailable
from tools.metal_emulator.build import MetalSource
from tools.metal_emulator.findings import Finding, Kind
from tools.metal_emulator.ptx import assemble, compile_ptx
from tools.metal_emulator.toolchain import find_toolchain

THREADS = ((52, 1024), (56, 896), (64, 832), (68, 768), (72, 704), (80, 640), (92, 576), (104, 512), (116, 448))
"""Registers of 32 bits, and the threads that find room with so many."""
ALWAYS = 384
"""Threads for which 128 registers are there; a thread that wants more spills."""
_MARGIN = 1.25


def threads_for(registers: int) -> int:
    """The most threads of a threadgroup whose threads take so many registers."""
    return next((threads for most, threads in THREADS if registers <= most), ALWAYS)


def too_many_threads(source: MetalSource, threads: int) -> list[Finding]:
    """A finding if Apple's compiler is likely to allow fewer; none where ptxas is missing or ALWAYS are enough."""
    if threads <= ALWAYS:
        return []
    taken = _registers(source)
    most = threads_for(round(taken * _MARGIN))
    if threads <= most:
        return []
    message = f"{threads} threads that take about {taken} registers each: an M1 may run {most} of them, and MLX throws"
    return [Finding(Kind.REGISTERS, "", 0, message)]


@cache
def _registers(source: MetalSource) -> int:
    try:
        return assemble(compile_ptx(source, "sm_90", find_toolchain()), "sm_90").registers
    except BackendUnavailable:
        return 0
