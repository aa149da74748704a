"""MLX's own quantized_matmul in the place of our kernels, on whatever MLX runs on here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quarrel.gguf import GGMLType
from quarrel.mlx_backend.linear.kernels import Fusion, declined, find
from quarrel.mlx_backend.linear.quantized import EXACT
from quarrel.ops.contract import Case
from quarrel.ops.linear import LINEAR, LinearSpec
from tests.mlx_backend.cases import running
from tests.mlx_backend.emulated import FAST
from tests.mlx_backend.trials import FORMS, linear, of_case


@pytest.fixture(name="_mlx", autouse=True)
def _fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARREL_METAL", "mlx")


@pytest.mark.parametrize("type", EXACT, ids=lambda t: t.name)
def test_formats_are_held_exactly(type: GGMLType) -> None:
    """In float32: in half precision MLX's CPU adds up in it too, its Metal kernels do not."""
    with running(FAST):
        for op, count in FORMS:
            for single in (True, False):
                trial = replace(linear(op, [type] * count, 128, rows=3, single=single), compute="float32")
                assert trial.error() <= 1, (op.name, single)


@pytest.mark.parametrize("bits", [2, 3])
def test_codes_of_few_bits_are_given_as_they_are(bits: int) -> None:
    case = Case(LinearSpec(GGMLType.Q4_1, 67, 128), {"T": 3, "bits": bits})
    with running(FAST):
        assert of_case(LINEAR, case, "float32").error() <= 1


def test_what_it_takes_and_declines_is_said() -> None:
    taken, reasons = find("decode", Fusion((LinearSpec(GGMLType.Q4_K, 4, 256),)))
    assert taken is not None
    assert taken.name == "matvec"
    assert reasons == [
        "mx.quantized_matmul: needs a format that mx.quantized_matmul holds exactly (Q4_0, Q4_1, Q8_0, MXFP4), got Q4_K"
    ]
    said = declined(LinearSpec(GGMLType.Q8_0, 4, 256))
    assert said == ["QUARREL_METAL=mlx: mx.quantized_matmul in place of our kernels"]


def test_without_the_variable_it_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUARREL_METAL")
    taken, reasons = find("prefill", Fusion((LinearSpec(GGMLType.Q8_0, 4, 256),)))
    assert (taken and taken.name, reasons) == ("matmul", [])
