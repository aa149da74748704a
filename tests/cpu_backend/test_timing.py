"""A timed step: the same results, a time for every stage that ran, and phases that cover each of its kernels."""

from __future__ import annotations

import time

import numpy as np
import pytest

from quarrel.bench.subject import Source, Subject, limits_for
from quarrel.bench.workload import Test as Work
from quarrel.cpu_backend import timing
from quarrel.cpu_backend.backend import CpuBackend
from quarrel.cpu_backend.runtime import features
from quarrel.cpu_backend.runtime.pool import Pool
from quarrel.cpu_backend.step import CpuStep
from quarrel.errors import RequestError
from quarrel.gguf import GGUFFile, resolve
from quarrel.ops.profile import PHASES, Profiled, Profiles
from tests.cpu_backend.test_pool import Ring
from tests.paths import need_cases

HYBRID = set(PHASES) - {"ffn"}


def profiled(path: str) -> tuple[Profiled, float]:
    """A decode step behind a prompt, and the seconds of the whole by another clock."""
    backend = CpuBackend(threads=2)
    with GGUFFile.open(resolve(path).paths) as file:
        source = Source.of(file, 64)
        subject = Subject(source, backend, limits_for([Work("decode", 8)], 64, source.encodes), "auto")
        prompt, decode = subject.layout.step([(0, 0, 20)], 1), subject.layout.decode(20, 1, False)
        assert isinstance(subject.step, Profiles)
        subject.step(prompt, "logits")
        plain = subject.step(decode, "logits")
        subject.step.profile(prompt, "logits")
        began = time.perf_counter()
        found = subject.step.profile(decode, "logits")
        wall = time.perf_counter() - began
        assert np.array_equal(found.outputs.logits, plain.logits)  # type: ignore[arg-type]
        assert found.outputs.tokens is None
        subject.close()
    backend.close()
    return found, wall


def test_the_parts_of_a_hybrid_model_make_up_its_step() -> None:
    found, wall = profiled(str(need_cases("granitehybrid", "model-q4_0x.gguf")))
    assert len(found.parts) == len(found.seconds)
    assert all(seconds >= 0 for seconds in found.seconds)
    assert 0 < sum(found.seconds) <= wall
    phases = found.by_phase()
    assert set(phases) == HYBRID - {"sampling"}
    assert list(phases) == [phase for phase in PHASES if phase in phases]
    assert sum(phases.values()) == pytest.approx(sum(found.seconds))
    assert set(found.by_layer("scan")) == set(found.by_layer("convolution")) == {"blk.0.attn", "blk.2.attn"}
    assert set(found.by_layer("routing", "experts")) == {f"blk.{i}.ffn" for i in range(3)}
    by_kernel = {part.kernel.partition("/")[0]: part.phase for part in found.parts}
    assert by_kernel["norm"] == by_kernel["gated_norm"] == "norm"
    assert by_kernel["float_linear"] == "routing"


def test_only_what_was_asked_for_is_timed() -> None:
    found, _ = profiled("demo")
    assert set(found.by_phase()) == {"embedding", "attention", "ffn", "norm", "head"}
    assert {part.path for part in found.parts if part.phase == "ffn"} == {
        part.path for part in found.parts if part.path.endswith(".ffn")
    }


def test_what_the_host_computes_between_stages_is_timed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(features.level(), 2)
    work = Ring(pool, 5)
    work.header[0] = 7
    clock = iter([10.0, 12.5])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    times, ran = timing.StageTimes(), []
    times.run(pool, (0, 1, 2, 3, 4), work.table)
    times.run(pool, (5,), lambda: ran.append(True))
    parts = [timing.Part("", "", str(i), "head") for i in range(6)]
    found, seconds = times.of(parts)
    assert found == tuple(parts)
    assert seconds[5] == 2.5
    assert ran
    assert all(s >= 0 for s in seconds)
    assert (work.result[:7] == 5).all()
    pool.close()


def test_a_closed_step_is_not_timed() -> None:
    step = CpuStep.__new__(CpuStep)
    step._compiled = None
    with pytest.raises(RequestError, match="the step is closed"):
        step.profile(None, "logits")  # type: ignore[arg-type]
