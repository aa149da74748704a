"""Metal text to a shared object that the runtime can execute, and the runtime itself; both cached by content."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.metal_emulator.cache import METAL_HEADERS, RUNTIME_SOURCES, cached, content_key, tree_key
from tools.metal_emulator.diagnostics import error_lines
from tools.metal_emulator.errors import MetalCompileError
from tools.metal_emulator.mlx_headers import MLX_KERNELS, mlx_include
from tools.metal_emulator.rewrite import Parameter, Rewritten, rewrite
from tools.metal_emulator.settings import Mode
from tools.metal_emulator.toolchain import CompilerError, Toolchain, run_tool

ENTRY = "msl_kernel_entry"

# Metal's language on clang: literals are float, every function may hold a SIMD-group operation, a*b+c is one rounding.
LANGUAGE = (
    *("-std=c++17", "-Wno-everything", "-Xclang", "-cl-single-precision-constant"),
    *("-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics", "-fconvergent-functions"),
    *("-ffp-contract=on", "-fno-math-errno"),
)
# Frame pointers identify the place of a wait; code in source order tells which of two places comes first.
_EXECUTION = (
    *("-fPIC", "-fno-plt", "-fvisibility=hidden", "-gdwarf-4", "-gline-tables-only"),
    *("-fno-omit-frame-pointer", "-mno-omit-leaf-frame-pointer", "-fstack-clash-protection"),
    *("-mllvm", "-disable-block-placement"),
)
_UNDEFINED = (
    "alignment,array-bounds,local-bounds,builtin,float-cast-overflow,integer-divide-by-zero,return,shift,"
    "signed-integer-overflow,unreachable"
)
# Nothing that copies or moves accesses: a finding names the line that made it. Unset variables hold a pattern.
_CHECKS = (
    *("-O1", f"-fsanitize=thread,{_UNDEFINED}", "-ftrivial-auto-var-init=pattern"),
    *("-fno-vectorize", "-fno-slp-vectorize", "-fno-unroll-loops"),
    *("-mllvm", "-tsan-instrument-read-before-write=1", "-mllvm", "-tsan-instrument-func-entry-exit=0"),
)
_MODE_FLAGS = {Mode.FAST: ("-O2",), Mode.CHECK: _CHECKS}
_RUNTIME = (
    *("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-nostdinc++", "-fno-exceptions", "-fno-rtti"),
    *("-fno-threadsafe-statics", "-fno-omit-frame-pointer", "-mno-omit-leaf-frame-pointer", "-Wall", "-Wextra", "-Werror"),
)
_CHECK_ONLY = ("shadow.cpp", "memory_hooks.cpp", "undefined_hooks.cpp")


@dataclass(frozen=True)
class MetalSource:
    """A Metal text and the kernel in it: a function's name, or the host name of an instance of a template.

    `mlx_names`: put MLX's own names (bfloat16_t, Limits, ...) before the text, as MLX does for custom kernels.
    """

    name: str
    text: str
    entry: str
    mlx_names: bool = True
    function_constants: tuple[tuple[str, object], ...] = ()

    def rewritten(self, count_rounds: bool = False) -> Rewritten:
        return rewrite(self.text, dict(self.function_constants), count_rounds)


def build_kernel(source: MetalSource, mode: Mode, toolchain: Toolchain) -> Path:
    """The shared object of a kernel; raises MetalCompileError with the compiler's lines."""
    program = _program(source, mode)
    runtime = build_runtime(mode, toolchain)
    command = [*toolchain.kernel_compiler, *LANGUAGE, *_EXECUTION, *_MODE_FLAGS[mode], *header_flags(source.mlx_names)]
    key = content_key((toolchain.version, *command, program, runtime.name, tree_key(METAL_HEADERS), _mlx_key()))
    stem = f"{re.sub(r'[^A-Za-z0-9_]', '_', source.name)[:40]}_{mode.value}_{key}"

    def build(output: Path) -> None:
        text = cached(f"{stem}.cpp", lambda path: void(path.write_text(program)))
        compiled = output.with_suffix(".o")
        try:
            run_tool([*command, "-include-pch", _names(command, source.mlx_names, toolchain), "-c", text, "-o", compiled])
        except CompilerError as error:
            raise MetalCompileError(source.name, error_lines(error.lines)) from error
        toolchain.link([compiled], output, needs=[runtime])

    return cached(f"{stem}.so", build)


