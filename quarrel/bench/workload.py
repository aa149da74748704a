"""What is measured: prompts, decoding, at a depth, in a batch. Names are llama-bench's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["prefill", "decode", "engine"]


@dataclass(frozen=True)
class Test:
    """`tokens` are read (prefill) or made (decode) behind `depth` tokens that are there already, in `batch` sequences."""

    kind: Kind
    tokens: int
    depth: int = 0
    batch: int = 1

    @property
    def name(self) -> str:
        head = {"prefill": "pp", "decode": "tg", "engine": "engine"}[self.kind]
        batch = f" x{self.batch}" if self.batch > 1 else ""
        return f"{head}{self.tokens}{batch}" + (f" @ d{self.depth}" if self.depth else "")

    @property
    def length(self) -> int:
        """Tokens of one sequence at the end."""
        return self.depth + self.tokens

    @property
    def work(self) -> int:
        """Tokens that the time is divided by."""
        return self.tokens * self.batch


def matrix(
    prompts: Sequence[int],
    tokens: Sequence[int],
    depths: Sequence[int],
    batches: Sequence[int],
    prompt_length: int,
    engine: bool,
) -> Iterator[Test]:
    """Every prompt and every continuation at every depth, then the batches, whose sequences have `prompt_length` tokens."""
    for depth in depths:
        yield from (Test("prefill", n, depth) for n in prompts if n)
        yield from (Test("decode", n, depth) for n in tokens if n)
    for batch in batches:
        yield from (Test("decode", n, prompt_length, batch) for n in tokens if n)
    if engine:
        yield from (Test("engine", n, prompt_length, batch) for batch in (batches or [1]) for n in tokens if n)
