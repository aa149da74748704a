"""Whole models against the reference logits in Triton's interpreter, or on the GPU where there is one."""

from __future__ import annotations

import os

import numpy as np
import pytest

from quarrel.gguf import GGUFFile
from quarrel.models import Tensors, assemble
from quarrel.ops.contract import rel_error
from quarrel.ops.step import Limits
from quarrel.triton_backend.backend import TritonBackend
from quarrel.triton_backend.runtime.launch import INTERPRETED
from tests.models.predictor import check_predictor
from tests.models.test_reference_logits import chunk, limit, specify, variants, wanted
from tests.paths import need_cases

EVERYTHING = os.environ.get("QUARREL_TEST_ALL") == "1" or not INTERPRETED
QUICK = (("llama32", "q4_0x"),)
CASES = [case for case in variants() if EVERYTHING or case in QUICK]
"""Every file on a GPU or with QUARREL_TEST_ALL=1; else one, since the interpreter takes some seconds a model."""


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_outputs_match_the_truth_in_two_pieces(backend: TritonBackend, case: tuple[str, str]) -> None:
    """All tokens but one are a prompt, the last decodes."""
    arch, variant = case
    folder = need_cases(arch)
    ids = np.load(folder / "tokens.npy").reshape(-1).astype(np.int32)
    with GGUFFile.open(folder / f"model-{variant}.gguf") as file:
        tensors = Tensors(file)
        program = assemble(specify(file, folder, variant), tensors)
        limits = Limits(max_tokens=len(ids), max_seqs=2, max_blocks_per_seq=8, n_blocks=8, block_size=16)
        truth = wanted(folder, variant)
        step = backend.compile(program, tensors, limits, "float32")
        if "logits" in program.outputs:
            bounds = ((0, len(ids) - 1), (len(ids) - 1, len(ids)))
            got = np.concatenate([step(chunk(ids, a, z), "logits").logits for a, z in bounds])
        else:
            got = step(chunk(ids, 0, len(ids)), "hidden").hidden
        assert rel_error(got[-len(truth) :], truth) < limit(arch, variant)
        step.close()


@pytest.mark.parametrize("case", list({arch: (arch, variant) for arch, variant in variants()}.values()), ids="-".join)
def test_each_architecture_is_built_in_half_precision(backend: TritonBackend, case: tuple[str, str]) -> None:
    """What is fused there is not what float32 has. On a GPU two tokens run as well."""
    arch, variant = case
    folder = need_cases(arch)
    with GGUFFile.open(folder / f"model-{variant}.gguf") as file:
        tensors = Tensors(file)
        program = assemble(specify(file, folder, variant), tensors)
        limits = Limits(max_tokens=16, max_seqs=2, max_blocks_per_seq=4, n_blocks=4, block_size=16)
        step = backend.compile(program, tensors, limits, "float16")
        assert len(step.explain()) > 5
        if not INTERPRETED:
            want = "logits" if "logits" in program.outputs else "hidden"
            out = step(chunk(np.array([3, 5], np.int32), 0, 2), want)  # type: ignore[arg-type]
            assert np.isfinite(getattr(out, want)).all()
        step.close()


def test_the_block_that_predicts_further_tokens_is_the_references(backend: TritonBackend) -> None:
    check_predictor(backend, "qwen35", trunk=EVERYTHING)
