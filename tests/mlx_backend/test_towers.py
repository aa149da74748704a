"""An image through a tower and the model around its rows, on emulated Metal."""

from __future__ import annotations

import numpy as np
import pytest

from quarrel.ops.contract import rel_error
from tests.mlx_backend.cases import running
from tests.mlx_backend.emulated import FAST
from tests.mlx_backend.test_models import EVERYTHING
from tests.paths import need_cases
from tests.sight import CASES, EYES, KINDS, WHOLE, WHOLES, encoded_rows, image_rows, on, text_logits, whole_logits


@pytest.mark.parametrize("case", CASES if EVERYTHING else CASES[:1])
def test_an_image_is_seen_as_by_an_independent_implementation(case: str) -> None:
    folder = need_cases(case)
    with running(FAST) as backend:
        rows, grid = image_rows(folder, on(backend))
        assert rel_error(rows, np.load(folder / "image_embd_hf.npy")) < 1e-5
        assert rel_error(text_logits(folder, rows, grid, on(backend)), np.load(folder / "image_logits_hf.npy")) < 1e-5


@pytest.mark.parametrize("kind", KINDS if EVERYTHING else KINDS[2:3])
def test_every_kind_of_tower_sees_as_the_original(kind: str) -> None:
    with running(FAST) as backend:
        assert rel_error(encoded_rows(kind, backend)[0], np.load(EYES / kind / "rows.npy")) < 1e-5


@pytest.mark.parametrize("kind", WHOLES if EVERYTHING else WHOLES[3:4])
def test_a_folder_sees_a_picture_as_transformers_does(kind: str) -> None:
    with running(FAST) as backend:
        assert rel_error(whole_logits(kind, backend), np.load(WHOLE / kind / "logits.npy")) < 1e-5