def _names(command: Sequence[str], mlx_names: bool, toolchain: Toolchain) -> Path:
    """The headers before every kernel's text, compiled once: half of the time of compiling a kernel was theirs."""
    text = includes(mlx_names)
    key = content_key((toolchain.version, *command, text, tree_key(METAL_HEADERS), _mlx_key()))
    header = cached(f"names_{key}.h", lambda path: void(path.write_text(text)))
    # By content: an equal header may be a newer file.
    make = [*command, "-Xclang", "-fno-pch-timestamp", "-x", "c++-header", header, "-o"]
    return cached(f"names_{key}.pch", lambda path: void(run_tool([*make, path])))


def build_runtime(mode: Mode, toolchain: Toolchain) -> Path:
    """The runtime of a mode as a shared object; kernels are linked to it."""
    command = [*toolchain.runtime_compiler, *_RUNTIME, *(["-DMSL_CHECK"] if mode is Mode.CHECK else [])]
    key = content_key((toolchain.version, *command, tree_key(RUNTIME_SOURCES), tree_key(METAL_HEADERS)))
    name = f"runtime_{mode.value}_{key}.so"

    def build(output: Path) -> None:
        objects = []
        for source in sorted(RUNTIME_SOURCES.glob("*.cpp")):
            if mode is Mode.CHECK or source.name not in _CHECK_ONLY:
                objects.append(output.with_name(source.stem + ".o"))
                run_tool([*command, "-c", source, "-o", objects[-1]])
        toolchain.link(objects, output, soname=name)

    return cached(name, build)


def header_flags(mlx_names: bool) -> list[str]:
    """-I for the emulator's headers, then MLX's, some of which the emulator's stand before."""
    include = mlx_include() if mlx_names else None
    return ["-I", str(METAL_HEADERS), *(["-I", str(include)] if include else [])]


def includes(mlx_names: bool) -> str:
    """The lines of a kernel's headers."""
    names = ""
    if mlx_names:
        names = "mlx/backend/metal/kernels/utils.h" if mlx_include() else "mlx_names.h"
        names = f'#include "{names}"\n'
    return f"#include <metal_stdlib>\n{names}"


def prelude(mlx_names: bool) -> str:
    """What stands before a kernel's text. The calls of two branches stay two calls, even where they read the same."""
    return f"{includes(mlx_names)}#pragma clang attribute push(__attribute__((nomerge)), apply_to = function)\n"


def kernel_call(source: MetalSource, rewritten: Rewritten, buffer: Callable[[int], str], attributes: str) -> str:
    """The C++ call of a kernel, from what holds its buffers and the object that holds its attributes."""
    function = rewritten.instances.get(source.entry, source.entry)
    name = function.split("<")[0].strip()
    if name not in rewritten.kernels:
        raise MetalCompileError(source.name, [f"error: the text has no kernel {name}, it has {sorted(rewritten.kernels)}"])
    arguments = []
    for i, parameter in enumerate(rewritten.kernels[name]):
        parameter_type = f"msl::parameter<decltype(&{function}), {i}>::type"
        number = buffer_number(parameter)
        if number is not None:
            arguments.append(f"msl::from_buffer<{parameter_type}>::get({buffer(number)})")
        elif "(" in parameter.attribute:
            raise MetalCompileError(source.name, [f"error: the emulator has no [[{parameter.attribute}]] parameters"])
        else:
            arguments.append(f"msl::from_attribute<{parameter_type}>({attributes}{parameter.attribute})")
    return f"{function}({', '.join(arguments)})"


def buffer_number(parameter: Parameter) -> int | None:
    match = re.fullmatch(r"buffer\((\d+)\)", parameter.attribute)
    return int(match[1]) if match else None


def void(_: object) -> None:
    """For callbacks whose value no one wants."""


def _program(source: MetalSource, mode: Mode) -> str:
    check = mode is Mode.CHECK
    rewritten = source.rewritten(count_rounds=check)
    call = kernel_call(source, rewritten, lambda buffer: f"buffers[{buffer}]", "attributes->")
    # Loop hints of MLX's headers would stand between the counting and the loop.
    unrolling = "#undef MLX_MTL_PRAGMA_UNROLL\n#define MLX_MTL_PRAGMA_UNROLL\n" if check else ""
    return (
        f"{prelude(source.mlx_names)}{unrolling}{rewritten.text}\n#pragma clang attribute pop\n"
        f'#line 1 "entry"\n#include "msl/entry.h"\n'
        f'extern "C" __attribute__((visibility("default"), no_sanitize("thread", "undefined")))\n'
        f"void {ENTRY}(void* const* buffers, const msl_attributes* attributes) {{\n  {call};\n}}\n"
    )


def _mlx_key() -> str:
    """Of the headers that stand before a kernel."""
    include = mlx_include()
    if include is None:
        return ""
    return content_key((include / MLX_KERNELS / name).read_text() for name in ("utils.h", "bf16.h", "bf16_math.h"))
