"""The check before timing: honest files of any making pass with room to spare, and planted errors do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quarrel.bench import limit, session
from quarrel.bench.check import FINITE, Checked, Ways, check
from quarrel.bench.limit import ShakenStep
from quarrel.bench.subject import Source, Subject, limits_for
from quarrel.bench.workload import Test as Work
from quarrel.cpu_backend.backend import CpuBackend
from quarrel.errors import QuarrelError
from quarrel.gguf import GGUFFile
from quarrel.ops.contract import Compute
from quarrel.ops.linear import LINEAR
from quarrel.ops.rounding import shake_inputs, shake_result
from quarrel.ops.step import Backend, ComputeChoice
from tests.bench.ways import ERRORS, MID, TINY, WEIGHTS, Rounded, Size, planted, write
from tests.paths import need_cases

TESTS = [Work("prefill", 34), Work("decode", 2, 8, 2)]
ROOM = 2.0
"""What must at least lie between an honest way and the limit."""


@contextmanager
def subject(path: Path, backend: Backend, compute: ComputeChoice = "auto") -> Iterator[Subject]:
    with GGUFFile.open([path]) as file:
        source = Source.of(file, 64)
        made = Subject(source, backend, limits_for(TESTS, 34, source.encodes), compute)
        yield made
        made.close()


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


def model(folder: Path, kind: str, size: Size = TINY) -> Path:
    path = folder / f"{kind.replace(' ', '-')}-{size.width}.gguf"
    return path if path.exists() else write(path, kind, size)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_honest_files_of_any_making_pass_on_the_cpu(kind: str, folder: Path) -> None:
    backend = CpuBackend(threads=2)
    with subject(model(folder, kind), backend) as whole:
        found = check(whole, "auto", 2, 2)
    assert found.allowed.keys() == found.errors.keys()
    assert all(ROOM * error <= found.allowed[name] for name, error in found.errors.items())
    assert max(found.allowed.values()) < 0.5, "a limit that lets anything pass"
    backend.close()


@pytest.mark.parametrize(("kind", "compute"), [("uneven gains", "float16"), ("random blocks", "bfloat16")])
def test_honest_roundings_of_sixteen_bits_stay_at_half_the_limit(kind: str, compute: Compute, folder: Path) -> None:
    """Two ways that store different values between ops, which the constant limits of before could not tell from errors."""
    with subject(model(folder, kind), Rounded(compute)) as whole:
        found = check(whole, "auto", 1, 2)
    assert 0 < found.errors["prompt"] < 0.1
    assert all(ROOM * error <= found.allowed[name] for name, error in found.errors.items())


def on_cpu(kind: type[CpuBackend]) -> Backend:
    return kind(threads=2)


def in_float16(kind: type[Rounded]) -> Backend:
    return kind("float16")


@pytest.mark.parametrize(
    ("make", "kind", "compute", "size"),
    [
        (on_cpu, CpuBackend, "auto", TINY),
        (on_cpu, CpuBackend, "float32", TINY),
        (on_cpu, CpuBackend, "auto", MID),
        (in_float16, Rounded, "auto", TINY),
    ],
)
def test_planted_errors_exceed_the_limit(
    make: Callable[[type], Backend], kind: type, compute: ComputeChoice, size: Size, folder: Path
) -> None:
    backend = make(kind)
    with subject(model(folder, "gaussian", size), backend, compute) as whole:
        ways = Ways.of(whole, compute, 1)
        references, allowed, _ = ways.op_by_op(2)
        for error in ERRORS:
            errors = replace(ways, backend=make(planted(kind, error))).compiled(references)
            assert any(errors[name] > allowed[name] for name in references), (error, errors, allowed)


def test_a_wrong_step_is_refused_with_what_was_allowed(folder: Path) -> None:
    backend = planted(CpuBackend, "wrong rope")(threads=2)
    with subject(model(folder, "gaussian"), backend) as whole:
        with pytest.raises(QuarrelError, match=r"cpu: prompt: off by .*, allowed 0\.0.*; no speed is reported"):
            check(whole, "auto", 1, 2)
    backend.close()


def test_near_ties_between_experts_are_among_the_draws() -> None:
    backend = CpuBackend(threads=2)
    with subject(need_cases("granitehybrid", "model-q4_0x.gguf"), backend) as whole:
        found = check(whole, "auto", 2, 2)
    assert all(ROOM * error <= found.allowed[name] for name, error in found.errors.items())
    backend.close()


def test_the_limit_grows_with_the_noise_and_shakes_no_integer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = []
    with subject(model(folder, "gaussian"), CpuBackend(threads=2), "float32") as whole:
        for loud in (4.0, 40.0):
            monkeypatch.setattr(limit, "LOUD", loud)
            allowed.append(Ways.of(whole, "float32", 1).op_by_op(2)[1]["prompt"])
        assert allowed[1] == pytest.approx(10 * allowed[0], rel=0.2)
        small = whole.layout.limits
        shaken = ShakenStep(whole.backend, whole.source.program, whole.source.tensors, small, "float32", {}, 0)
        (step,) = whole.layout.prefill(0, 4)
        tokens = shaken(step, "tokens").tokens
        assert tokens is not None
        assert tokens.dtype == np.int32
        whole.backend.close()  # type: ignore[attr-defined]


def test_steps_whose_limit_lets_anything_pass_are_not_counted_as_checked() -> None:
    errors, limits = {"prompt": 0.01, "token": 0.01, FINITE: 0.0}, {"prompt": 1.0, "token": 0.09, FINITE: 0.0}
    chaotic = Checked((0,), 9, errors, limits, 1.0)
    assert chaotic.too_wide == ["prompt"]
    assert session._said(chaotic) == "9 ops, 2 of 3 steps"
    assert session._said(replace(chaotic, allowed=dict.fromkeys(errors, 0.1))) == "9 ops, 3 steps"


def test_shaken_values_are_off_by_what_was_asked_for() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((400, 64)).astype(np.float32) * np.where(np.arange(64) == 3, 100, 1).astype(np.float32)
    off = np.sqrt(np.mean((shake_result(x, 0.01, rng) - x) ** 2, 0)) / np.sqrt(np.mean(x**2, 0))
    assert np.all((off > 0.009) & (off < 0.014))
    steps = np.abs(x).reshape(400, 2, 32).max(-1) / 127
    codes = np.abs(shake_inputs("int8", rng)(LINEAR, x) - x).reshape(400, 2, 32)
    assert np.all(codes <= 0.501 * steps[..., None])
    assert np.all(codes.max(-1) > 0.3 * steps)
