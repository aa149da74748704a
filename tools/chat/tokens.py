"""Dialogues and books as token ids, in one file that training reads without any tokenizer.

    python -m tools.chat.tokens --books books-train.txt --unseen books-heldout.txt --out input/ --dialogues 240000

`input/tokenizer.model` is trained on the books and on dialogues; `input/data.npz.xz` holds for chat, and for held-out
wordings, tokens uint16 [N], lengths uint16 [D] and which tokens are learned as bits [N]; and for books tokens uint16 [N]. A
dialogue is

    <s><|im_start|>user\\n...<|im_end|>\\n<|im_start|>assistant\\n...<|im_end|>\\n

of which the assistant's words and their <|im_end|> are learned.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import sentencepiece

from tools.chat.dialogue import Dialogue, dialogue
from tools.chat.draw import Draw
from tools.demo_data import BOS, EOS, documents

START, END = 3, 4
CONTEXT = 1024
_CHUNK = 10_000


@dataclass(frozen=True)
class Ids:
    """Token ids of dialogues, one after another."""

    tokens: np.ndarray  # [N] uint16
    lengths: np.ndarray  # [D] uint16
    learned: np.ndarray  # [N] bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--books", type=Path, required=True)
    parser.add_argument("--unseen", type=Path, required=True, help="books for the held-out loss")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dialogues", type=int, default=240_000)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    model = args.out / "tokenizer.model"
    if not model.exists():
        model.write_bytes(train_tokenizer(args.books, args.vocabulary))
    jobs = [
        (seed, min(_CHUNK, args.dialogues - seed * _CHUNK), args.books, model)
        for seed in range(-(-args.dialogues // _CHUNK))
    ]
    with ProcessPoolExecutor(args.processes) as pool:
        chat = joined(list(pool.map(_written, jobs)))
    sp = sentencepiece.SentencePieceProcessor(model_file=str(model))
    unseen = Draw(1_000_000, heldout=True)
    held = joined([ids(sp, [dialogue(unseen) for _ in range(2000)])])
    arrays = {
        f"{name}_{what}": array
        for name, part in (("chat", chat), ("heldout", held))
        for what, array in (("tokens", part.tokens), ("lengths", part.lengths), ("learned", np.packbits(part.learned)))
    }
    arrays["books"], arrays["unseen_books"] = books(sp, args.books), books(sp, args.unseen)[: 64 * CONTEXT]
    arrays["pieces"] = np.array([sp.id_to_piece(i) for i in range(sp.get_piece_size())])
    out = io.BytesIO()
    np.savez(out, **arrays)
    target = args.out / "data.npz.xz"
    target.write_bytes(lzma.compress(out.getvalue(), preset=6))
    sizes = {name: int(array.size) for name, array in arrays.items()}
    print(json.dumps({"bytes": target.stat().st_size, **sizes}))


def train_tokenizer(path: Path, size: int) -> bytes:
    """A tokenizer of books and dialogues."""
    draw = Draw(999_999)
    lines = [line for paragraphs in documents(path) for line in paragraphs]
    for _ in range(30_000):
        lines += [line for message in dialogue(draw).messages() for line in message["content"].split("\n") if line]
    return fit(lines, size)


def fit(lines: list[str], size: int) -> bytes:
    """A sentencepiece BPE model of texts; without a prefix space, digits apart, the rest by bytes."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=out,
        model_type="bpe",
        vocab_size=size,
        byte_fallback=True,
        character_coverage=0.9999,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        split_digits=True,
        max_sentence_length=10000,
        unk_id=0,
        bos_id=BOS,
        eos_id=EOS,
        pad_id=-1,
        control_symbols=["<|im_start|>", "<|im_end|>"],
        num_threads=2,
        minloglevel=2,
    )
    return out.getvalue()


def passages(path: Path) -> list[tuple[str, str]]:
    """Beginnings of paragraphs, one or two sentences, and the one to three sentences that follow."""
    found = []
    for paragraphs in documents(path):
        for line in paragraphs:
            sentences = re.split(r"(?<=[.!?]) (?=[A-Z])", line)
            for at in range(0, len(sentences) - 2, 3):
                begin, on = sentences[at], " ".join(sentences[at + 1 : at + 3])
                if 30 <= len(begin) <= 200 and 30 <= len(on) <= 350 and begin.count('"') % 2 == 0 and begin.count("'") < 2:
                    found.append((begin, on))
    return found


def ids(sp: sentencepiece.SentencePieceProcessor, dialogues: list[Dialogue]) -> Ids:
    """Dialogues of at most CONTEXT tokens; longer ones are left out."""
    messages = [message for d in dialogues for message in d.messages()]
    encoded = iter(sp.encode([f"{m['role']}\n{m['content']}" for m in messages]))
    newline, tokens, learned, lengths = sp.piece_to_id("<0x0A>"), [], [], []
    for d in dialogues:
        row, of_row = [BOS], [False]
        for message in d.messages():
            words = next(encoded)
            row += [START, *words, END, newline]
            # The role and its newline are given, the answer and its end are learned.
            given = words.index(newline) + 2
            mine = message["role"] == "assistant"
            of_row += [False] * given + [mine] * (len(words) + 2 - given) + [False]
        if len(row) <= CONTEXT:
            tokens += row
            learned += of_row
            lengths.append(len(row))
    return Ids(np.array(tokens, np.uint16), np.array(lengths, np.uint16), np.array(learned, bool))


def joined(parts: list[Ids]) -> Ids:
    return Ids(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("tokens", "lengths", "learned")))


def books(sp: sentencepiece.SentencePieceProcessor, path: Path) -> np.ndarray:
    """Every document as <s> ... </s>, one after another."""
    rows = sp.encode(["\n".join(paragraphs) for paragraphs in documents(path)])
    return np.concatenate([np.array([BOS, *row, EOS], np.uint16) for row in rows])


def _written(job: tuple[int, int, Path, Path]) -> Ids:
    seed, count, path, model = job
    draw = Draw(seed, passages=passages(path))
    return ids(sentencepiece.SentencePieceProcessor(model_file=str(model)), [dialogue(draw) for _ in range(count)])


if __name__ == "__main__":
    main()
