"""Short, repeatable runs of the fuzzer over every op on the CPU and on Metal; `python -m fuzz.ops` is the long one."""

from __future__ import annotations

import shlex

import numpy as np
import pytest
from hypothesis import find

from fuzz.ops import OPS as KNOWN
from fuzz.ops import fuzz_op, line_of, main, standing_in
from fuzz.reproduction import case_of, text_of
from fuzz.values import KINDS, Twist, check
from quarrel.errors import RequestError, UnsupportedOp
from quarrel.ops import ALL_OPS, EXTRA_OPS
from quarrel.ops.compare import check_case
from quarrel.ops.contract import Case, Op
from quarrel.ops.linear import ADD, AddSpec
from quarrel.ops.registry import backend

OPS = [*ALL_OPS.values(), *EXTRA_OPS.values()]


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_random_shapes_agree_with_the_reference(op: Op) -> None:
    assert fuzz_op(backend("cpu"), op, "float32", 16, seed=1) > 0


@pytest.mark.parametrize("name", ["expert_up", "expert_down"])
def test_as_many_experts_as_a_model_has_are_drawn(name: str) -> None:
    op = KNOWN[name]
    assert op.strategy is not None
    case = find(op.strategy(), lambda case: (case.spec.n_experts, case.spec.used) == (128, 6))
    check_case(backend("cpu"), op, case, "float32")


@pytest.mark.parametrize("name", ["norm", "linear", "attention", "route", "conv", "sample", "expert_down"])
def test_random_shapes_on_metal(name: str) -> None:
    with standing_in("mlx"):
        fuzz_op(backend("mlx"), KNOWN[name], "auto", 2, seed=2)


class Off:
    """A backend whose every result is one part in a thousand too large."""

    name = "off"

    def run_op(self, op, spec, inputs, compute):  # type: ignore[no-untyped-def]
        return tuple(np.asarray(x) * 1.001 for x in op.reference(spec, *inputs))

    def compute_of(self, choice):  # type: ignore[no-untyped-def]
        return choice


def test_a_backend_that_is_slightly_off_is_caught() -> None:
    with pytest.raises(AssertionError, match=r"add\.y is off by 1\.00e-03"):
        check_case(Off(), ADD, Case(AddSpec(64), {"T": 3}), "float32")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", KNOWN)
def test_a_case_is_one_line_and_back(name: str) -> None:
    for case in KNOWN[name].cases():
        assert case_of(text_of(case)) == case


@pytest.mark.parametrize("text", ["print(1)", "Case(spec=1 + 1)", "Case(", "GGMLType.F32", "Case(spec=__import__('os'))"])
def test_what_is_no_case_is_not_run(text: str) -> None:
    with pytest.raises(RequestError, match="paste what a fuzzer printed"):
        case_of(text)


def test_a_failure_is_shrunk_and_told_in_one_line() -> None:
    with pytest.raises(AssertionError) as caught:
        fuzz_op(Off(), ADD, "float32", 20, seed=1)  # type: ignore[arg-type]
    (line,) = caught.value.__notes__[:1]
    start = line_of("off", ADD, "float32", Case(AddSpec(1), {"T": 1}), Twist()).partition("scale=")[0]
    assert line.startswith(start)
    assert "'T'" in line


def test_that_line_runs_again(capsys: pytest.CaptureFixture[str]) -> None:
    line = line_of("cpu", ADD, "float32", Case(AddSpec(3), {"T": 2}), Twist("ties"))
    assert main(shlex.split(line)[3:]) == 0
    assert "agrees" in capsys.readouterr().out


class Declining(Off):
    """A backend that lacks an op."""

    def device(self) -> str:
        return "nothing"

    def run_op(self, op, spec, inputs, compute):  # type: ignore[no-untyped-def]
        raise UnsupportedOp("off", op.name, spec, [])


def test_what_was_always_declined_does_not_count_as_right(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fuzz.ops.create_backend", lambda name: Declining())
    assert main(["--op", "add", "--compute", "float32", "--seconds", "0.1"]) == 1
    assert "declined every case of add: none was compared" in capsys.readouterr().out


class Leaking(Off):
    """A backend in which a row that is not finite spoils the first one."""

    def run_op(self, op, spec, inputs, compute):  # type: ignore[no-untyped-def]
        (y,) = op.reference(spec, *inputs)
        return (np.where(np.arange(len(y))[:, None] == 0, y + 0 * y.sum(), y),)


def test_a_backend_whose_rows_leak_is_caught() -> None:
    with np.errstate(all="ignore"), pytest.raises(AssertionError, match="of other rows changes with row 3, which is nan"):
        check(Leaking(), ADD, Case(AddSpec(64), {"T": 5}), "float32", Twist("nan", 3), 0)  # type: ignore[arg-type]


def test_a_row_that_holds_a_nan_of_its_own_does_not_count_as_changed() -> None:
    case = "Case(spec=AdjustSpec(n=1), dims={'T': 1, 'R': 2, 'most': 0, 'odd': 1, 'masks': 0}, note='')"
    check(backend("cpu"), KNOWN["adjust"], case_of(case), "float32", Twist("nan", 0), 0)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_value_is_checked(kind: str) -> None:
    if kind in ("plain", "ties", "scaled"):
        with pytest.raises(AssertionError, match="off by"):
            check(Off(), ADD, Case(AddSpec(64), {"T": 5}), "float32", Twist(kind, -3), 0)  # type: ignore[arg-type]
    check(backend("cpu"), ADD, Case(AddSpec(64), {"T": 5}), "float32", Twist(kind, -3), 0)
