"""Hugging Face folders for tests: safetensors written byte by byte, and weights that follow from their names."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import pre_tokenizers

NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "uint16": "BF16", "uint8": "U8", "int64": "I64"}


def weights(name: str, shape: Sequence[int]) -> np.ndarray:
    """Random values that the name gives, float32."""
    return np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32) / 5


@cache
def _waves() -> np.ndarray:
    return np.sin(np.arange(1, 1 << 22))


def fingerprint(values: np.ndarray) -> float:
    """One number that another order of the values, or another value, changes."""
    flat = values.reshape(-1)
    return float(np.dot(flat, _waves()[: flat.size]) / np.sqrt(flat.size))


def bfloat16(values: np.ndarray) -> np.ndarray:
    """The bits of values cut off to bfloat16."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], types: Mapping[str, str] | None = None) -> Path:
    """types: of those whose NumPy type does not tell."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at, data = 0, []
    for name, values in tensors.items():
        data.append(np.ascontiguousarray(values).tobytes())
        dtype = (types or {}).get(name, NAMES[values.dtype.name])
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [at, at + len(data[-1])]}
        at += len(data[-1])
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data))
    return path


def write_tokenizer(folder: Path, rows: int) -> None:
    """A byte-level tokenizer of `rows` tokens."""
    texts = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th", *(f"more{i}" for i in range(rows))][: rows - 1]
    write_byte_pairs(folder, texts, ["t h"] if "th" in texts else [])


def write_byte_pairs(folder: Path, texts: Sequence[str], merges: Sequence[str]) -> None:
    """A byte-level tokenizer of these texts and one more, which ends a text."""
    vocab = {text: id for id, text in enumerate(texts)}
    end = {"id": len(texts), "content": "<|end|>", "special": True, "single_word": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": vocab, "merges": list(merges)}
    made = {
        "version": "1.0",
        "added_tokens": [{**end, "lstrip": False, "rstrip": False, "normalized": False}],
        "model": model,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "post_processor": None,
    }
    (folder / "tokenizer.json").write_text(json.dumps(made))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"})
    )


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 272,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def llama_shapes(layers: int = 2) -> dict[str, tuple[int, ...]]:
    e, f = LLAMA["hidden_size"], LLAMA["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (272, e), "lm_head.weight": (272, e)}
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes |= {f"{at}self_attn.{n}_proj.weight": (e // 2 if n in "kv" else e, e) for n in "qkvo"}
        shapes |= {
            f"{at}mlp.gate_proj.weight": (f, e),
            f"{at}mlp.up_proj.weight": (f, e),
            f"{at}mlp.down_proj.weight": (e, f),
        }
        shapes |= {f"{at}input_layernorm.weight": (e,), f"{at}post_attention_layernorm.weight": (e,)}
    return {**shapes, "model.norm.weight": (e,)}


def llama_folder(folder: Path, **changes: Any) -> Path:
    """A small llama in float32."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    write_safetensors(folder / "model.safetensors", {n: weights(n, s) for n, s in llama_shapes().items()})
    write_tokenizer(folder, 272)
    return folder
