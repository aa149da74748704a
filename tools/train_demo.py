"""Train the bundled model: a small llama on children's books, many epochs under strong regularisation.

    python -m tools.train_demo --train books-train.txt --heldout books-heldout.txt --out run/

Several epochs over few texts overfit, so dropout and weight decay are large, and the checkpoint kept is the one of the
lowest held-out loss. `--teacher RUN` (repeatable) adds distillation: the targets are mixed with the mean prediction of
runs made before. Matrices are stepped by Muon, the embedding and the norms by AdamW. `--out` receives float16 weights
(`weights-*.npz`, tokenizer.model) and `run.json`; the last line printed is the same JSON document.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tools.demo_data import BOS, EOS, Stream, documents, stream, tokenizer
from tools.demo_model import Llama, Shape
from tools.demo_muon import Muon
from tools.demo_weights import load, save

PROMPTS = ("Once upon a time", "There was once a king who", "The little girl", '"Where are you going?"')


@dataclass(frozen=True)
class Recipe:
    """How to train; every field is a flag of the same name."""

    epochs: int = 16
    batch: int = 32
    learning_rate: float = 2e-3
    weight_decay: float = 0.5
    dropout: float = 0.1
    warmup_steps: int = 200
    distil_weight: float = 0.7
    balance: float = 0.01
    evaluations: int = 8
    seed: int = 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--heldout", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--teacher", type=Path, action="append", default=[], help="folder of an earlier run")
    for field in (*fields(Shape), *fields(Recipe)):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    args = parser.parse_args()
    shape = Shape(**{field.name: getattr(args, field.name) for field in fields(Shape)})
    recipe = Recipe(**{field.name: getattr(args, field.name) for field in fields(Recipe)})
    print(json.dumps(train(shape, recipe, args.train, args.heldout, args.out, args.teacher)))


def train(shape: Shape, recipe: Recipe, corpus: Path, heldout: Path, out: Path, teachers: list[Path]) -> dict[str, object]:
    """Train one model, keep its best checkpoint in `out`, and return the summary that run.json holds."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(recipe.seed)
    rng = np.random.default_rng(recipe.seed)
    texts = documents(corpus)
    out.mkdir(parents=True, exist_ok=True)
    if teachers:
        shutil.copyfile(teachers[0] / "tokenizer.model", out / "tokenizer.model")
    sp = tokenizer(texts, shape.vocab_size, out / "tokenizer.model")
    text, unseen = stream(texts, sp), stream(documents(heldout), sp)

    model = Llama(shape, recipe.dropout).to(device)
    guides = [load(path).to(device).eval() for path in teachers]
    compiled = torch.compile if device.type == "cuda" else lambda function: function
    forward, loss_of, guide_forwards = compiled(model.scored), compiled(_loss), [compiled(guide) for guide in guides]
    optimizers = _optimizers(model, recipe)

    # Epochs differ by a few windows; one batch less than this one holds is in each of them.
    steps_per_epoch = len(text.windows(shape.context_length, np.random.default_rng(0))) // recipe.batch - 1
    total = steps_per_epoch * recipe.epochs
    every = max(1, total // recipe.evaluations)
    history: list[dict[str, float]] = []
    best, step, losses = math.inf, 0, []
    begun = time.perf_counter()
    for _ in range(recipe.epochs):
        order = torch.from_numpy(text.windows(shape.context_length, rng)).to(device)
        for batch in order[: steps_per_epoch * recipe.batch].split(recipe.batch):
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = recipe.learning_rate * _schedule(step, total, recipe.warmup_steps)
            with _autocast(device):
                logits, uneven = forward(batch[:, :-1])
                with torch.no_grad():
                    guidance = [guide(batch[:, :-1]) for guide in guide_forwards]
                loss = loss_of(logits, batch[:, 1:], guidance, recipe.distil_weight) + recipe.balance * uneven
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
            step += 1
            if step % every == 0 or step == total:
                nats = evaluate(model, unseen, device)
                history.append({"step": step, "train_loss": float(torch.stack(losses).mean()), "heldout_loss": nats})
                losses = []
                print(f"{out.name} {step}/{total} {time.perf_counter() - begun:.0f}s {history[-1]}", flush=True)
                if nats < best:
                    best = nats
                    save(model, out)
    seconds = time.perf_counter() - begun

    model = load(out).to(device).eval()
    nats = evaluate(model, unseen, device)
    summary: dict[str, object] = {
        "shape": asdict(shape),
        "recipe": asdict(recipe),
        "teachers": [path.name for path in teachers],
        "parameters": sum(p.numel() for p in model.parameters()),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "train_tokens": len(text.tokens),
        "train_bytes": text.num_bytes,
        "heldout_tokens": len(unseen.tokens),
        "heldout_bytes": unseen.num_bytes,
        "seconds": round(seconds, 1),
        "history": history,
        "heldout_loss": nats,
        "heldout_perplexity": math.exp(nats),
        "heldout_bits_per_byte": nats * len(unseen.tokens) / math.log(2) / unseen.num_bytes,
        "samples": [sp.decode(model.sample([BOS, *sp.encode(prompt)], 160, 0.7, recipe.seed, EOS)) for prompt in PROMPTS],
    }
    (out / "run.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return summary


@torch.no_grad()
def evaluate(model: Llama, unseen: Stream, device: torch.device) -> float:
    """Mean loss in nats per token over consecutive windows of a full context, each begun with <s>."""
    training = model.training
    model.eval()
    total = 0.0
    for batch in torch.from_numpy(unseen.consecutive(model.shape.context_length)).to(device).split(16):
        with _autocast(device):
            logits = model(batch[:, :-1].clamp(min=0))
        total += float(
            F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten(), ignore_index=-1, reduction="sum")
        )
    model.train(training)
    return total / len(unseen.tokens)


def _loss(logits: Tensor, targets: Tensor, guidance: list[Tensor], weight: float) -> Tensor:
    """Cross-entropy, mixed with the cross-entropy to the teachers' mean prediction where there are teachers."""
    flat = logits.flatten(0, 1).float()  # [B T, V]
    loss = F.cross_entropy(flat, targets.flatten())
    if not guidance:
        return loss
    soft = torch.stack([g.flatten(0, 1).float().softmax(-1) for g in guidance]).mean(0)
    return (1 - weight) * loss + weight * F.cross_entropy(flat, soft)


def _optimizers(model: Llama, recipe: Recipe) -> list[torch.optim.Optimizer]:
    small = ("conv1d.weight", "gate_inp.weight")
    matrices = [p for name, p in model.blk.named_parameters() if p.ndim > 1 and not name.endswith(small)]
    others = [p for name, p in model.named_parameters() if p.ndim == 1 or name.endswith(small)]
    groups = [
        {"params": [model.token_embd.weight], "weight_decay": recipe.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [
        torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95)),
        Muon(matrices, lr=recipe.learning_rate, weight_decay=recipe.weight_decay),
    ]


def _schedule(step: int, total: int, warmup: int) -> float:
    """Linear warm-up, then a cosine to zero."""
    return min((step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * step / total)))


def _autocast(device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


if __name__ == "__main__":
    main()
