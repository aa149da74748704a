"""What a launcher asks of the machine before it names a model: devices with their memory, in llama.cpp's words."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

_FIELDS = "index,uuid,name,memory.total,memory.free,compute_cap"


@dataclass(frozen=True)
class Gpu:
    """One that CUDA would show, in its order. Memory in MiB."""

    name: str
    total: int
    free: int
    capability: str


def gpus(environment: Mapping[str, str]) -> list[Gpu]:
    """By nvidia-smi, which needs no CUDA of its own; those that CUDA_VISIBLE_DEVICES hides are left out."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return visible(found, environment.get("CUDA_VISIBLE_DEVICES"))


def visible(table: str, wanted: str | None) -> list[Gpu]:
    """The rows of nvidia-smi that `wanted` (CUDA_VISIBLE_DEVICES) names by number or UUID, in its order; all without it."""
    rows = [[cell.strip() for cell in line.split(",")] for line in table.splitlines() if line.count(",") == 5]
    if wanted is not None:
        names = [name.strip() for name in wanted.split(",") if name.strip()]
        rows = [r for n in names for r in rows if r[0] == n or (len(n) > 4 and r[1].startswith(n))]
    return [Gpu(r[2], int(r[3]), int(r[4]), r[5]) for r in rows if r[3].isdigit() and r[4].isdigit()]


def list_devices(environment: Mapping[str, str]) -> None:
    """On standard output, as `llama-server --list-devices`."""
    found = gpus(environment)
    _say_cuda(found)
    print("Available devices:")
    for i, gpu in enumerate(found):
        print(f"  CUDA{i}: {gpu.name} ({gpu.total} MiB, {gpu.free} MiB free)")
    sys.stdout.flush()


def system_info(environment: Mapping[str, str]) -> None:
    """On standard error, as llama-server says it before it loads a model. Kernels are compiled for the device that is
    there, so that the architectures are those of the devices."""
    found = gpus(environment)
    _say_cuda(found)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    architectures = ",".join(sorted({gpu.capability.replace(".", "") + "0" for gpu in found}))
    cuda = f" | CUDA : ARCHS = {architectures}" if found else ""
    line = f"system_info: n_threads = {cores} (n_threads_batch = {cores}) / {os.cpu_count()}{cuda} | CPU : LLVM = 1 |"
    print(line, file=sys.stderr, flush=True)


def _say_cuda(found: list[Gpu]) -> None:
    if not found:
        return
    print(f"ggml_cuda_init: found {len(found)} CUDA devices:", file=sys.stderr)
    for i, gpu in enumerate(found):
        line = f"  Device {i}: {gpu.name}, compute capability {gpu.capability}, VMM: no, VRAM: {gpu.total} MiB"
        print(line, file=sys.stderr, flush=True)
