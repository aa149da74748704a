"""A random model of a few kilobytes that writes lower-case letters, for tests of what surrounds a model."""

from __future__ import annotations

import string
from pathlib import Path

import numpy as np

from quarrel.gguf import GGUFWriter

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
LETTERS = ("▁", *string.ascii_lowercase)
PIECES = (*CONTROL, *BYTES, *LETTERS)
N_CTX, WIDTH, HEADS, FFN = 512, 32, 2, 64


def write_tiny_model(path: Path, *, template: str | None = None, seed: int = 0, n_ctx: int = N_CTX) -> Path:
    """A llama of one layer. It draws letters and spaces only, so it never stops by itself."""
    rng = np.random.default_rng(seed)
    writer = GGUFWriter()
    for key, value in (_keys(template) | {"llama.context_length": n_ctx}).items():
        writer.add(key, value)
    bias = np.full(len(PIECES), -1e4, np.float32)
    bias[-len(LETTERS) :] = 0.0
    writer.add_tensor("output.bias", bias)
    for name, shape in _shapes().items():
        norm = "norm" in name
        values = np.ones(shape) if norm else rng.standard_normal(shape) * (4.0 if name == "output.weight" else 1.0)
        writer.add_tensor(name, (values if norm else values / shape[-1] ** 0.5).astype(np.float32))
    writer.write(path)
    return path


def _keys(template: str | None) -> dict[str, object]:
    kinds = [2] + [3] * (len(CONTROL) - 1) + [6] * len(BYTES) + [1] * len(LETTERS)
    keys: dict[str, object] = {
        "general.architecture": "llama",
        "general.name": "tiny \x1b[31m test",
        "llama.block_count": 1,
        "llama.context_length": N_CTX,
        "llama.embedding_length": WIDTH,
        "llama.feed_forward_length": FFN,
        "llama.attention.head_count": HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(PIECES),
        "tokenizer.ggml.scores": [0.0] * len(PIECES),
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return keys if template is None else keys | {"tokenizer.chat_template": template}


def _shapes() -> dict[str, tuple[int, ...]]:
    square = {f"blk.0.attn_{name}.weight": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")}
    return {
        "token_embd.weight": (len(PIECES), WIDTH),
        "output.weight": (len(PIECES), WIDTH),
        "output_norm.weight": (WIDTH,),
        "blk.0.attn_norm.weight": (WIDTH,),
        "blk.0.ffn_norm.weight": (WIDTH,),
        "blk.0.ffn_gate.weight": (FFN, WIDTH),
        "blk.0.ffn_up.weight": (FFN, WIDTH),
        "blk.0.ffn_down.weight": (WIDTH, FFN),
        **square,
    }
