"""From emitter to callable address: LLVM code generation with a disk cache of object files.

A cached object is found by the digest of everything that could change it: this package's emitting sources, LLVM's version,
the feature level and the kernel's name with its parameters. So no kernel is ever reused for another CPU or another source.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
from llvmlite import ir
from llvmlite.binding import ffi

from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import Kernel
from quarrel.env import cache_home

Emit = Callable[[Kernel], None]
KERNEL_PARAMS = 3
"""Every kernel is `void kernel(args, chunk, scratch)`; see `runner`."""

_lock = threading.Lock()


@dataclass(frozen=True)
class Function:
    """What is to be compiled. `name` says everything that `emit` depends on."""

    name: str
    emit: Emit
    params: int = KERNEL_PARAMS
    result: ir.Type | None = None


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


def optimised(
    text: str, level: Level, machine: llvm.TargetMachine | None = None, context: llvm.ContextRef | None = None
) -> llvm.ModuleRef:
    """Registers for variables, folded arithmetic; LLVM's own vectorisers stay off, since the emitter decides every lane."""
    machine = machine or _machine(level)
    module = llvm.parse_assembly(text, context)
    module.triple = machine.triple
    module.data_layout = str(machine.target_data)
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = False
    options.slp_vectorization = False
    options.loop_unrolling = False
    builder = llvm.create_pass_builder(machine, options)
    _unlocked("LLVMPY_RunNewModulePassManager")(builder.getModulePassManager(), module, builder)
    return module


def _unlocked(name: str) -> Any:
    """A function of llvmlite without the lock by which it lets one thread in at a time, if that is how it is made.

    Modules of contexts of their own can be compiled at once, each by a machine of its own.
    """
    function = getattr(ffi.lib, name)
    return getattr(function, "_cfn", function)


def compile_object(function: Function, level: Level) -> bytes:
    """Machine code. Threads may compile at once."""
    machine = _new_machine(level)
    module = optimised(
        emit_ir(function.name, function.emit, function.params, function.result), level, machine, llvm.create_context()
    )
    with ffi.OutputString() as error:
        buffer = _unlocked("LLVMPY_TargetMachineEmitToMemory")(machine, module, 1, error)
        if not buffer:
            raise RuntimeError(str(error))
    try:
        return ctypes.string_at(ffi.lib.LLVMPY_GetBufferStart(buffer), ffi.lib.LLVMPY_GetBufferSize(buffer))
    finally:
        ffi.lib.LLVMPY_DisposeMemoryBuffer(buffer)


def assembly(name: str, emit: Emit, level: Level) -> str:
    """Machine code as text, for a developer to read."""
    return str(_machine(level).emit_assembly(optimised(emit_ir(name, emit), level)))


_loaded: dict[tuple[str, Level], int] = {}
_making: dict[tuple[str, Level], Future[None]] = {}


def address(name: str, emit: Emit, level: Level, params: int = KERNEL_PARAMS, result: ir.Type | None = None) -> int:
    """Address of the compiled function."""
    return addresses([Function(name, emit, params, result)], level)[0]


def addresses(functions: Sequence[Function], level: Level, threads: int = 1) -> list[int]:
    """Addresses of the compiled functions; those that are nowhere yet are compiled by so many threads."""
    todo: deque[Function] = deque()
    waits: list[Future[None]] = []
    with _lock:
        for function in functions:
            key = (function.name, level)
            if key not in _loaded:
                if key not in _making:
                    _making[key] = Future()
                    todo.append(function)
                waits.append(_making[key])

    def work() -> None:
        while todo:
            try:
                function = todo.popleft()
            except IndexError:
                return
            _make(function, level)

    others = [threading.Thread(target=work, name="quarrel-compile") for _ in range(1, min(threads, len(todo)))]
    for thread in others:
        thread.start()
    work()
    for thread in others:
        thread.join()
    for future in waits:
        future.result()
    return [_loaded[function.name, level] for function in functions]


def is_cached(function: Function, level: Level) -> bool:
    """Whether it is compiled already, here or by another process."""
    return (function.name, level) in _loaded or _path(_symbol(function.name, level), level).exists()


def _symbol(name: str, level: Level) -> str:
    return "q_" + hashlib.sha256(f"{name}|{level}".encode()).hexdigest()[:24]


def _path(symbol: str, level: Level) -> Path:
    key = hashlib.sha256(_sources() + repr(level).encode()).hexdigest()[:16]
    return cache_dir() / f"{level.name}-{key}" / f"{symbol}.o"


def _make(function: Function, level: Level) -> None:
    key = (function.name, level)
    try:
        symbol = _symbol(function.name, level)
        named = Function(symbol, function.emit, function.params, function.result)
        code = _cached(symbol, lambda: compile_object(named, level), level)
        with _lock:
            engine = _engine(level)
            engine.add_object_file(llvm.ObjectFileRef.from_data(code))
            engine.finalize_object()
            _loaded[key] = engine.get_function_address(symbol)
            _making.pop(key).set_result(None)
    except BaseException as error:
        with _lock:
            _making.pop(key).set_exception(error)


def _cached(symbol: str, make: Callable[[], bytes], level: Level) -> bytes:
    """Object code from disk, or made and kept; a damaged or unwritable cache only costs time."""
    path = _path(symbol, level)
    try:
        stored = path.read_bytes()
        if len(stored) > 32 and hashlib.sha256(stored[32:]).digest() == stored[:32]:
            return stored[32:]
    except OSError:
        pass
    code = make()
    import tempfile  # only here: it takes as long as a few kernels from the cache

    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(file.name, path)
    except OSError:
        pass
    return code
