"""llama.cpp itself reads what we convert, and makes of it what we do. Skipped where its library is not installed."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import numpy as np
import pytest

import quarrel
from quarrel.convert.folder import FolderFile
from quarrel.gguf.requantize import requantize
from tests.convert.folders import llama_folder
from tests.convert.llama_cpp import dequantized, likelihoods
from tests.convert.test_references import folder_of, references

if importlib.util.find_spec("llama_cpp_py_sync") is None:
    pytest.skip("llama.cpp's library is not installed: pip install llama-cpp-py-sync", allow_module_level=True)

IDS = [5, 9, 40, 77, 101, 3, 60, 61]
UNREADABLE = {
    "gemma3n",  # it wants 20 layers with keys of their own, as all published ones have
    "xlm_roberta",  # its tokenizer must be one of pieces with probabilities, which the tests' is not
}
SILENT = {"bert", "gemma_embedding", "modern_bert", "nomic_bert", "lfm2", "lfm2moe"}
"""Encoders, and what gives rows and no logits there; that they are read is what is shown."""
GEMMAS = ("gemma2", "gemma3", "gemma3_vl", "gemma4", "gemma4_e", "gemma4_moe")
FAR = {"gptoss": 5e-3, **dict.fromkeys(GEMMAS, 5e-3)}
"""Its YaRN's range is rounded; its GELU is a table in 16 bits."""


@pytest.fixture(name="_library", scope="module")
def _library(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("llama") / "m.gguf"
    with FolderFile(llama_folder(path.parent / "m")) as file:
        requantize(file, path, "f32")
    try:
        likelihoods(path, IDS)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"llama.cpp's library does not run here: {error.stderr[-300:]}")


@pytest.mark.usefixtures("_library")
@pytest.mark.parametrize("kind", ["f32", "q8_0", "q4_k_m"])
@pytest.mark.parametrize("case", sorted(references().keys() - UNREADABLE))
def test_llama_cpp_makes_of_a_converted_folder_what_we_do(case: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    (tmp_path / "m").mkdir()
    with FolderFile(folder_of(case, tmp_path / "m")) as file:
        requantize(file, path, kind)
    found = likelihoods(path, IDS)
    if case in SILENT:
        assert found == []
        return
    if kind != "f32":
        # Beside quantised weights llama.cpp rounds activations to 8 bits, which random weights make 0.7 of in qwen35moe
        # (bench.check.llama_cpp): its reading of the file is shown above, and the arithmetic on the same values in float32.
        assert np.isfinite(found).all()
        found = likelihoods(dequantized(path, tmp_path / "plain.gguf"), IDS)
    with quarrel.load(path, backend="cpu", compute="float32", n_ctx=64, threads=1) as llm:
        own = llm.generate(IDS, max_tokens=1, temperature=0, logprobs=0, prompt_logprobs=True).prompt_logprobs
    assert own is not None
    differences = np.abs(np.array(found) - [row.logprob for row in own])
    assert differences.max() < FAR.get(case, 1e-4), differences
