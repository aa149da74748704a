"""Text of the bundled model: clean paragraphs, split into stories, as token windows that begin at a paragraph.

The corpus is one paragraph a line, books apart by an empty line. Headings, advertisements and scholarly notes are
dropped; a heading or a line such as "Once upon a time" opens a new document. In the token stream a document is
`<s> paragraph \\n paragraph ... </s>`, so a model trained on it can begin at <s> and knows how a story ends.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import sentencepiece

BOS, EOS = 1, 2

_ADVERTISEMENTS = "Selections from L.C. Page"
_NOTE = re.compile(r"^(Source|Parallels|Remarks)\.--|copyright|electronic text|12 ?mo|\$\d|\[|\]", re.IGNORECASE)
_MARKER = re.compile(r"\s*(\(\d+\)|\[[\d*]+\])")
_ENDINGS = tuple(".!?'\"):;,-*")
_OPENING = re.compile(
    r"(Once upon a time|Once there|Once on a time|There (was|were|lived) once|There once|"
    r"(A long time|Long|Many years|Ages) ago|Long, long ago|In (the )?(olden|old|ancient|former) (times?|days)|"
    r"(A|In a) certain (king|man|country|kingdom|village|town)|"
    r"There was (a|an) (king|queen|man|woman|widow|poor|rich|old))\b",
    re.IGNORECASE,
)


def documents(path: Path) -> list[list[str]]:
    """The stories (or chapters) of a corpus file, each a list of paragraphs."""
    found: list[list[str]] = []
    for book in path.read_text(encoding="utf-8").split("\n\n"):
        found.append([])
        for line in book.split(_ADVERTISEMENTS)[0].strip().split("\n"):
            line = _MARKER.sub("", line).strip()
            if _is_heading(line):
                found.append([])
                continue
            if _NOTE.search(line) or len(re.findall(r"\d+", line)) > 2:
                continue
            if _OPENING.match(line):
                found.append([])
            found[-1].append(line)
    return [paragraphs for paragraphs in found if paragraphs]


def _is_heading(line: str) -> bool:
    letters = sum(c.isalpha() for c in line)
    return not line.endswith(_ENDINGS) or sum(c.isupper() for c in line) > 0.3 * letters


def tokenizer(texts: list[list[str]], vocab_size: int, path: Path) -> sentencepiece.SentencePieceProcessor:
    """The sentencepiece BPE model at `path`, trained on `texts` if the file is not there yet.

    Text is taken as it is (no normalisation, spaces kept); what the vocabulary lacks, the newline among it, falls to
    byte tokens, which is what a GGUF file of tokenizer model "llama" means.
    """
    if not path.exists():
        out = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line for paragraphs in texts for line in paragraphs),
            model_writer=out,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=0.9999,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            split_digits=True,
            max_sentence_length=10000,
            unk_id=0,
            bos_id=BOS,
            eos_id=EOS,
            pad_id=-1,
            num_threads=2,
            minloglevel=2,
        )
        path.write_bytes(out.getvalue())
    return sentencepiece.SentencePieceProcessor(model_file=str(path))


@dataclass(frozen=True)
class Stream:
    """A token stream, and its paragraphs as they read when a window begins with them."""

    tokens: np.ndarray  # [N] int64
    starts: np.ndarray  # [P] int64, ascending: first token of each paragraph
    heads: list[list[int]]  # P paragraphs as encoded on their own: their first word carries the prefix space
    num_bytes: int  # of the text that the tokens spell, for bits per byte

    def windows(self, length: int, rng: np.random.Generator) -> np.ndarray:
        """One epoch: shuffled windows [W, length + 1] of <s> and `length` tokens, each begun at a paragraph."""
        rows = np.array(list(self._rows(length, int(rng.integers(8)))))  # [W, length]
        rng.shuffle(rows)
        return np.concatenate([np.full((len(rows), 1), BOS), rows], axis=1)

    def consecutive(self, length: int) -> np.ndarray:
        """Every token once, in order, for a loss: windows [W, length + 1] of <s> and `length` tokens, padded by -1."""
        count = -(-len(self.tokens) // length)
        rows = np.full((count, length), -1)
        rows.reshape(-1)[: len(self.tokens)] = self.tokens
        return np.concatenate([np.full((count, 1), BOS), rows], axis=1)

    def _rows(self, length: int, paragraph: int) -> Iterator[np.ndarray]:
        while paragraph < len(self.starts) - 1:
            head = self.heads[paragraph]
            rest = self._end(paragraph)
            stop = rest + max(length - len(head), 0)
            if stop > len(self.tokens):
                return
            yield np.concatenate([head, self.tokens[rest:stop]])[:length]
            # Begin again at the paragraph that this window cut, or at the next one if it was cut in its first.
            cut = int(np.searchsorted(self.starts, stop, side="right")) - 1
            paragraph = max(cut, paragraph + 1)

    def _end(self, paragraph: int) -> int:
        following = int(self.starts[paragraph + 1])
        return following - 2 if self.tokens[following - 1] == BOS else following - 1


def stream(texts: list[list[str]], sp: sentencepiece.SentencePieceProcessor) -> Stream:
    """Tokens of all documents, in order."""
    newline = sp.piece_to_id("<0x0A>")
    tokens: list[int] = []
    starts: list[int] = []
    num_bytes = 0
    for number, paragraphs in enumerate(texts):
        if number:
            tokens.append(BOS)  # the first one is the window's own
        ids = sp.encode("\n".join(paragraphs))
        starts += [len(tokens), *(len(tokens) + i + 1 for i, token in enumerate(ids) if token == newline)]
        tokens += [*ids, EOS]
        num_bytes += len("\n".join(paragraphs).encode())
    heads = sp.encode([line for paragraphs in texts for line in paragraphs])
    return Stream(np.array(tokens), np.array(starts), heads, num_bytes)
