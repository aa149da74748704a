"""A request's logits are bitwise the same alone, with neighbours, beside prefills, preempted and admitted again, with a
prefix in the cache or without, in one piece or many: on the CPU, with real models of several architectures."""

from __future__ import annotations

import pytest

from quarrel.cpu_backend.backend import CpuBackend
from quarrel.gguf import GGUFFile
from tests.llm.invariance import CASES, Bench, distinct, unlike
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
    "qwen35moe": "model-q4_k_m.gguf",
    "glm47flash": "model-q4_k_m.gguf",
    "gemma4_e": "model-q4_k_m.gguf",
    "gemma3n": "model-q4_0x.gguf",
    "lfm2": "model-q4_0x.gguf",
    "cohere2": "model-q4_k_m.gguf",
}


@pytest.mark.parametrize("model", MODELS)
def test_logits_are_the_same_bits_whatever_else_happens(model: str) -> None:
    backend = CpuBackend(threads=2)
    with GGUFFile.open([need_cases(model, MODELS[model])]) as file:
        try:
            assert not unlike(Bench(file, backend))
        finally:
            backend.close()


def test_a_cache_of_codes_changes_nothing_in_that_and_a_mixed_load_neither() -> None:
    """Copied blocks and reused prefixes have their scales; one answer in many runs."""
    backend = CpuBackend(threads=2)
    with GGUFFile.open([need_cases("llama32", MODELS["llama32"])]) as file:
        try:
            bench = Bench(file, backend, seqs=9, kv_cache="fp8")
            assert not unlike(bench, {name: CASES[name] for name in ("chunks of 64", "preempted", "known prefix")})
            assert distinct(bench, 100) == 1
        finally:
            backend.close()
