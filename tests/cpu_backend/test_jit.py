"""The kernel cache: found again, never for another level or source, and never trusted when damaged."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from quarrel.cpu_backend.backend import CpuBackend
from quarrel.cpu_backend.plan import Tables
from quarrel.cpu_backend.runtime import features, jit
from quarrel.cpu_backend.runtime.ir import I64, Kernel
from quarrel.cpu_backend.step import CpuStep
from quarrel.gguf import GGUFFile, resolve
from quarrel.models import Tensors, assemble, read_spec
from tests.cpu_backend.test_step import LIMITS, batch, greedy
from tests.tiny_model import write_tiny_model

LEVEL = features.level()


@pytest.fixture(name="cache")
def _cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture(name="restart", autouse=True)
def _restart(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Forgets what is loaded, as a new process would."""

    def restart() -> None:
        monkeypatch.setattr(jit, "_loaded", {})
        monkeypatch.setattr(jit, "_engine", cache(jit._engine.__wrapped__))

    restart()
    return restart


class Counted:
    """Emits `n`, and counts how often it is asked to."""

    def __init__(self, n: int) -> None:
        self.n, self.emitted = n, 0

    def __call__(self, k: Kernel) -> None:
        self.emitted += 1
        k.finish(k.i64(self.n))


def value(name: str, emit: Counted, level: features.Level = LEVEL) -> int:
    return int(ctypes.CFUNCTYPE(ctypes.c_int64)(jit.address(name, emit, level, 0, I64))())


def test_a_kernel_is_compiled_once_and_then_found_on_disk(cache: Path, restart: Callable[[], None]) -> None:
    emit = Counted(41)
    assert value("test/once", emit) == value("test/once", emit) == 41
    assert emit.emitted == 1
    restart()
    assert value("test/once", emit) == 41
    assert emit.emitted == 1
    assert len(list(cache.rglob("*.o"))) == 1


def test_a_damaged_object_is_made_again(cache: Path, restart: Callable[[], None]) -> None:
    emit = Counted(42)
    assert value("test/damaged", emit) == 42
    (stored,) = cache.rglob("*.o")
    for damage in (b"", b"x" * 40, stored.read_bytes()[:-1]):
        stored.write_bytes(damage)
        restart()
        before = emit.emitted
        assert value("test/damaged", emit) == 42
        assert emit.emitted == before + 1


def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quarrel").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert value("test/unwritable", Counted(43)) == 43


def test_levels_and_sources_have_their_own_folders(
    cache: Path, monkeypatch: pytest.MonkeyPatch, restart: Callable[[], None]
) -> None:
    for level in features.levels():
        assert value("test/folders", Counted(7), level) == 7
    assert len({p.parent for p in cache.rglob("*.o")}) == len(features.levels())
    monkeypatch.setattr(jit, "_sources", lambda: b"another version")
    restart()
    other = Counted(8)
    assert value("test/folders", other) == 8
    assert other.emitted == 1


def function(n: int, name: str = "") -> tuple[jit.Function, Counted]:
    emit = Counted(n)
    return jit.Function(name or f"test/many/{n}", emit, 0, I64), emit


def test_several_are_compiled_at_once_each_by_one_thread(
    cache: Path, monkeypatch: pytest.MonkeyPatch, restart: Callable[[], None]
) -> None:
    made, both = jit.compile_object, threading.Barrier(2, timeout=60)

    def met(one: jit.Function, level: features.Level) -> bytes:
        both.wait()  # breaks unless two threads are here at once
        return made(one, level)

    monkeypatch.setattr(jit, "compile_object", met)
    many = [function(n) for n in range(4)]
    found = jit.addresses([one for one, _ in many], LEVEL, threads=2)
    assert [ctypes.CFUNCTYPE(ctypes.c_int64)(address)() for address in found] == [0, 1, 2, 3]
    assert [emit.emitted for _, emit in many] == [1] * 4
    assert not jit._making


def test_llvm_lets_two_threads_in() -> None:
    """By names of llvmlite's that are its own affair: were they others, kernels would be compiled one at a time."""
    for name in ("LLVMPY_RunNewModulePassManager", "LLVMPY_TargetMachineEmitToMemory"):
        assert isinstance(jit._unlocked(name), ctypes._CFuncPtr)  # type: ignore[attr-defined]


