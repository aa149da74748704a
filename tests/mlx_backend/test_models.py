"""Whole models of every architecture on emulated Metal against the reference logits, fed at once and in pieces."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest

from quarrel.gguf import GGUFFile
from quarrel.models import Tensors, assemble
from quarrel.ops.contract import rel_error
from quarrel.ops.step import Limits
from tests.mlx_backend.cases import running
from tests.mlx_backend.emulated import FAST
from tests.models.predictor import check_predictor
from tests.models.test_reference_logits import chunk, limit, specify, variants, wanted
from tests.paths import CASE_SETS, need_cases

CUTS = (1, 2, 9, 10, 15)
FEW, FEW_CUTS = 19, (1, 9)
"""Tokens that a decoder of the second set is fed, and where they are cut; all of them with QUARREL_TEST_ALL=1."""
FEWER, FEWER_CUTS = {"gemma3n": 9, "gemma4": 9}, (8,)
"""Of models of very many launches, where that is enough to see each."""
EVERYTHING = os.environ.get("QUARREL_TEST_ALL") == "1"
SAME_ARCHITECTURE = (
    *("gptoss_trunc", "granite4micro", "granitehybrid_dense", "phi3_longrope", "qwen3_yarn"),
    *("deepseek2", "deepseek2_lite", "gemma3_vl", "qwen35_vl", "xlm_roberta"),
)
SAME_KERNELS = (
    *("cohere2", "ernie4_5", "exaone4", "glm4", "granite_swa", "hunyuan_dense", "mellum", "mistral3", "olmo2", "seed_oss"),
    *("smollm3", "ernie4_5moe", "glm4moe", "minimax_m2", "qwen3vl"),
)
"""Of ops that others here have too, put together by what all backends share."""
FIRST = {a: v for a, v in reversed(variants()) if a not in (*SAME_ARCHITECTURE, *SAME_KERNELS)}
CASES = [(a, v) for a, v in variants() if EVERYTHING or FIRST.get(a) == v]
"""One file of each architecture with kernels of its own; all of them, block formats included, with QUARREL_TEST_ALL=1."""


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_outputs_match_the_truth_in_any_pieces(case: tuple[str, str]) -> None:
    """One-token pieces decode, the others are prompts."""
    arch, variant = case
    folder = need_cases(arch)
    ids = np.load(folder / "tokens.npy").reshape(-1).astype(np.int32)
    with GGUFFile.open(folder / f"model-{variant}.gguf") as file, running(FAST) as backend:
        tensors = Tensors(file)
        program = assemble(specify(file, folder, variant), tensors)
        limits = Limits(max_tokens=len(ids), max_seqs=2, max_blocks_per_seq=8, n_blocks=8, block_size=16)
        truth = wanted(folder, variant)
        step = backend.compile(program, tensors, limits, "float32")
        want = "logits" if "logits" in program.outputs else "hidden"
        cuts = CUTS
        if want == "logits" and folder.parent == CASE_SETS[1] and not EVERYTHING:
            few, cuts = FEWER.get(arch, FEW), FEWER_CUTS if arch in FEWER else FEW_CUTS
            ids, truth = ids[:few], truth[:few]
        whole = elsewhere(lambda: getattr(step(chunk(ids, 0, len(ids)), want), want))  # type: ignore[arg-type]
        assert rel_error(whole[-len(truth) :], truth) < limit(arch, variant)
        if want == "logits":
            bounds = (0, *(c for c in cuts if c < len(ids)), len(ids))
            pieces = np.concatenate([step(chunk(ids, a, z), "logits").logits for a, z in pairwise(bounds)])
            assert rel_error(pieces[-len(truth) :], truth) < limit(arch, variant)
        step.close()


def elsewhere(call: Callable[[], np.ndarray]) -> np.ndarray:
    """In another thread, as an engine does: MLX evaluates nothing there that was left unevaluated here."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def test_half_precision_stays_within_its_limit() -> None:
    folder = need_cases("llama32")
    ids = np.load(folder / "tokens.npy").reshape(-1).astype(np.int32)
    with GGUFFile.open(folder / "model-q4_0x.gguf") as file, running(FAST) as backend:
        tensors = Tensors(file)
        limits = Limits(max_tokens=len(ids), max_seqs=2, max_blocks_per_seq=8, n_blocks=8, block_size=16)
        step = backend.compile(assemble(specify(file, folder, "q4_0x"), tensors), tensors, limits, "auto")
        got = step(chunk(ids, 0, len(ids)), "logits").logits
        assert got is not None
        assert rel_error(got, wanted(folder, "q4_0x")) < 3e-3
        step.close()


def test_the_block_that_predicts_further_tokens_is_the_references() -> None:
    with running(FAST) as backend:
        check_predictor(backend, "qwen35", trunk=EVERYTHING)
