"""Held-out loss of exported demo files, computed in torch on the dequantised weights: which format costs what.

    python -m tools.demo_perplexity books-heldout.txt run/tokenizer.model FILE.gguf...

One JSON document a line: nats and perplexity per token, and bits per byte, which models of other vocabularies share.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import sentencepiece
import torch

from quarrel.gguf import GGUFFile
from tools.demo_data import documents, stream
from tools.demo_model import Llama, Shape
from tools.train_demo import evaluate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("heldout", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    args = parser.parse_args()
    sp = sentencepiece.SentencePieceProcessor(model_file=str(args.tokenizer))
    unseen = stream(documents(args.heldout), sp)
    for path in args.files:
        nats = evaluate(load_gguf(path), unseen, torch.device("cpu"))
        result = {
            "file": path.name,
            "bytes": path.stat().st_size,
            "loss": round(nats, 5),
            "perplexity": round(math.exp(nats), 3),
            "bits_per_byte": round(nats * len(unseen.tokens) / math.log(2) / unseen.num_bytes, 5),
        }
        print(json.dumps(result), flush=True)


def load_gguf(path: Path) -> Llama:
    """The training model with the weights of an exported file, dequantised to float32."""
    with GGUFFile.open(path) as file:
        keys = file.metadata
        model = Llama(
            Shape(
                vocab_size=keys.int("llama.vocab_size"),
                context_length=keys.int("llama.context_length"),
                embedding_length=keys.int("llama.embedding_length"),
                feed_forward_length=keys.int("llama.feed_forward_length"),
                block_count=keys.int("llama.block_count"),
                head_count=keys.int("llama.attention.head_count"),
                head_count_kv=keys.int("llama.attention.head_count_kv"),
                head_dim=keys.int("llama.attention.key_length"),
                rope_freq_base=keys.float("llama.rope.freq_base"),
                rms_epsilon=keys.float("llama.attention.layer_norm_rms_epsilon"),
            )
        )
        model.load_state_dict({name: torch.from_numpy(file.array(name).copy()) for name in file.tensors})
    return model.eval()


if __name__ == "__main__":
    main()
