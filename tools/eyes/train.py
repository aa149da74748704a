"""Train a small model that sees, on pictures and conversations which a program draws, on a CPU or one GPU.

    python -m tools.eyes.train --out run/ --seconds 900
    python -m tools.eyes.train --out run/ --seconds 70 --device cuda --size 256 --drawers 14

The learning rate follows the time that is used up, on a CPU the processor's: up in the first 3 %, down to zero in the last
40 %. `--drawers` processes draw the pictures of a GPU. `--out` receives tokenizer.model, weights.npz (float16) and
run.json, which is also the last line printed.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tools.chat.tokens import END, START, fit
from tools.demo_data import BOS
from tools.demo_muon import Muon
from tools.eyes.model import TEXT, Seeing, TowerShape
from tools.eyes.pictures import conversation, drawn, scene

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
Row = tuple[list[int], list[bool], int]


def tokenizer() -> bytes:
    rng = random.Random(0)
    lines = [text for _ in range(4000) for turn in conversation(scene(rng), rng) for text in turn]
    return fit(lines, TEXT.vocab_size)


def row(sp: sentencepiece.SentencePieceProcessor, turns: list[tuple[str, str]], image: int, before: bool) -> Row:
    """Ids, which of them are learned, and where the picture begins, as the chat template writes them."""
    newline = sp.piece_to_id("<0x0A>")
    ids, learned, first = [BOS], [False], 0
    for i, (question, answer) in enumerate(turns):
        head, words = [START, *sp.encode("user"), newline], sp.encode(question)
        if i == 0:
            first = 1 + len(head) + (0 if before else len(words))
            words = [*[0] * image, *words] if before else [*words, *[0] * image]
        given = [*head, *words, END, newline, START, *sp.encode("assistant"), newline]
        own = [*sp.encode(answer), END]
        ids += [*given, *own, newline]
        learned += [False] * len(given) + [True] * len(own) + [False]
    return ids, learned, first


def patches(pixels: np.ndarray, patch: int) -> np.ndarray:
    """`[B, T, 3 * patch * patch]` of `[B, H, W, 3]`."""
    values = ((pixels / 255 - np.array(MEAN)) / np.array(STD)).astype(np.float32)
    b, h, w, _ = values.shape
    grid = values.reshape(b, h // patch, patch, w // patch, patch, 3).transpose(0, 1, 3, 5, 2, 4)
    return np.ascontiguousarray(grid.reshape(b, -1, 3 * patch * patch))


def batch(sp: sentencepiece.SentencePieceProcessor, shape: TowerShape, size: int, rng: random.Random) -> tuple[Tensor, ...]:
    """ids, pictures, first, learned and the learned ids."""
    scenes = [scene(rng) for _ in range(size)]
    rows = [row(sp, conversation(each, rng), shape.patches, rng.random() < 0.8) for each in scenes]
    length = max(len(ids) for ids, _, _ in rows)
    ids, learned = np.zeros((size, length), np.int64), np.zeros((size, length), bool)
    for i, (each, mine, _) in enumerate(rows):
        ids[i, : len(each)], learned[i, : len(each)] = each, mine
    pixels = np.stack([np.asarray(drawn(each, rng)) for each in scenes])
    made = (ids[:, :-1], patches(pixels, shape.patch), np.array([first for *_, first in rows]), learned[:, 1:])
    return *(torch.from_numpy(a) for a in made), torch.from_numpy(ids[:, 1:][learned[:, 1:]])


def schedule(progress: float) -> float:
    return min(progress / 0.03, 1.0, max(0.0, (1 - progress) / 0.4))


class Drawn(IterableDataset[tuple[Tensor, ...]]):
    """Batches without end; each process that draws has pictures of its own."""

    def __init__(self, tokenizer: Path, size: int, seed: int) -> None:
        self._tokenizer, self._size, self._seed = tokenizer, size, seed

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        worker = get_worker_info()
        rng = random.Random(self._seed if worker is None else f"{self._seed} {worker.id}")
        sp = sentencepiece.SentencePieceProcessor(model_file=str(self._tokenizer))
        while True:
            yield batch(sp, TowerShape(), self._size, rng)


def train(
    out: Path, seconds: float, size: int = 48, rate: float = 2e-3, seed: int = 1, device: str = "cpu", drawers: int = 0
) -> dict[str, Any]:
    """Trains for so much time, on a CPU of the processor."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    spent = time.process_time if device == "cpu" else time.monotonic
    out.mkdir(parents=True, exist_ok=True)
    (out / "tokenizer.model").write_bytes(tokenizer())
    sp = sentencepiece.SentencePieceProcessor(model_file=str(out / "tokenizer.model"))
    batches = iter(
        DataLoader(
            Drawn(out / "tokenizer.model", size, seed), None, num_workers=drawers, prefetch_factor=4 if drawers else None
        )
    )
    model, shape = Seeing().to(device), TowerShape()
    matrices = [p for part in (model.text.blk, model.tower.blk) for p in part.parameters() if p.ndim > 1]
    mine = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in mine]
    optimizers = [
        torch.optim.AdamW(rest, lr=rate, weight_decay=0.01, betas=(0.9, 0.95)),
        Muon(matrices, rate, 0.05, compiled=False),
    ]
    begun, step, noted = spent(), 0, 0.0
    history: list[dict[str, float]] = []
    losses: list[Tensor] = []
    while (progress := (spent() - begun) / seconds) < 1:
        *inputs, targets = (given.to(device) for given in next(batches))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * schedule(progress)
        loss = F.cross_entropy(model(*inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        losses.append(loss.detach())
        if progress - noted >= 0.02:
            noted = progress
            history.append(
                {"progress": round(progress, 3), "step": step, "loss": round(float(torch.stack(losses).mean()), 4)}
            )
            losses = []
            print(json.dumps(history[-1]), flush=True)
            save(model, out)
    save(model, out)
    summary: dict[str, Any] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": step,
        "pictures": step * size,
        "seconds": round(spent() - begun, 1),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "torch": torch.__version__,
        "answers_right": right(model, sp, shape),
        "history": history,
    }
    (out / "run.json").write_text(json.dumps(summary, indent=1) + "\n")
    return summary


@torch.no_grad()
def right(model: Seeing, sp: sentencepiece.SentencePieceProcessor, shape: TowerShape, count: int = 300) -> float:
    """The share of learned tokens of unseen pictures that are the likeliest."""
    device = model.tower.class_embd.device
    *inputs, targets = (given.to(device) for given in batch(sp, shape, count, random.Random(10**6)))
    return round(float((model(*inputs).argmax(-1) == targets).float().mean()), 4)


def save(model: Seeing, out: Path) -> None:
    data = io.BytesIO()
    np.savez(data, **{name: p.detach().half().cpu().numpy() for name, p in model.named_parameters()})
    (out / "weights.npz").write_bytes(data.getvalue())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=900.0, help="of the processor, on a GPU of the clock")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", type=int, default=48, help="pictures a step")
    parser.add_argument("--drawers", type=int, default=0, help="processes that draw; 0 for this one")
    args = parser.parse_args()
    print(json.dumps(train(args.out, args.seconds, args.size, device=args.device, drawers=args.drawers)))


if __name__ == "__main__":
    main()
