"""A request's logits are bitwise the same alone, with neighbours, beside prefills, put out and let in again, with a prefix
in the cache or without, in one piece or many: on the CPU, with real models of several architectures."""

from __future__ import annotations

import pytest

from quarrel.cpu_backend.backend import CpuBackend
from quarrel.gguf import GGUFFile
from tests.llm.invariance import Bench, unlike
from tests.paths import need_cases

MODELS = {
    "llama32": "model-q4_k_m.gguf",
    "gemma3": "model-q4_0x.gguf",
    "gptoss": "model-mxfp4_moe.gguf",
    "mixtral": "model-q4_k_m.gguf",
    "granitehybrid": "model-q4_k_m.gguf",
    "nemotron_h_moe": "model-q4_k_m.gguf",
    "mamba": "model-q4_0x.gguf",
    "mamba2": "model-q4_k_m.gguf",
}


@pytest.mark.parametrize("model", MODELS)
def test_logits_are_the_same_bits_whatever_else_happens(model: str) -> None:
    backend = CpuBackend(threads=2)
    with GGUFFile.open([need_cases(model, MODELS[model])]) as file:
        try:
            assert not unlike(Bench(file, backend))
        finally:
            backend.close()
