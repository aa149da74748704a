"""Train the bundled chat model on dialogues and books, for a given time, on one GPU or on a CPU.

    python -m tools.chat.train --data input/data.npz.xz --out run/ --seconds 240

A batch holds dialogues of like length, one in a row and filled up at its end, so that each sees itself alone without any
mask; or windows of books. Of dialogues the assistant's tokens are learned, of books all. The learning rate follows the
clock: up in the first 3% of the time, down to zero in the last half. Matrices are stepped by Muon, embedding and norms by
AdamW. `--out` receives float16 weights (`weights-*.npz`, `shape.json`), saved every minute and at the end, and
`run.json`, which is also the last line printed. It needs torch and numpy only.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tools.demo_model import Llama, Shape
from tools.demo_muon import Muon
from tools.demo_weights import save

SHAPE = Shape(
    vocab_size=4096,
    context_length=1024,
    embedding_length=384,
    feed_forward_length=1024,
    block_count=10,
    head_count=6,
    head_count_kv=2,
)
PROMPTS = (
    "Hello, who are you?",
    "Could you tell me a story about a fox and a lamp?",
    "What is the capital of Italy?",
    "How much is 17 + 8?",
    "Please sort these: 9, 2, 31, 5",
    "Tom has a green boat. He lives by the sea. What colour is the boat?",
    "Make this short: In the evening, the farmer opens the door near the old bridge, because it is late.",
    "How do I start the server of Quarrel?",
    "What will the weather be like next week in Berlin?",
    "Spell the word garden please",
)


@dataclass(frozen=True)
class Recipe:
    """How to train; every field is a flag of the same name."""

    seconds: float = 240.0
    batch_tokens: int = 32768
    learning_rate: float = 2.5e-3
    weight_decay: float = 0.1
    dropout: float = 0.0
    books_first: float = 0.4
    """Share of batches that are books in the first 40% of the time."""
    books_later: float = 0.08
    seed: int = 1
    max_steps: int = 0
    """End after so many steps, if not 0: for trials."""


@dataclass(frozen=True)
class Batch:
    """Ids [B, T], and of the flat places of their successors the learned ones [N] with their ids [N]."""

    ids: Tensor
    places: Tensor
    targets: Tensor


def batch(ids: np.ndarray, learned: np.ndarray, device: torch.device) -> Batch:
    """From rows [B, T + 1] of ids and of which are learned. Found on the host: the device never has to be waited for."""
    places = np.flatnonzero(learned[:, 1:])
    targets = ids[:, 1:].reshape(-1)[places]
    return Batch(*(torch.from_numpy(a.astype(np.int64)).to(device) for a in (ids[:, :-1], places, targets)))


class Corpus:
    """Dialogues of data.npz."""

    def __init__(self, arrays: dict[str, np.ndarray], name: str, device: torch.device) -> None:
        self._tokens = arrays[f"{name}_tokens"]
        self._learned = np.unpackbits(arrays[f"{name}_learned"], count=len(self._tokens)).astype(bool)
        self._lengths = arrays[f"{name}_lengths"].astype(np.int64)
        self._starts = np.concatenate([[0], np.cumsum(self._lengths)[:-1]])
        self._device = device

    def epoch(self, batch_tokens: int, rng: np.random.Generator) -> Iterator[Batch]:
        """Every dialogue once, in batches of about `batch_tokens`; those of like length are drawn together."""
        order = np.argsort(self._lengths + rng.random(len(self._lengths)) * 8)
        cuts, begin = [], 0
        while begin < len(order):
            rows = max(1, batch_tokens // int(self._lengths[order[begin]] + 8))
            cuts.append(order[begin : begin + rows])
            begin += rows
        for at in rng.permutation(len(cuts)):
            yield self._batch(cuts[at])

    def _batch(self, rows: np.ndarray) -> Batch:
        lengths = self._lengths[rows]
        places = np.arange(lengths.max())
        inside = places < lengths[:, None]  # [B, T + 1]
        at = np.where(inside, self._starts[rows][:, None] + places, 0)
        return batch(np.where(inside, self._tokens[at], 0), inside & self._learned[at], self._device)


def windows(books: np.ndarray, length: int, rows: int, device: torch.device, rng: np.random.Generator) -> Iterator[Batch]:
    """One epoch of a token stream in windows of `length`, from a drawn offset, all learned."""
    offset = int(rng.integers(length))
    cut = books[offset : offset + (len(books) - offset) // length * length].reshape(-1, length)
    for chosen in np.array_split(rng.permutation(len(cut)), max(1, len(cut) // rows)):
        yield batch(cut[chosen], np.ones((len(chosen), length), bool), device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--compile", action="store_true", help="torch.compile: a minute of compiling, then faster steps")
    for defaults in (SHAPE, Recipe()):
        for field in fields(defaults):
            kind = type(getattr(defaults, field.name))
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=getattr(defaults, field.name))
    args = parser.parse_args()
    shape = Shape(**{field.name: getattr(args, field.name) for field in fields(Shape)})
    recipe = Recipe(**{field.name: getattr(args, field.name) for field in fields(Recipe)})
    print(json.dumps(train(shape, recipe, args.data, args.out, args.compile)))


def train(shape: Shape, recipe: Recipe, data: Path, out: Path, compiled: bool) -> dict[str, object]:
    """Train one model until the clock says stop, keep it in `out`, and return what run.json holds."""
    begun = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(recipe.seed)
    torch.set_float32_matmul_precision("high")
    rng = np.random.default_rng(recipe.seed)
    arrays = _arrays(data)
    chat, heldout = Corpus(arrays, "chat", device), Corpus(arrays, "heldout", device)
    out.mkdir(parents=True, exist_ok=True)

    model = Llama(shape, recipe.dropout).to(device)
    loss_of = torch.compile(_loss, dynamic=True) if compiled else _loss
    optimizers = _optimizers(model, recipe, compiled)
    dialogues = _forever(lambda: chat.epoch(recipe.batch_tokens, rng))
    width = min(shape.context_length, recipe.batch_tokens)
    pages = _forever(lambda: windows(arrays["books"], width, recipe.batch_tokens // width, device, rng))

    history: list[dict[str, float]] = []
    sums = {"chat": torch.zeros(2, device=device), "books": torch.zeros(2, device=device)}
    step, tokens, saved, noted = 0, 0, time.perf_counter(), 0.0
    print(f"loaded in {time.perf_counter() - begun:.1f}s on {device}", flush=True)
    while True:
        elapsed = time.perf_counter() - begun
        progress = elapsed / recipe.seconds
        if progress >= 1 or (recipe.max_steps and step >= recipe.max_steps):
            break
        kind = "books" if rng.random() < (recipe.books_first if progress < 0.4 else recipe.books_later) else "chat"
        drawn = next(pages if kind == "books" else dialogues)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * _schedule(progress)
        with _autocast(device):
            loss = loss_of(model, drawn.ids, drawn.places, drawn.targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        sums[kind] += torch.stack([loss.detach().float(), torch.ones_like(loss, dtype=torch.float32)])
        step, tokens = step + 1, tokens + drawn.ids.numel()
        # Reading the losses waits for the device, which also keeps the clock of the schedule true.
        if step % 20 == 0:
            loss.item()
        if progress - noted >= 0.05:
            noted = progress
            means = {name: round(float(s[0] / s[1].clamp(min=1)), 4) for name, s in sums.items()}
            sums = {name: torch.zeros_like(s) for name, s in sums.items()}
            history.append({"seconds": round(elapsed, 1), "step": step, "tokens": tokens, **means})
            print(json.dumps(history[-1]), flush=True)
        if time.perf_counter() - saved > 60:
            save(model, out)
            saved = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.synchronize()
    trained = time.perf_counter() - begun
    save(model, out)

    model.eval()
    summary: dict[str, object] = {
        "shape": asdict(shape),
        "recipe": asdict(recipe),
        "compiled": compiled,
        "parameters": sum(p.numel() for p in model.parameters()),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "steps": step,
        "tokens": tokens,
        "seconds": round(trained, 1),
        "chat_epochs": round(tokens / max(1, len(arrays["chat_tokens"])), 2),
        "heldout_chat_loss": _mean(model, heldout.epoch(8192, np.random.default_rng(0)), device),
        "heldout_books_loss": _mean(
            model, windows(arrays["unseen_books"], width, 8, device, np.random.default_rng(0)), device
        ),
        "history": history,
        "samples": samples(model, arrays["pieces"]),
    }
    (out / "run.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return summary


def _arrays(path: Path) -> dict[str, np.ndarray]:
    data = path.read_bytes()
    return dict(np.load(io.BytesIO(lzma.decompress(data) if path.suffix == ".xz" else data)))


def samples(model: Llama, pieces: np.ndarray) -> list[dict[str, str]]:
    """Greedy answers to PROMPTS: for looking at. Words are cut into pieces by longest match, which is near enough."""
    where = {str(piece): at for at, piece in enumerate(pieces)}
    start, end, newline = where["<|im_start|>"], where["<|im_end|>"], where["<0x0A>"]

    def cut(text: str) -> list[int]:
        text, found = text.replace(" ", "▁"), []
        while text:
            size = next(size for size in range(min(len(text), 16), 0, -1) if text[:size] in where)
            found.append(where[text[:size]])
            text = text[size:]
        return found

    rows = []
    for prompt in PROMPTS:
        ids = [1, start, *cut("user"), newline, *cut(prompt), end, newline, start, *cut("assistant"), newline]
        answer = model.sample(ids, 120, 1e-4, 1, end)[len(ids) :]
        rows.append({"user": prompt, "assistant": "".join(str(pieces[i]) for i in answer).replace("▁", " ")})
    return rows


def _loss(model: Llama, ids: Tensor, places: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the learned tokens; logits are made of these alone."""
    hidden = model.hidden(ids).flatten(0, 1)[places]
    return F.cross_entropy(F.linear(hidden, model.token_embd.weight).float(), targets)  # of [N, V]


@torch.no_grad()
def _mean(model: Llama, batches: Iterator[Batch], device: torch.device) -> float:
    total, count = 0.0, 0
    for drawn in batches:
        with _autocast(device):
            loss = _loss(model, drawn.ids, drawn.places, drawn.targets)
        total, count = total + float(loss) * len(drawn.targets), count + len(drawn.targets)
    return round(total / count, 5)


def _optimizers(model: Llama, recipe: Recipe, compiled: bool) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.blk.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": [model.token_embd.weight], "weight_decay": recipe.weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    return [
        torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95)),
        Muon(matrices, lr=recipe.learning_rate, weight_decay=recipe.weight_decay, compiled=compiled),
    ]


def _schedule(progress: float) -> float:
    return min(progress / 0.03, 1.0, max(0.0, (1 - progress) / 0.5))


def _forever(epoch: Callable[[], Iterator[Batch]]) -> Iterator[Batch]:
    while True:
        yield from epoch()


def _autocast(device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


if __name__ == "__main__":
    main()
