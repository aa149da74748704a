"""A timed step, on a GPU or in the interpreter: plain launches with a mark behind each, by a clock of the test."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quarrel.bench import phases
from quarrel.bench.subject import Source, Subject, limits_for
from quarrel.bench.workload import Test as Work
from quarrel.gguf import GGUFFile
from quarrel.ops.profile import Profiles
from quarrel.triton_backend import step as step_module
from quarrel.triton_backend.backend import TritonBackend
from quarrel.triton_backend.timing import HostClock, Stopwatch
from tests.tiny_model import write_tiny_model


class Ticks:
    """A clock that is one second later at each mark."""

    def __init__(self) -> None:
        self.started, self.marks = 0, 0

    def start(self, nodes: int) -> None:
        self.started = nodes

    def mark(self) -> None:
        self.marks += 1

    def seconds(self) -> list[float]:
        return [1.0] * self.marks


def test_every_kernel_of_a_step_is_timed_and_has_a_phase(
    tmp_path: Path, backend: TritonBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Ticks()
    with GGUFFile.open(write_tiny_model(tmp_path / "tiny.gguf")) as file:
        source = Source.of(file, 64)
        subject = Subject(source, backend, limits_for([Work("decode", 4)], 16, False), "float32")
        step, inputs = subject.step, subject.layout.step([(0, 0, 3)], 1)
        assert isinstance(step, Profiles)
        want = step(inputs, "logits")
        monkeypatch.setattr(step_module, "EventClock" if step._on_gpu else "HostClock", lambda: clock)  # type: ignore[attr-defined]
        found = step.profile(inputs, "logits")
        assert np.array_equal(found.outputs.logits, want.logits)  # type: ignore[arg-type]
        kernels = [part.kernel for part in found.parts if part.kernel]
        assert clock.started == len([part for part in found.parts if not part.kernel])
        assert clock.marks == len(found.parts) == clock.started + len(kernels)
        assert set(found.by_phase()) == {"embedding", "attention", "ffn", "norm", "head"}
        assert found.by_phase()["norm"] == 1.0 + len([k for k in kernels if k in ("norm_rows", "norm_int8x2_rows")])
        assert set(found.by_layer("attention")) == {"blk.0.attn"}
        assert not found.by_phase().keys() & {"sampling"}
        step(inputs, "logits")
        assert clock.marks == len(found.parts), "a step that is not timed marks nothing"
        subject.close()


def test_the_phases_of_a_model_are_measured_through_the_plain_launches(
    tmp_path: Path, backend: TritonBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phases, "reader", lambda: lambda: (40.0, 300.0))
    with GGUFFile.open(write_tiny_model(tmp_path / "tiny.gguf")) as file:
        source, test = Source.of(file, 64), Work("decode", 1)
        subject = Subject(source, backend, limits_for([test], 16, False), "float32")
        found = phases.measure_phases(subject, test, 1, "tiny", "no")
        subject.close()
    assert {row.phase for row in found.phases} == {"embedding", "attention", "ffn", "norm", "head", "sampling"}
    assert any(kernel.kernel == "norm_rows" for kernel in found.kernels)
    assert found.gpu is not None
    assert found.gpu.watts == 300.0
    assert not found.note


def test_a_launch_that_fails_leaves_the_plan_as_it_was() -> None:
    def fail(batch: object) -> None:
        raise RuntimeError("no such kernel")

    plain = object()
    plan: Any = SimpleNamespace(launch=plain, launches=[fail])
    with pytest.raises(RuntimeError, match="no such kernel"):
        Stopwatch(HostClock()).run(plan, [True], None)  # type: ignore[arg-type]
    assert plan.launch is plain


def test_the_clock_of_the_host_measures_what_lies_between_marks() -> None:
    clock = HostClock()
    clock.start(2)
    clock.mark()
    clock.mark()
    assert len(clock.seconds()) == 2
    assert all(seconds >= 0 for seconds in clock.seconds())
