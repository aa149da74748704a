"""The kernel cache: found again, never for another level or source, and never trusted when damaged."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from quarrel.cpu_backend.runtime import features, jit
from quarrel.cpu_backend.runtime.ir import I64, Kernel

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
