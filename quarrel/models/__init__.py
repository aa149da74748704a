"""Which blocks, in which order: architectures as data, and the one assembly that walks them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from quarrel.errors import ModelError, UnsupportedModel
from quarrel.gguf import GGUFFile
from quarrel.models.assembly import assemble, assemble_predictor
from quarrel.models.keys import Keys
from quarrel.models.others import check_text_model
from quarrel.models.scaling import SCALINGS, RopeScaling, check_scalable
from quarrel.models.spec import EncoderSpec, ModelSpec
from quarrel.models.tensors import Tensors
from quarrel.ops.program import Program

ARCHITECTURES: Mapping[str, str] = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen2vl": "qwen2",
    "qwen3": "qwen2",
    "qwen3moe": "qwen2",
    "qwen3next": "qwen35",
    "qwen35": "qwen35",
    "qwen35moe": "qwen35",
    "qwen3vl": "qwen2",
    "qwen3vlmoe": "qwen2",
    "granite": "granite",
    "granitemoe": "granite",
    "granitehybrid": "granitehybrid",
    "granite_swa": "granite_swa",
    "phi3": "qwen2",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "nemotron": "nemotron",
    "nemotron_h": "nemotron_h",
    "nemotron_h_moe": "nemotron_h",
    "lfm2": "lfm2",
    "lfm2moe": "lfm2",
    "falcon-h1": "falcon_h1",
    "muse-glimmer": "muse_glimmer",
    "gpt-oss": "gpt_oss",
    "smollm3": "smollm3",
    "seed_oss": "seed_oss",
    "olmo2": "olmo2",
    "exaone4": "exaone4",
    "cohere2": "cohere2",
    "ernie4_5": "llama",
    "ernie4_5-moe": "llama",
    "hunyuan-dense": "hunyuan",
    "mellum": "mellum",
    "glm4": "glm4",
    "glm4moe": "glm4moe",
    "minimax-m2": "minimax",
    "mistral3": "mistral3",
    "llama4": "llama4",
    "mamba": "mamba",
    "mamba2": "mamba",
    "deepseek2": "deepseek2",
    "gemma3n": "gemma3n",
    "gemma4": "gemma4",
    "bert": "bert",
    "gemma-embedding": "gemma_embedding",
    "modern-bert": "modern_bert",
    "nomic-bert": "nomic_bert",
}
"""`general.architecture` -> the module here whose `spec(keys, tensors, n_ctx)` reads it."""


def read_spec(
    file: GGUFFile, n_ctx: int | None = None, scaling: RopeScaling | None = None, asked: int | None = None
) -> ModelSpec | EncoderSpec:
    """The model's facts. `n_ctx` is the context that will be used (default: the model's own), which longrope depends on.

    scaling: in place of the file's own; it may depend on the context that was asked for.
    """
    name = check_text_model(file.metadata)
    if name not in ARCHITECTURES:
        raise UnsupportedModel(f"the architecture is {name!r}; this version runs {', '.join(sorted(ARCHITECTURES))}")
    keys = Keys(scaling.applied(file.metadata, name, asked) if scaling else file.metadata, name)
    length = n_ctx or keys.int("context_length", lo=1)
    spec: ModelSpec | EncoderSpec = importlib.import_module(f"quarrel.models.{ARCHITECTURES[name]}").spec(
        keys, Tensors(file), length
    )
    if scaling:
        check_scalable(spec, "rope_factors_long.weight" in file.tensors)
    said = keys.int("vocab_size", 0)
    if said > spec.n_vocab:
        raise ModelError(
            f"the tensor token_embd.weight has {spec.n_vocab} rows, but the key {name}.vocab_size is {said}:"
            " the file contradicts itself, download or convert it again"
        )
    return spec


__all__ = [
    "ARCHITECTURES",
    "SCALINGS",
    "EncoderSpec",
    "Keys",
    "ModelSpec",
    "Program",
    "RopeScaling",
    "Tensors",
    "assemble",
    "assemble_predictor",
    "read_spec",
]
