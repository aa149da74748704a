"""Whole models against the reference logits, fed at once and in pieces, with the same bits either way."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from quarrel.cpu_backend.backend import CpuBackend
from quarrel.gguf import GGUFFile
from quarrel.models import Tensors, assemble
from quarrel.ops.contract import rel_error
from quarrel.ops.step import ComputeChoice, Limits
from tests.models.predictor import check_predictor
from tests.models.test_reference_logits import chunk, limit, specify, variants, wanted
from tests.paths import need_cases

LIMIT = 6e-2
ROUNDED = {
    "deepseek2_lite": 0.14,
    "gemma4_e": 0.08,
    "gemma4_moe": 0.18,
    "qwen35moe": 9e-2,
    "qwen3next": 9e-2,
    "gemma3n": 0.4,
}
"""Where these move the logits further: what llama.cpp's kernels differ by, too."""
CUTS = (1, 2, 9, 10, 15)


@pytest.mark.parametrize("compute", ["float32", "auto"])
@pytest.mark.parametrize("case", variants(), ids="-".join)
def test_outputs_match_the_truth_in_any_pieces(backend: CpuBackend, case: tuple[str, str], compute: ComputeChoice) -> None:
    arch, variant = case
    folder = need_cases(arch)
    ids = np.load(folder / "tokens.npy").reshape(-1).astype(np.int32)
    with GGUFFile.open(folder / f"model-{variant}.gguf") as file:
        tensors = Tensors(file)
        program = assemble(specify(file, folder, variant), tensors)
        limits = Limits(max_tokens=len(ids), max_seqs=2, max_blocks_per_seq=8, n_blocks=8, block_size=16)
        step = backend.compile(program, tensors, limits, compute)
        want = "logits" if "logits" in program.outputs else "hidden"
        whole = getattr(step(chunk(ids, 0, len(ids)), want), want)  # type: ignore[arg-type]
        truth = wanted(folder, variant)
        assert rel_error(whole[-len(truth) :], truth) < (
            limit(arch, variant) if compute == "float32" else ROUNDED.get(arch, LIMIT)
        )
        if want == "logits":
            bounds = (0, *(c for c in CUTS if c < len(ids)), len(ids))
            pieces = [step(chunk(ids, a, z), "logits").logits for a, z in pairwise(bounds)]
            assert np.array_equal(np.concatenate(pieces), whole)
        step.close()


@pytest.mark.parametrize("arch", ["glm4moe", "qwen35"])
def test_the_block_that_predicts_further_tokens_is_the_references(backend: CpuBackend, arch: str) -> None:
    check_predictor(backend, arch, trunk=True)
