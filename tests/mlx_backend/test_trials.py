"""The sizes of released models, windows, groups and tails: where contracts' cases are too small or too round."""

from __future__ import annotations

import pytest

from quarrel.gguf import GGMLType
from quarrel.mlx_backend.linear.matvec import parts_of
from quarrel.ops.formats import WEIGHT_TYPES
from tests.mlx_backend.cases import running
from tests.mlx_backend.emulated import FAST
from tests.mlx_backend.trials import FORMS, MODELS, TRIALS, Model, linear, of_model


@pytest.mark.parametrize("name", TRIALS)
def test_results_and_every_row_of_them_match_the_reference(name: str) -> None:
    with running(FAST):
        assert TRIALS[name].error() <= 1


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_a_decoded_token_of_released_models(model: Model) -> None:
    with running(FAST):
        for trial in of_model(model, parts_of):
            assert trial.error() <= 1, trial.spec


@pytest.mark.parametrize(("i", "type"), list(enumerate(WEIGHT_TYPES)), ids=lambda x: getattr(x, "name", ""))
def test_two_simd_groups_share_rows_of_every_format(i: int, type: GGMLType) -> None:
    op, count = FORMS[i % len(FORMS)]
    with running(FAST):
        assert linear(op, [type] * count, 4096, parts=2).error() <= 1


def test_matrices_of_7b_models_are_shared_by_two_groups() -> None:
    """What the trials above stand for."""
    mistral = MODELS["Mistral-7B"]
    shapes = [(mistral.qkv, mistral.width), (mistral.width, mistral.heads), (mistral.width, mistral.ffn)]
    assert [parts_of(*s) for s in shapes] == [2, 2, 2]
