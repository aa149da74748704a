"""The compiler behind the emulator: the clang inside the ziglang wheel, or a clang++ of the system."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from quarrel.errors import BackendUnavailable

_ADVICE = "pip install ziglang (Quarrel's test extra has it), or install clang 16 or newer"
_SYSTEM_NAMES = ("clang++", *(f"clang++-{version}" for version in range(24, 15, -1)))
# Fixed rather than native, so that a cache shared by two machines works on both.
_PROCESSORS = {"x86_64": "x86-64-v3", "aarch64": "armv8.2-a+fp16"}


@dataclass(frozen=True)
class Toolchain:
    """Command lines, without files, of one compiler. `version` is part of every cache key."""

    name: str
    version: str
    kernel_compiler: tuple[str, ...]  # for Metal text: no headers but the compiler's own
    runtime_compiler: tuple[str, ...]  # for the runtime: with the C library's headers
    ptx_compiler: tuple[str, ...]
    linker: tuple[str, ...]  # objects to a shared object, undefined symbols allowed
    linker_option: str  # how the linker's own options are passed

    def link(self, objects: Sequence[Path], output: Path, soname: str = "", needs: Sequence[Path] = ()) -> None:
        """A shared object that finds what it needs in its own directory."""
        options = [f"-soname={soname}"] if soname else ["-rpath=$ORIGIN"]
        run_tool([*self.linker, *(self.linker_option + option for option in options), *objects, *needs, "-o", output])


class CompilerError(Exception):
    """The compiler refused; `lines` is what it said on stderr."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = tuple(lines)
        super().__init__("\n".join(self.lines))


def run_tool(command: Sequence[str | Path]) -> str:
    """What the tool says, on either stream; raises CompilerError if it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompilerError(done.stderr.splitlines())
    return done.stdout + done.stderr


@cache
def zig_toolchain() -> Toolchain | None:
    """None where the ziglang wheel is not installed, or holds a zig without clang."""
    spec = importlib.util.find_spec("ziglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    root = Path(spec.submodule_search_locations[0])
    zig, machine = str(root / "zig"), _machine()
    try:
        version = run_tool([zig, "clang", "--version"]).splitlines()[0]
    except CompilerError:
        return None
    headers = ("-nostdinc", "-isystem", str(root / "lib" / "include"))
    target = f"{machine}-linux-gnu"
    return Toolchain(
        name="ziglang",
        version=version,
        kernel_compiler=(zig, "clang", f"--target={target}", f"-march={_PROCESSORS[machine]}", *headers),
        # `zig cc` knows the C library's headers, `zig clang` starts faster and adds nothing of its own.
        runtime_compiler=(zig, "cc", "-target", target, "-fno-sanitize=all", *_zig_processor(machine)),
        ptx_compiler=(zig, "clang", *headers),
        linker=(zig, "ld.lld", "-shared"),
        linker_option="",
    )


@cache
def system_toolchain() -> Toolchain | None:
    """None where no clang++ is installed."""
    path = next(filter(None, map(shutil.which, _SYSTEM_NAMES)), None)
    if path is None:
        return None
    march = f"-march={_PROCESSORS[_machine()]}"
    return Toolchain(
        name="clang",
        version=run_tool([path, "--version"]).splitlines()[0],
        kernel_compiler=(path, "-nostdlibinc", march),
        runtime_compiler=(path, march),
        ptx_compiler=(path, "-nostdlibinc"),
        linker=(path, "-shared", "-nostdlib"),
        linker_option="-Wl,",
    )


def find_toolchain() -> Toolchain:
    """The wheel's compiler if there is one, else the system's; raises BackendUnavailable without either."""
    if platform.system() != "Linux":
        raise BackendUnavailable(
            f"the Metal emulator builds ELF objects and runs on Linux, but this is {platform.system()}; on a Mac use Metal"
        )
    toolchain = zig_toolchain() or system_toolchain()
    if toolchain is None:
        raise BackendUnavailable(f"the Metal emulator needs clang, and found neither ziglang nor clang++; {_ADVICE}")
    return toolchain


def available() -> str | None:
    """Why the emulator cannot run here; None if it can."""
    try:
        find_toolchain()
    except BackendUnavailable as reason:
        return str(reason)
    return None


def _machine() -> str:
    machine = platform.machine()
    if machine not in _PROCESSORS:
        raise BackendUnavailable(f"the Metal emulator runs on {' and '.join(_PROCESSORS)}, but this is {machine}")
    return machine


def _zig_processor(machine: str) -> tuple[str, ...]:
    return ("-mcpu=x86_64_v3",) if machine == "x86_64" else ("-mcpu=generic+v8_2a+fullfp16",)
