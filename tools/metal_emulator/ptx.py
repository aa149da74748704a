"""The same Metal text for an NVIDIA GPU: to PTX by the same clang, to machine code by ptxas where there is one.

A SIMD-group is a warp, a threadgroup a block, threadgroup memory is shared memory. Not the same as on Metal: the grid
must be a multiple of the threadgroup, atomics have 32 bits, static threadgroup memory ends at 48 KiB, and optional
buffers are null pointers.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from quarrel.errors import BackendUnavailable, RequestError
from tools.metal_emulator.build import LANGUAGE, MetalSource, buffer_number, header_flags, kernel_call, prelude
from tools.metal_emulator.diagnostics import error_lines
from tools.metal_emulator.errors import MetalCompileError
from tools.metal_emulator.toolchain import CompilerError, Toolchain, run_tool

PTX_ENTRY = "msl_kernel_entry"


@dataclass(frozen=True)
class Resources:
    """What ptxas says that a kernel takes, for one thread or (shared) one block; and the machine code that it made."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    code: bytes = field(default=b"", repr=False)


def compile_ptx(source: MetalSource, arch: str, toolchain: Toolchain) -> str:
    """PTX with one entry, PTX_ENTRY, whose parameters are the buffers in the order of their numbers.

    `arch` is "sm_80", "sm_90", ...; raises MetalCompileError, and BackendUnavailable without libdevice.
    """
    if not re.fullmatch(r"sm_\d+[af]?", arch):
        raise RequestError(f"{arch!r} is no GPU architecture; give one like sm_90")
    rewritten = source.rewritten()
    call = kernel_call(source, rewritten, lambda buffer: f"b{buffer}", "attributes.")
    name = rewritten.instances.get(source.entry, source.entry).split("<")[0].strip()
    numbers = sorted({n for n in map(buffer_number, rewritten.kernels[name]) if n is not None})
    text = (
        f"{prelude(source.mlx_names)}{rewritten.text}\n#pragma clang attribute pop\n"
        f'#line 1 "entry"\n#include "msl/entry.h"\n#include "msl/entry_nvptx.h"\n'
        f'extern "C" __attribute__((nvptx_kernel)) void {PTX_ENTRY}({", ".join(f"void* b{n}" for n in numbers)}) {{\n'
        f"  msl_attributes attributes = msl::gpu_attributes();\n  {call};\n}}\n"
    )
    command = [
        *(*toolchain.ptx_compiler, "--target=nvptx64-nvidia-cuda", f"-march={arch}", "-nogpulib"),
        *(*LANGUAGE, "-O3", "-ffreestanding", "-Xclang", "-mlink-builtin-bitcode", "-Xclang", str(libdevice())),
        *header_flags(source.mlx_names),
    ]
    with tempfile.TemporaryDirectory() as work:
        cpp, ptx = Path(work) / "kernel.cpp", Path(work) / "kernel.ptx"
        cpp.write_text(text)
        try:
            run_tool([*command, "-S", cpp, "-o", ptx])
        except CompilerError as error:
            raise MetalCompileError(source.name, error_lines(error.lines)) from error
        return ptx.read_text()


def assemble(ptx: str, arch: str) -> Resources:
    """What the kernel takes on a GPU of this kind; raises CompilerError if ptxas refuses the text."""
    with tempfile.TemporaryDirectory() as work:
        path = Path(work) / "kernel.ptx"
        path.write_text(ptx)
        report = run_tool([_find_ptxas(), f"-arch={arch}", "-v", path, "-o", path.with_suffix(".cubin")])
        code = path.with_suffix(".cubin").read_bytes()

    def number(pattern: str) -> int:
        match = re.search(pattern, report)
        return int(match[1]) if match else 0

    return Resources(
        number(r"Used (\d+) registers"),
        number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        number(r"(\d+) bytes smem"),
        code,
    )


def libdevice() -> Path:
    """NVIDIA's mathematics library as LLVM bitcode: from triton's wheel, or from a CUDA toolkit."""
    return _find("libdevice.10.bc", "lib", "nvvm/libdevice")


def _find_ptxas() -> Path:
    on_path = shutil.which("ptxas")
    return Path(on_path) if on_path else _find("ptxas", "bin", "bin")


def _find(name: str, in_triton: str, in_toolkit: str) -> Path:
    candidates = []
    spec = importlib.util.find_spec("triton")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        candidates.append(Path(location) / "backends" / "nvidia" / in_triton / name)
    for toolkit in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if toolkit:
            candidates.append(Path(toolkit) / in_toolkit / name)
    for path in candidates:
        if path.exists():
            return path
    raise BackendUnavailable(f"PTX needs {name}, which neither triton nor a CUDA toolkit brings; pip install triton")
