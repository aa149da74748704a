"""Towers and the models around them against Hugging Face's implementation, and proof that the limits are sharp."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from quarrel.cpu_backend.backend import create
from quarrel.errors import UnsupportedModel
from quarrel.gguf import GGUFFile
from quarrel.models import Keys, Tensors, read_spec
from quarrel.models.tower import positions, read_tower, seeing, tower_tensors
from quarrel.ops.contract import rel_error
from quarrel.ops.program import Program
from quarrel.ops.reference import empty_cache, run_program
from quarrel.ops.step import StepInputs
from tests.paths import need_cases
from tests.sight import CASES, EYES, KINDS, encoded_rows, image_rows, on, text_logits


def reference(program: Program, tensors: Tensors, inputs: StepInputs, want: str) -> Mapping[str, np.ndarray]:
    caches = [empty_cache(layer, 8, 16, fill=np.nan) for layer in program.caches]
    return run_program(
        program, tensors, caches, inputs, [np.full((2, *s.shape), np.nan, np.float32) for s in program.states]
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("where", ["numpy", "cpu"])
def test_an_image_is_seen_as_by_an_independent_implementation(case: str, where: str) -> None:
    folder, run = need_cases(case), reference if where == "numpy" else on(create())
    rows, grid = image_rows(folder, run)
    assert rel_error(rows, np.load(folder / "image_embd_hf.npy")) < 1e-5
    assert rel_error(text_logits(folder, rows, grid, run), np.load(folder / "image_logits_hf.npy")) < 1e-5


@pytest.mark.parametrize("fault", ["places", "see_to", "image_rows"])
def test_a_single_fault_in_what_an_image_adds_shows(fault: str) -> None:
    case = "gemma3_vl" if fault == "see_to" else "qwen3vl"
    folder = need_cases(case)

    def faulty(program: Program, tensors: Tensors, inputs: StepInputs, want: str) -> Mapping[str, np.ndarray]:
        changes = {"places": np.stack([inputs.positions] * 3, 1), "see_to": inputs.positions}
        changes["image_rows"] = np.where(inputs.image_rows > 0, inputs.image_rows - 1, inputs.image_rows)  # type: ignore[operator]
        return reference(program, tensors, replace(inputs, **{fault: changes[fault]}), want)

    rows, grid = image_rows(folder, reference)
    assert rel_error(text_logits(folder, rows, grid, faulty), np.load(folder / "image_logits_hf.npy")) > 1e-3


def test_positions_of_a_square_that_fits_are_the_tables_own() -> None:
    with GGUFFile.open(need_cases("qwen3vl") / "mmproj-f16.gguf") as file:
        tower, table = read_tower(file, tower_tensors(file)), file.array("v.position_embd.weight")
        assert np.array_equal(positions(tower, table, 8, 8).reshape(64, -1), table)
        stretched = positions(tower, table, 15, 3)
        assert np.allclose(stretched[1, 1], (table.reshape(8, 8, -1)[0:2, 3:5].mean((0, 1))), atol=1e-7)


def test_a_tower_of_another_model_is_refused_with_both_sizes() -> None:
    other, own = need_cases("qwen35_vl"), need_cases("qwen3vl")
    with GGUFFile.open(own / "model-q4_0x.gguf") as file, GGUFFile.open(other / "mmproj-f16.gguf") as projector:
        tower = read_tower(projector, tower_tensors(projector))
        with pytest.raises(UnsupportedModel, match="rows of 192 in 1 parts, and the model wants 192 in 3"):
            seeing(read_spec(file), Keys(file.metadata, "qwen3vl"), tower)
        with pytest.raises(UnsupportedModel, match="wanted 'clip'"):
            read_tower(file, tower_tensors(file))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tower_sees_as_the_original(kind: str) -> None:
    wanted = np.load(EYES / kind / "rows.npy")
    rows, mirrored = encoded_rows(kind, create())
    assert rel_error(rows, wanted) < 1e-5
    assert rows.shape == mirrored.shape
    assert rel_error(mirrored, wanted) > 0.1
    if kind in ("llava", "gemma4", "qwen25vl"):  # whose rows are the program's own
        assert rel_error(image_rows(EYES / kind, reference, "mmproj.gguf")[0], wanted) < 1e-5
