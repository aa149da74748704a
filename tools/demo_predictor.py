"""Train the block that predicts a further token (MTP) for a small `llama` file, and write the file with it.

    python -m tools.demo_predictor MODEL.gguf books.txt out/model-mtp.gguf --seconds 30 --device cuda

The text may be an array of its tokens (.npy). The model stays as it is. The block reads a token's embedding and what the
model made of the token before; it learns what the model itself says after that token, all probabilities, from windows
of the text. The last line printed is JSON, with how often the two say the same on windows that nothing was learned from.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quarrel.gguf import GGMLType, GGUFFile, GGUFWriter
from quarrel.tokenizer import load_tokenizer
from tools.demo_data import documents
from tools.demo_model import Block, Llama, Shape

WINDOW, ROWS, HELD = 128, 8, 16
"""Tokens of a window, windows of a step, and steps' worth of windows that nothing is learned from."""
RATE = 3e-3


class Predictor(nn.Module):
    """The block by GGUF's names; `layer` is a layer of the model."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, eps = shape.embedding_length, shape.rms_epsilon
        self.enorm, self.hnorm = nn.RMSNorm(width, eps=eps), nn.RMSNorm(width, eps=eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.shared_head_norm = nn.RMSNorm(width, eps=eps)
        self.layer = Block(shape, 0.0, mamba=False)

    def forward(self, embedded: Tensor, stream: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.eh_proj(torch.cat([self.enorm(embedded.float()), self.hnorm(stream.float())], -1)).float()
        return self.shared_head_norm(self.layer(x, cos, sin)[0])


def model_of(file: GGUFFile) -> Llama:
    """The model in float32, as torch has it."""
    keys, at = file.metadata, f"{file.metadata.str('general.architecture')}."
    shape = Shape(
        vocab_size=file.tensors["token_embd.weight"].dims[1],
        context_length=keys.int(at + "context_length"),
        embedding_length=keys.int(at + "embedding_length"),
        feed_forward_length=keys.int(at + "feed_forward_length"),
        block_count=keys.int(at + "block_count"),
        head_count=keys.int(at + "attention.head_count"),
        head_count_kv=keys.int(at + "attention.head_count_kv"),
        head_dim=keys.int(at + "rope.dimension_count"),
        rms_epsilon=keys.float(at + "attention.layer_norm_rms_epsilon"),
    )
    model = Llama(shape)
    model.load_state_dict({name: torch.from_numpy(np.array(file.array(name), np.float32)) for name in file.tensors})
    return model.eval().requires_grad_(False)


def tokens_of(file: GGUFFile, text: Path) -> np.ndarray:
    """All documents of the text in a row, or the array."""
    if text.suffix == ".npy":
        return np.load(text)
    tokenizer = load_tokenizer(file.metadata)
    return np.concatenate([tokenizer.encode("\n".join(paragraphs)) for paragraphs in documents(text)])


def windows(tokens: np.ndarray, rng: np.random.Generator) -> Tensor:
    """[ROWS, WINDOW] from anywhere."""
    starts = rng.integers(0, len(tokens) - WINDOW, ROWS)
    return torch.from_numpy(tokens[starts[:, None] + np.arange(WINDOW)].astype(np.int64))


def said(model: Llama, block: Predictor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """What the model says after each token but the first, and what the block says that it will say."""
    with torch.no_grad():
        hidden = model.hidden(ids)
    width = ids.shape[1] - 1
    guess = block(model.token_embd(ids[:, 1:]), hidden[:, :-1], model.cos[:width], model.sin[:width])
    return tuple(F.linear(x, model.token_embd.weight).float() for x in (hidden[:, 1:], guess))  # type: ignore[return-value]


def train(model: Llama, tokens: np.ndarray, seconds: float, seed: int) -> tuple[Predictor, dict[str, float]]:
    block, device = Predictor(model.shape), model.token_embd.weight.device
    block.to(device)
    optimizer = torch.optim.AdamW(block.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.01)
    rng, kept = np.random.default_rng(seed), max(len(tokens) // 20, WINDOW + 1)
    held = [windows(tokens[-kept:], rng).to(device) for _ in range(HELD)]
    began, steps = time.perf_counter(), 0
    while (done := (time.perf_counter() - began) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, done * 30, 2 * (1 - done))
        with torch.autocast(device.type, torch.bfloat16):
            teacher, guess = said(model, block, windows(tokens[:-kept], rng).to(device))
        loss = -(teacher.softmax(-1) * guess.log_softmax(-1)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(block.parameters(), 1.0)
        optimizer.step()
        steps += 1
        if steps % 100 == 1:
            print(f"{time.perf_counter() - began:6.1f} s, step {steps}: {loss.item():.3f}", flush=True)
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        pairs = [[x.argmax(-1) for x in said(model, block, ids)] for ids in held]
    alike = float(np.mean([float((a == b).float().mean()) for a, b in pairs]))
    return block, {"steps": steps, "tokens": steps * ROWS * WINDOW, "loss": loss.item(), "alike": alike}


def write(source: GGUFFile, block: Predictor, target: Path) -> None:
    """The file, with the block behind its last layer, matrices as Q8_0."""
    arch, writer = source.metadata.str("general.architecture"), GGUFWriter()
    last = source.metadata.int(f"{arch}.block_count")
    changed = {f"{arch}.block_count": last + 1, f"{arch}.nextn_predict_layers": 1}
    for key, value in ({key: source.metadata[key] for key in source.metadata} | changed).items():
        writer.add(key, value)
    for name, info in source.tensors.items():
        writer.add_tensor(name, np.array(source.array(name), np.float32), info.type)
    for given, parameter in block.named_parameters():
        name = given.removeprefix("layer.") if given.startswith("layer.") else f"nextn.{given}"
        array = parameter.detach().cpu().float().numpy()
        writer.add_tensor(f"blk.{last}.{name}", array, GGMLType.Q8_0 if array.ndim > 1 else GGMLType.F32)
    writer.write(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    args.target.parent.mkdir(parents=True, exist_ok=True)
    with GGUFFile.open([args.model]) as file:
        block, figures = train(
            model_of(file).to(args.device, torch.bfloat16), tokens_of(file, args.text), args.seconds, args.seed
        )
        write(file, block, args.target)
    print(json.dumps(figures | {"seconds": args.seconds, "parameters": sum(p.numel() for p in block.parameters())}))


if __name__ == "__main__":
    main()
