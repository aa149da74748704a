"""An image through a tower and the model around its rows, in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quarrel.cpu_backend.backend import create as cpu
from quarrel.ops.contract import rel_error
from quarrel.ops.step import Joined
from quarrel.triton_backend.backend import create
from quarrel.triton_backend.inputs import _join
from quarrel.triton_backend.runtime.launch import INTERPRETED
from quarrel.triton_backend.runtime.rows import DeviceRows
from tests.paths import need_cases
from tests.sight import CASES, EYES, KINDS, WHOLE, WHOLES, encoded_rows, image_rows, on, text_logits, whole_logits
from tests.triton_backend.test_models import EVERYTHING

SLOW = ("qwen3vlmoe",) if INTERPRETED else ()
"""Experts of a whole prompt take the interpreter many minutes."""


@pytest.mark.parametrize("case", CASES if EVERYTHING else CASES[:1])
def test_an_image_is_seen_as_by_an_independent_implementation(case: str) -> None:
    folder, run = need_cases(case), on(create())
    rows, grid = image_rows(folder, run)
    assert rel_error(rows, np.load(folder / "image_embd_hf.npy")) < 1e-5
    assert rel_error(text_logits(folder, rows, grid, run), np.load(folder / "image_logits_hf.npy")) < 1e-5


@pytest.mark.parametrize("kind", KINDS if EVERYTHING else KINDS[4:5])
def test_every_kind_of_tower_sees_as_the_original(kind: str) -> None:
    assert rel_error(encoded_rows(kind, create())[0], np.load(EYES / kind / "rows.npy")) < 1e-5


@pytest.mark.parametrize("kind", [kind for kind in WHOLES if kind not in SLOW] if EVERYTHING else WHOLES[1:2])
def test_a_folder_sees_a_picture_as_transformers_does(kind: str) -> None:
    assert rel_error(whole_logits(kind, create()), np.load(WHOLE / kind / "logits.npy")) < 1e-5


def test_rows_stay_on_the_device_and_come_to_a_step_in_pieces() -> None:
    kind = "pixtral"
    made = encoded_rows(kind, create())
    assert all(isinstance(rows, DeviceRows) for rows in made)
    wanted = np.load(EYES / kind / "rows.npy")
    assert rel_error(made[0], wanted) < 1e-5
    target = torch.zeros(wanted.size + 7)
    _join(target, Joined([made[0][:5], np.asarray(made[0])[5:9], made[0][9:]]))
    assert np.array_equal(target[: wanted.size].numpy().reshape(wanted.shape), np.asarray(made[0]))
    assert not target[wanted.size :].any()


def test_in_16_bits_the_library_attends_to_windows_and_images() -> None:
    wanted = np.load(EYES / "qwen25vl" / "rows.npy")
    rows, mirrored = encoded_rows("qwen25vl", create(), "float16")
    assert 1e-5 < rel_error(rows, wanted) < 3e-3
    assert rel_error(mirrored, encoded_rows("qwen25vl", cpu())[1]) < 3e-3
