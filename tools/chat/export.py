"""Write a run of tools.chat.train as a GGUF file of architecture `llama` with a chat template.

python -m tools.chat.export run/ input/tokenizer.model quarrel/demo/quarrel-chat-17M-Q8_0.gguf --quant Q8_0
"""

from __future__ import annotations

import argparse
from pathlib import Path

import sentencepiece

from quarrel.gguf import GGMLType, GGUFWriter
from tools.chat.tokens import END
from tools.demo_data import BOS
from tools.demo_export import add_shape, token_type
from tools.demo_weights import load
from tools.make_synthetic import QUANTS, tensor_type

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPERATURE = 0.3
"""Written into the file: lower than the usual 0.8, as so small a model gives wrong words much of its probability."""
DESCRIPTION = (
    "A very small English chat model that travels with Quarrel, for trying out conversations. Trained by tools/chat on "
    "dialogues written by a program and on children's classics from Project Gutenberg that are in the public domain in the "
    "United States. It knows simple things and is often wrong; see the model card."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="folder written by tools.chat.train")
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--quant", choices=sorted(QUANTS), default="Q8_0")
    args = parser.parse_args()
    print(f"{args.target}: {export(args.run, args.tokenizer, args.target, args.quant)} bytes")


def export(run: Path, tokenizer: Path, target: Path, quant: str) -> int:
    """Write the file and return its size in bytes."""
    model = load(run)
    writer = GGUFWriter()
    _add_general(writer, sum(p.numel() for p in model.parameters()), quant)
    add_shape(writer, model.shape)
    _add_tokenizer(writer, sentencepiece.SentencePieceProcessor(model_file=str(tokenizer)))
    for name, parameter in model.named_parameters():
        kind, array = GGMLType.F32, parameter.detach().numpy()
        if array.ndim > 1:
            layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
            kind = tensor_type(quant, name, array.shape[-1], (layer, model.shape.block_count), 0, tied=True)
        writer.add_tensor(name, array, kind)
    return writer.write(target)


def _add_general(writer: GGUFWriter, parameters: int, quant: str) -> None:
    millions = f"{parameters / 1e6:.0f}M"
    facts: dict[str, object] = {
        "architecture": "llama",
        "type": "model",
        "name": f"Quarrel chat {millions}",
        "basename": "quarrel-chat",
        "size_label": millions,
        "author": "The Quarrel founders",
        "license": "apache-2.0",
        "description": DESCRIPTION,
        "languages": ["en"],
        "tags": ["text-generation", "conversational"],
        "file_type": QUANTS[quant][1],
        "quantization_version": 2,
        "sampling.temp": TEMPERATURE,
    }
    for key, value in facts.items():
        writer.add(f"general.{key}", value)


def _add_tokenizer(writer: GGUFWriter, sp: sentencepiece.SentencePieceProcessor) -> None:
    ids = range(sp.get_piece_size())
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


if __name__ == "__main__":
    main()