def test_two_threads_that_want_the_same_wait_for_one(cache: Path) -> None:
    one, emit = function(5)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: jit.addresses([one], LEVEL)[0], range(8)))
    assert len(set(found)) == emit.emitted == 1


def test_an_emitter_that_fails_is_heard_of_and_may_try_again(cache: Path) -> None:
    def broken(k: Kernel) -> None:
        raise ValueError("no such instruction")

    good, _ = function(6)
    for _ in range(2):
        with pytest.raises(ValueError, match="no such instruction"):
            jit.addresses([good, jit.Function("test/broken", broken)], LEVEL, threads=2)
    assert jit.is_cached(good, LEVEL)
    assert not jit._making


def joined() -> None:
    """Waits for threads that compile: who wants what one has begun waits for it, and finds it in that test's cache."""
    for thread in threading.enumerate():
        if thread.name == "quarrel-compile":
            thread.join(300)


@pytest.fixture(name="step")
def _step(cache: Path, restart: Callable[[], None], tmp_path: Path) -> Iterator[CpuStep]:
    """Of a small model, with no kernel compiled."""
    backend = CpuBackend(threads=2)
    with GGUFFile.open(write_tiny_model(tmp_path / "tiny.gguf")) as file:
        tensors = Tensors(file)
        step = backend.compile(assemble(read_spec(file), tensors), tensors, LIMITS)
        assert isinstance(step, CpuStep)
        yield step
        step.close()
    backend.close()
    joined()


class Asked(Exception):
    """Of kernels, before any is compiled."""


def test_a_first_step_wants_the_kernels_of_its_rows_and_no_others(
    cache: Path, restart: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def load(tables: Tables, names: list[str], level: features.Level, threads: int = 1) -> None:
        if names:
            asked.append([name.partition("/")[0] for name in names])
            raise Asked

    monkeypatch.setattr(Tables, "load", load)
    backend = CpuBackend(threads=1)
    with GGUFFile.open(resolve("demo").paths) as file:
        tensors = Tensors(file)
        step = backend.compile(assemble(read_spec(file), tensors), tensors, LIMITS)
    for rows in (1, 3, 20):
        with pytest.raises(Asked):
            step(replace(batch([rows], [0], [0]), sample=greedy(1)), "tokens")
    one, few, many = asked
    common = {"embedding", "norm", "rope_append", "attention", "gated", "gather_rows", "adjust", "sample", "quantize"}
    assert set(one) == set(few) == {*common, "matvec"}
    assert set(many) >= {"norm", "tile", "attention"}
    assert "logprobs" not in one + few + many
    assert len(few) == 11
    step.close()
    backend.close()


def test_a_thread_compiles_what_no_step_has_wanted(step: CpuStep) -> None:
    tables = step._open().tables
    inputs = batch([3], [0], [0])
    step(inputs, "logits")
    joined()
    assert not tables.missing
    assert tables.jobs[:, 0].all()


def test_a_closed_step_ends_that_thread(step: CpuStep, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = step._open()
    compiled.closed = True
    monkeypatch.setattr(Tables, "load", lambda *_: pytest.fail("compiled a kernel"))
    compiled.load_rest()
    joined()
    assert compiled.tables.missing


def test_steps_give_the_same_whenever_their_kernels_were_compiled(step: CpuStep) -> None:
    inputs = replace(batch([9, 20, 1], [0, 0, 0], [0, 4, 8]), sample=greedy(3))
    cold = step(inputs, "both")
    warm = step(inputs, "both")
    assert np.array_equal(cold.logits, warm.logits)
    assert np.array_equal(cold.tokens, warm.tokens)  # type: ignore[arg-type]


def test_a_model_loads_the_kernels_that_are_on_disk(
    step: CpuStep, restart: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = step._open().tables
    tables.load([*tables.missing], LEVEL)
    restart()
    monkeypatch.setattr(jit, "compile_object", lambda *_: pytest.fail("it is on disk"))
    backend = CpuBackend(threads=1)
    again = backend.compile(step._open().program, step._open().weights._source, LIMITS)
    assert isinstance(again, CpuStep)
    assert not again._open().tables.missing
    again.close()
    backend.close()
