"""Write a run of train_demo as a GGUF file of architecture `llama`, or `granitehybrid` where it has Mamba-2 layers.

    python -m tools.demo_export run/ quarrel/demo/quarrel-demo-11M-Q8_0.gguf --quant Q8_0

Matrices take the types that llama-quantize would give them, norms stay F32. Nothing is permuted: the model was trained
with the rotation of GGUF's llama, pairs (2i, 2i+1).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import sentencepiece

from quarrel.gguf import GGMLType, GGUFWriter
from tools.demo_data import BOS, EOS
from tools.demo_model import Llama, Shape
from tools.demo_weights import load
from tools.make_synthetic import QUANTS, tensor_type

DESCRIPTION = (
    "A small English story model that travels with Quarrel, for trying it out and for its tests. Trained by "
    "tools/train_demo.py on children's classics and fairy tales from Project Gutenberg that are in the public domain in "
    "the United States; see MODEL_CARD.md."
)
KEPT = ("ffn_gate_inp.weight", "ssm_conv1d.weight")
"""Matrices that stay F32, as llama-quantize leaves them."""
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # tokenizer.ggml.token_type


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="folder written by train_demo")
    parser.add_argument("target", type=Path)
    parser.add_argument("--quant", choices=sorted(QUANTS), default="Q8_0")
    args = parser.parse_args()
    print(f"{args.target}: {export(args.run, args.target, args.quant)} bytes")


def export(run: Path, target: Path, quant: str) -> int:
    """Write the file and return its size in bytes."""
    model = load(run)
    sp = sentencepiece.SentencePieceProcessor(model_file=str(run / "tokenizer.model"))
    writer = GGUFWriter()
    _add_general(writer, model, quant)
    add_shape(writer, model.shape)
    _add_tokenizer(writer, sp)
    for given, parameter in model.named_parameters():
        name, array = _as_gguf(given, parameter.detach().numpy())
        kind = GGMLType.F32
        if array.ndim > 1 and array.shape[-1] > 1 and not name.endswith(KEPT):
            layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
            place = (layer, model.shape.block_count)
            kind = tensor_type(quant, name, array.shape[-1], place, model.shape.expert_count, tied=True)
        writer.add_tensor(name, array, kind)
    return writer.write(target)


def _as_gguf(name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    """GGUF's name and form of a parameter."""
    name = name.replace("experts.", "").replace("mamba.", "")
    if name.endswith("_exps"):
        return name + ".weight", array
    if name.endswith("ssm_conv1d.weight"):
        return name, array[:, 0]
    if name.endswith("ssm_a_log"):
        return name.removesuffix("_log"), -np.exp(array)[:, None]
    if name.endswith("ssm_d"):
        return name, array[:, None]
    return name.replace("ssm_dt_bias", "ssm_dt.bias"), array


def _add_general(writer: GGUFWriter, model: Llama, quant: str) -> None:
    millions = f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f}M"
    writer.add("general.architecture", model.shape.architecture)
    writer.add("general.type", "model")
    kind = "hybrid" if model.shape.layout else "experts" if model.shape.expert_count else "demo"
    writer.add("general.name", f"Quarrel {kind} {millions}")
    writer.add("general.basename", f"quarrel-{kind}")
    writer.add("general.size_label", millions)
    writer.add("general.author", "The Quarrel founders")
    writer.add("general.license", "apache-2.0")
    writer.add("general.description", DESCRIPTION)
    writer.add("general.languages", ["en"])
    writer.add("general.tags", ["text-generation", "stories"])
    writer.add("general.dataset.count", 1)
    writer.add("general.dataset.0.name", "Children's classics and fairy tales from Project Gutenberg")
    writer.add("general.dataset.0.organization", "Project Gutenberg")
    writer.add("general.dataset.0.url", "https://www.gutenberg.org/")
    writer.add("general.file_type", QUANTS[quant][1])
    writer.add("general.quantization_version", 2)


def add_shape(writer: GGUFWriter, shape: Shape) -> None:
    kv: int | list[int] = shape.head_count_kv
    if shape.layout:
        kv = [shape.head_count_kv if kind == "A" else 0 for kind in shape.layout]
    facts: dict[str, object] = {
        "vocab_size": shape.vocab_size,
        "context_length": shape.context_length,
        "embedding_length": shape.embedding_length,
        "feed_forward_length": shape.feed_forward_length,
        "block_count": shape.block_count,
        "attention.head_count": shape.head_count,
        "attention.head_count_kv": kv,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": shape.rms_epsilon,
        "rope.dimension_count": shape.head_dim,
        "rope.freq_base": shape.rope_freq_base,
    }
    if shape.expert_count:
        facts |= {"expert_count": shape.expert_count, "expert_used_count": shape.expert_used_count}
    if shape.layout:
        facts |= {
            "attention.scale": shape.head_dim**-0.5,
            "embedding_scale": 1.0,
            "residual_scale": 1.0,
            "logit_scale": 1.0,
            "rope.scaling.finetuned": False,
            "ssm.conv_kernel": shape.ssm_conv_kernel,
            "ssm.state_size": shape.ssm_state_size,
            "ssm.group_count": 1,
            "ssm.inner_size": shape.ssm_inner_size,
            "ssm.time_step_rank": shape.ssm_head_count,
        }
    for key, value in facts.items():
        writer.add(f"{shape.architecture}.{key}", value)


def _add_tokenizer(writer: GGUFWriter, sp: sentencepiece.SentencePieceProcessor) -> None:
    ids = range(sp.get_piece_size())
    writer.add("tokenizer.ggml.model", "llama")
    writer.add("tokenizer.ggml.pre", "default")
    writer.add("tokenizer.ggml.tokens", [sp.id_to_piece(i) for i in ids])
    writer.add("tokenizer.ggml.scores", [float(sp.get_score(i)) for i in ids])
    writer.add("tokenizer.ggml.token_type", [token_type(sp, i) for i in ids])
    writer.add("tokenizer.ggml.bos_token_id", BOS)
    writer.add("tokenizer.ggml.eos_token_id", EOS)
    writer.add("tokenizer.ggml.unknown_token_id", sp.unk_id())
    writer.add("tokenizer.ggml.add_bos_token", True)
    writer.add("tokenizer.ggml.add_eos_token", False)
    writer.add("tokenizer.ggml.add_space_prefix", True)


def token_type(sp: sentencepiece.SentencePieceProcessor, token: int) -> int:
    if sp.is_unknown(token):
        return UNKNOWN
    if sp.is_control(token):
        return CONTROL
    return BYTE if sp.is_byte(token) else NORMAL


if __name__ == "__main__":
    main()
