"""Write a run of tools.eyes.train as a pair of GGUF files: a `llama` with a chat template, and its projector.

python -m tools.eyes.export run/ tests/eyes/trained/
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from quarrel.gguf import GGMLType, GGUFWriter
from tools.chat.export import TEMPLATE
from tools.chat.tokens import END
from tools.demo_data import BOS
from tools.demo_export import add_shape, token_type
from tools.eyes.model import TEXT, TowerShape
from tools.eyes.train import MEAN, STD

DESCRIPTION = (
    "A very small model that sees: one coloured digit or shape in a picture of 48 x 48. Trained by tools/eyes on pictures"
    " and conversations that a program draws, for tests."
)


def export(run: Path, target: Path) -> None:
    """model.gguf and mmproj.gguf, in a folder."""
    with np.load(run / "weights.npz") as stored:
        weights = {name: stored[name] for name in stored.files}
    target.mkdir(parents=True, exist_ok=True)
    sp = sentencepiece.SentencePieceProcessor(model_file=str(run / "tokenizer.model"))
    _text(sp, {n.removeprefix("text."): w for n, w in weights.items() if n.startswith("text.")}).write(
        target / "model.gguf"
    )
    tower = {n.removeprefix("tower."): w for n, w in weights.items() if n.startswith("tower.")}
    _tower(TowerShape(), tower).write(target / "mmproj.gguf")


def _general(writer: GGUFWriter, **facts: Any) -> None:
    common = {"name": "Quarrel eyes 1M", "author": "The Quarrel founders", "license": "apache-2.0"}
    for key, value in {**facts, **common, "description": DESCRIPTION, "quantization_version": 2}.items():
        writer.add(f"general.{key}", value)


def _text(sp: sentencepiece.SentencePieceProcessor, weights: dict[str, np.ndarray]) -> GGUFWriter:
    writer, ids = GGUFWriter(), range(sp.get_piece_size())
    _general(writer, architecture="llama", type="model")
    add_shape(writer, TEXT)
    facts: dict[str, object] = {
        "ggml.model": "llama",
        "ggml.pre": "default",
        "ggml.tokens": [sp.id_to_piece(i) for i in ids],
        "ggml.scores": [float(sp.get_score(i)) for i in ids],
        "ggml.token_type": [token_type(sp, i) for i in ids],
        "ggml.bos_token_id": BOS,
        "ggml.eos_token_id": END,
        "ggml.eot_token_id": END,
        "ggml.unknown_token_id": sp.unk_id(),
        "ggml.add_bos_token": True,
        "ggml.add_eos_token": False,
        "ggml.add_space_prefix": False,
        "chat_template": TEMPLATE,
    }
    for key, value in facts.items():
        writer.add(f"tokenizer.{key}", value)
    for name, array in weights.items():
        writer.add_tensor(name, array.astype(np.float32), GGMLType.Q8_0 if array.ndim > 1 else GGMLType.F32)
    return writer


def _tower(shape: TowerShape, weights: dict[str, np.ndarray]) -> GGUFWriter:
    writer = GGUFWriter()
    _general(writer, architecture="clip", type="mmproj")
    facts: dict[str, object] = {
        "has_vision_encoder": True,
        "projector_type": "mlp",
        "use_gelu": True,
        "vision.image_size": shape.side,
        "vision.patch_size": shape.patch,
        "vision.embedding_length": shape.width,
        "vision.feed_forward_length": shape.wide,
        "vision.block_count": shape.blocks,
        "vision.feature_layer": [shape.blocks],
        "vision.attention.head_count": shape.heads,
        "vision.attention.layer_norm_epsilon": shape.eps,
        "vision.projection_dim": TEXT.embedding_length,
        "vision.image_mean": list(MEAN),
        "vision.image_std": list(STD),
    }
    for key, value in facts.items():
        writer.add(f"clip.{key}", value)
    for name, array in weights.items():
        own = f"mm.{name[3:]}" if name.startswith("mm_") else f"v.{name}"
        if own == "v.patch_embd.weight":
            array = array.reshape(-1, 3, shape.patch, shape.patch)
        matrix = array.ndim > 1 and "position" not in own
        writer.add_tensor(own, array.astype(np.float32), GGMLType.F16 if matrix else GGMLType.F32)
    return writer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="folder written by tools.eyes.train")
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    export(args.run, args.target)


if __name__ == "__main__":
    main()
