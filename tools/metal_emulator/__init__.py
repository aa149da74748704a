"""Run Metal compute kernels on a CPU with a GPU's rules, and report what breaks them.

`metal_kernel` takes the arguments of `mx.fast.metal_kernel`; `check` runs one call under every check and several
schedules; `typecheck` checks address spaces; `install` puts the emulator in MLX's place on Linux. See README.md.
"""

from __future__ import annotations

from tools.metal_emulator.arrays import BFloat16Array, bfloat16
from tools.metal_emulator.check import CheckResult, check
from tools.metal_emulator.errors import MetalCompileError, MetalFindings
from tools.metal_emulator.findings import Finding, Kind, ThreadId
from tools.metal_emulator.install import install
from tools.metal_emulator.kernel import Call, metal_kernel
from tools.metal_emulator.launcher import Statistics
from tools.metal_emulator.session import Launch
from tools.metal_emulator.settings import Mode, Settings
from tools.metal_emulator.toolchain import available
from tools.metal_emulator.typecheck import typecheck

__all__ = [
    "BFloat16Array",
    "Call",
    "CheckResult",
    "Finding",
    "Kind",
    "Launch",
    "MetalCompileError",
    "MetalFindings",
    "Mode",
    "Settings",
    "Statistics",
    "ThreadId",
    "available",
    "bfloat16",
    "check",
    "install",
    "metal_kernel",
    "typecheck",
]
