"""From emitter to callable address: LLVM code generation with a disk cache of object files.

A cached object is found by the digest of everything that could change it: this package's emitting sources, LLVM's version,
the feature level and the kernel's name with its parameters. So no kernel is ever reused for another CPU or another source.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm
from llvmlite import ir

from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import Kernel
from quarrel.env import cache_home

Emit = Callable[[Kernel], None]
KERNEL_PARAMS = 3
"""Every kernel is `void kernel(args, chunk, scratch)`; see `runner`."""

_lock = threading.Lock()


@cache
def _sources() -> bytes:
    digest = hashlib.sha256(f"{llvmlite.__version__} {llvm.llvm_version_info}".encode())
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.digest()


def cache_dir() -> Path:
    """Where compiled kernels are kept: $XDG_CACHE_HOME/quarrel/kernels."""
    return cache_home() / "quarrel" / "kernels"


def _new_machine(level: Level) -> llvm.TargetMachine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(
        cpu=level.cpu, features=level.features, opt=3, reloc="pic", codemodel="small", jit=True
    )


_machine = cache(_new_machine)


@cache
def _engine(level: Level) -> llvm.ExecutionEngine:
    empty = llvm.parse_assembly("")
    empty.triple = llvm.get_process_triple()
    # The engine owns its machine, so it gets one that nothing else uses. llvmlite's memory manager puts the sections of an
    # object side by side; LLVM's puts them where a large process has room, and ends it when they are 2 GiB apart.
    return llvm.create_mcjit_compiler(empty, _new_machine(level), use_lmm=True)


def emit_ir(name: str, emit: Emit, params: int = KERNEL_PARAMS, result: ir.Type | None = None) -> str:
    """The kernel as LLVM IR text, before optimisation."""
    module = ir.Module(name)
    emit(Kernel(module, name, params, result))
    return str(module)


def optimised(text: str, level: Level, machine: llvm.TargetMachine | None = None) -> llvm.ModuleRef:
    """Registers for variables, folded arithmetic; LLVM's own vectorisers stay off, since the emitter decides every lane."""
    machine = machine or _machine(level)
    module = llvm.parse_assembly(text)
    module.triple = machine.triple
    module.data_layout = str(machine.target_data)
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = False
    options.slp_vectorization = False
    options.loop_unrolling = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return module


def compile_object(name: str, emit: Emit, level: Level, params: int, result: ir.Type | None) -> bytes:
    return bytes(_machine(level).emit_object(optimised(emit_ir(name, emit, params, result), level)))


def assembly(name: str, emit: Emit, level: Level) -> str:
    """Machine code as text, for a developer to read."""
    return str(_machine(level).emit_assembly(optimised(emit_ir(name, emit), level)))


_loaded: dict[tuple[str, Level], int] = {}


def address(name: str, emit: Emit, level: Level, params: int = KERNEL_PARAMS, result: ir.Type | None = None) -> int:
    """Address of the compiled function. `name` must say everything that `emit` depends on."""
    with _lock:
        key = (name, level)
        if key not in _loaded:
            symbol = "q_" + hashlib.sha256(f"{name}|{level}".encode()).hexdigest()[:24]
            code = _cached(symbol, lambda: compile_object(symbol, emit, level, params, result), level)
            engine = _engine(level)
            engine.add_object_file(llvm.ObjectFileRef.from_data(code))
            engine.finalize_object()
            _loaded[key] = engine.get_function_address(symbol)
        return _loaded[key]


def _cached(symbol: str, make: Callable[[], bytes], level: Level) -> bytes:
    """Object code from disk, or made and kept; a damaged or unwritable cache only costs time."""
    key = hashlib.sha256(_sources() + repr(level).encode()).hexdigest()[:16]
    path = cache_dir() / f"{level.name}-{key}" / f"{symbol}.o"
    try:
        stored = path.read_bytes()
        if len(stored) > 32 and hashlib.sha256(stored[32:]).digest() == stored[:32]:
            return stored[32:]
    except OSError:
        pass
    code = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(file.name, path)
    except OSError:
        pass
    return code
