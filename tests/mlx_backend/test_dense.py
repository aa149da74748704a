"""Long prompts on a GPU with matrix units: weights as floats and MLX's matmul, on whatever MLX runs on here."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from quarrel.gguf import GGMLType
from quarrel.mlx_backend.linear.dense import LEAST_ROWS
from quarrel.mlx_backend.linear.kernels import Fusion, declined, find
from quarrel.mlx_backend.runtime.kernel import generation
from quarrel.ops.linear import LINEAR, LINEAR_ADD, NORM_GATE_UP, NORM_LINEAR, LinearSpec
from tests.mlx_backend.cases import running
from tests.mlx_backend.emulated import FAST
from tests.mlx_backend.trials import linear


@pytest.fixture(name="_m5", autouse=True)
def _fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quarrel.mlx_backend.linear.kernels.generation", lambda: 17)


@pytest.mark.parametrize(
    ("op", "types", "k"),
    [
        (LINEAR, [GGMLType.Q6_K], 256),
        (LINEAR_ADD, [GGMLType.F16], 77),
        (NORM_LINEAR, [GGMLType.Q4_1, GGMLType.BF16], 64),
        (NORM_GATE_UP, [GGMLType.Q4_K, GGMLType.Q4_K], 256),
        (NORM_GATE_UP, [GGMLType.Q8_0, GGMLType.MXFP4], 64),
    ],
    ids=lambda v: getattr(v, "name", str(v)),
)
def test_many_rows_agree_with_the_reference(
    op: object, types: list[GGMLType], k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32: in half precision MLX's CPU adds up in it too, its Metal kernels do not."""
    used = []
    matmul = mx.matmul
    monkeypatch.setattr(mx, "matmul", lambda a, b: used.append(a.shape) or matmul(a, b))
    trial = replace(linear(op, types, k, rows=LEAST_ROWS + 1, single=False, n=40), compute="float32")  # type: ignore[arg-type]
    with running(FAST):
        assert trial.error() <= 1
    assert used == [(LEAST_ROWS + 1, k)] * len(types)


def test_fewer_rows_take_the_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "matmul", None)
    with running(FAST):
        assert linear(LINEAR, [GGMLType.Q5_K], 512, rows=70, single=False).error() <= 1


def test_explain_says_so() -> None:
    spec = LinearSpec(GGMLType.Q4_K, 4, 256)
    taken, reasons = find("prefill", Fusion((spec,)))
    assert (taken and taken.name, reasons) == ("mx.matmul from 256 rows on", [])
    assert declined(spec) == ["mx.matmul from 256 rows on, for this GPU has matrix units"]
    decode, _ = find("decode", Fusion((spec,)))
    assert decode is not None
    assert decode.name == "matvec"


@pytest.mark.parametrize(("name", "number"), [("applegpu_g13s", 13), ("applegpu_g17p", 17), ("x86_64", 0), ("", 0)])
def test_the_generation_is_in_the_name_of_the_gpu(name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": name})
    assert generation() == number


def test_both_of_a_gated_pair_are_in_one_tile() -> None:
    """Formats that differ take a branch each; 33 rows end within a group of 16."""
    for types in ([GGMLType.Q4_K, GGMLType.Q4_K], [GGMLType.Q5_K, GGMLType.Q6_K]):
        for n in (33, 100):
            trial = replace(linear(NORM_GATE_UP, types, 256, rows=70, single=False, n=n), compute="float32")
            with running(FAST):
                assert trial.error() <= 1
