"""The choice of a feature level and of the number of threads."""

from __future__ import annotations

import os

import pytest

from quarrel.cpu_backend.backend import CpuBackend
from quarrel.cpu_backend.runtime import features
from quarrel.errors import ConfigError, UnsupportedOp
from quarrel.ops import LINEAR
from quarrel.ops.step import Backend


def test_every_machine_can_run_the_generic_level() -> None:
    assert features.levels()[-1].name == "generic"
    assert all(level.arch == features.ARCH for level in features.levels())


def test_the_best_level_is_the_first() -> None:
    assert features.level() == features.levels()[0]
    assert features.level("generic").dot == "plain"


def test_an_unknown_level_is_refused_with_the_ones_there_are() -> None:
    with pytest.raises(ConfigError, match=r"CPU level 'amx' cannot run here: use one of .*generic"):
        features.level("amx")


def test_threads_follow_the_affinity_and_the_caller() -> None:
    assert features.threads(3) == 3
    assert 1 <= features.threads() <= (os.cpu_count() or 1)
    if hasattr(os, "sched_getaffinity"):
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(allowed)})
        try:
            assert features.threads() == 1
        finally:
            os.sched_setaffinity(0, allowed)


def test_hyper_threads_of_one_core_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "siblings", lambda cpu: f"{cpu % 2},{cpu % 2 + 2}")
    monkeypatch.setattr(features, "allowed_cores", lambda: [0, 1, 2, 3])
    assert features.threads() == 2


def test_the_backend_says_what_it_runs_on() -> None:
    backend = CpuBackend(threads=1)
    assert isinstance(backend, Backend)
    assert backend.unavailable() is None
    assert backend.device().endswith(", 1 thread")
    assert backend.free_bytes() > 1 << 20
    assert (backend.compute_of("auto"), backend.compute_of("float32")) == ("int8", "float32")


def test_half_precision_arithmetic_is_refused() -> None:
    backend = CpuBackend(threads=1)
    with pytest.raises(UnsupportedOp, match="no implementation of any op for compute=float16"):
        backend.run_op(LINEAR, None, (), "float16")
