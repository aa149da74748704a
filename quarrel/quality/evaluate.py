"""A text through a model: its perplexity, and against or into a file of reference log-probabilities."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from quarrel.errors import RequestError
from quarrel.llm import LLM
from quarrel.quality.base_file import BaseFile, BaseWriter
from quarrel.quality.chunks import chunks, scored
from quarrel.quality.divergence import Divergence, Estimate, Score


@dataclass(frozen=True)
class Evaluation:
    """The result."""

    perplexity: Estimate
    tokens: int
    """Those that were scored."""
    chunks: int
    n_ctx: int
    seconds: float
    divergence: Divergence | None = None


Progress = Callable[[int, int, float], None]
"""Chunks done, chunks in all, perplexity so far."""


def evaluate(
    llm: LLM, pieces: Sequence[Sequence[int]], base: BaseFile | None, save: Path | None, progress: Progress
) -> Evaluation:
    """Scores the second half of every piece; all have the same length."""
    began, score = time.perf_counter(), Score()
    rows = scored(len(pieces[0]))
    references = base.rows() if base is not None else None
    writer = BaseWriter(save, [list(p) for p in pieces], llm.spec.n_vocab) if save is not None else None
    try:
        for i, piece in enumerate(pieces):
            logits = llm.logits(piece)[rows]
            score.add(logits, piece[rows.start + 1 :], None if references is None else next(references))
            if writer is not None:
                writer.add(logits)
            progress(i + 1, len(pieces), score.perplexity().value)
        if writer is not None:
            writer.finish()
    except BaseException:
        if writer is not None:
            writer.abandon()
        raise
    seconds = time.perf_counter() - began
    return Evaluation(score.perplexity(), len(score), len(pieces), len(pieces[0]), seconds, score.divergence())


def pieces_of(llm: LLM, text: str, n_ctx: int, most: int | None) -> list[list[int]]:
    """The text's chunks, as llama-perplexity makes them: with a BOS at the head of each where the model adds one."""
    text = text.removesuffix("\n")
    vocab = llm.tokenizer
    bos = vocab.bos_id if vocab.add_bos else None
    return list(chunks(vocab.encode(text), n_ctx, bos, most))


def pieces_of_base(llm: LLM, base: BaseFile, most: int | None) -> list[list[int]]:
    """The chunks that the reference was made of; refuses another vocabulary."""
    if base.n_vocab != llm.spec.n_vocab:
        raise RequestError(
            f"the reference was made over a vocabulary of {base.n_vocab} tokens and the model has {llm.spec.n_vocab}:"
            " use the model's own original for the reference"
        )
    return base.pieces if most is None else base.pieces[:most]
