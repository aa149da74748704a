"""A text cut as llama-perplexity cuts it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quarrel.errors import RequestError


def chunks(tokens: Sequence[int], n_ctx: int, bos: int | None, most: int | None = None) -> Iterator[list[int]]:
    """Consecutive pieces of `n_ctx` tokens; what is left over is dropped. With `bos`, it replaces the first of each.

    A piece's second half is scored, so that each token has at least `n_ctx / 2` before it.
    """
    count = len(tokens) // n_ctx
    if n_ctx < 4 or count < 1:
        raise RequestError(
            f"the text has {len(tokens)} tokens and a chunk {n_ctx}: give a text of at least one chunk, or a smaller one"
            " of at least 4"
        )
    for i in range(count if most is None else min(count, most)):
        piece = list(tokens[i * n_ctx : (i + 1) * n_ctx])
        if bos is not None:
            piece[0] = bos
        yield piece


def scored(n_ctx: int) -> slice:
    """Rows of a piece's logits that count: row t predicts token t + 1."""
    return slice(n_ctx // 2, n_ctx - 1)
