"""What a caller gets back: typed, and plain enough to print, compare or send."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from quarrel.errors import QuarrelError

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class Usage:
    """Tokens by purpose. `cached_tokens` of the prompt were in the cache already and did not run again."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Timings:
    """Seconds: `load` of the model, once; `queued` until the first step, `prefill` until the first token, then `decode`."""

    load: float
    queued: float
    prefill: float
    decode: float
    prefill_tokens: int
    """Prompt tokens that ran."""
    decode_tokens: int
    """Tokens after the first."""
    guessed_tokens: int = 0
    """Tokens that a draft model or prompt lookup proposed, and those of them that were right."""
    right_tokens: int = 0

    @property
    def prefill_rate(self) -> float:
        """Tokens a second."""
        return self.prefill_tokens / self.prefill if self.prefill else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens a second."""
        return self.decode_tokens / self.decode if self.decode else 0.0


@dataclass(frozen=True)
class TokenLogprob:
    """Natural logarithms of the model's own probabilities; `top` holds the best (id, logprob), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Result:
    """One continuation.

    `token_ids` are all tokens drawn but the stop token. `finish_reason`: "stop" (a stop token or stop string, in
    `stopped_by`), "length" (max_tokens or the end of the context), "cancelled", "error" (why is in `error`, and as an
    exception of its own type in `failure`; what came before it is kept). `prompt_logprobs`, where they were asked for, has
    one for each token of the prompt but the first. `alternatives` are the other continuations of the same prompt when `n`
    was more than 1.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    seed: int
    stopped_by: int | str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    error: str | None = None
    failure: QuarrelError | None = field(default=None, compare=False)
    alternatives: tuple[Result, ...] = ()
    dropped: int = 0
    """How many of the oldest messages, or tokens of a plain prompt, were left out because the context is too short
    (`overflow`)."""
    shifted: int = 0
    """How many tokens were left out while it was generated, to go on past the end of the context."""


@dataclass(slots=True)  # one for each token of each request: a frozen one takes three times as long to make
class Chunk:
    """One drawn token and the text that became certain with it, or the end of a continuation (`result`).

    `text` may be empty while a character or a stop string is incomplete. `index` counts continuations from 0. Where
    `prompt_logprobs` are wanted, they are a chunk of their own, before the others; and so is `read`, where progress is
    wanted: how many tokens of the prompt have been read, once for each step that read a part of it, of which `cached` were
    known before.
    """

    text: str
    token_id: int | None = None
    index: int = 0
    logprob: TokenLogprob | None = None
    result: Result | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    read: int = 0
    cached: int = 0
