"""How far a request is, told while it runs: how much of its prompt has been read, and what it has cost so far."""

from __future__ import annotations

import time
from typing import Any

from quarrel.engine import Chunk, Result
from quarrel.server.dispatch import Generation

Json = dict[str, Any]


class Progress:
    """Of one of a generation's requests. timed: with the figures of each event's moment."""

    def __init__(self, generation: Generation, index: int, *, timed: bool) -> None:
        self._total, self._began, self._timed = len(generation.requests[index].tokens), generation.began, timed
        self._cached = self._made = 0
        self._first = 0.0
        self._begun = False

    def reports(self, chunk: Chunk) -> list[Json]:
        """What the events of a chunk that tells of reading hold: the first one is of the moment before."""
        seconds = time.perf_counter() - self._began
        rows = [] if self._begun else [self._report(chunk.cached, chunk.cached, 0.0)]
        self._begun, self._cached = True, chunk.cached
        return [*rows, self._report(chunk.cached, chunk.read, seconds)]

    def with_token(self, chunk: Chunk) -> Json:
        """What the event of a token holds besides."""
        now = time.perf_counter() - self._began
        self._first = self._first or now
        self._made += chunk.token_id is not None
        if not self._timed:
            return {}
        read = self._total - self._cached
        return {"timings": figures(self._cached, read, self._first, self._made, now - self._first)}

    def _report(self, cached: int, read: int, seconds: float) -> Json:
        made = {"total": self._total, "cache": cached, "processed": read, "time_ms": int(1000 * seconds)}
        timings = {"timings": figures(cached, read - cached, seconds, 0, 0.0)} if self._timed else {}
        return {"prompt_progress": made, **timings}


def drawn(result: Result) -> int:
    """Tokens, with the one that ended the text."""
    return result.usage.completion_tokens + isinstance(result.stopped_by, int)


def timings(result: Result) -> Json:
    """What a request cost; `cache_n + prompt_n` are the prompt's tokens."""
    cached, spent = result.usage.cached_tokens, result.timings
    row = figures(cached, result.usage.prompt_tokens - cached, spent.prefill, drawn(result), spent.decode)
    if spent.guessed_tokens:
        row |= {"draft_n": spent.guessed_tokens, "draft_n_accepted": spent.right_tokens}
    return row


def figures(cached: int, read: int, reading: float, made: int, drawing: float) -> Json:
    """Counts of tokens, and seconds. The first token drawn comes with the prompt's last row: it costs no step."""
    row: Json = {"cache_n": cached}
    for name, count, steps, seconds in (("prompt", read, read, reading), ("predicted", made, made - 1, drawing)):
        spent = round(1000 * seconds, 3)
        row |= {
            f"{name}_n": count,
            f"{name}_ms": spent,
            f"{name}_per_token_ms": spent / steps if steps > 0 else 0.0,
            f"{name}_per_second": 1000 * steps / spent if spent and steps > 0 else 0.0,
        }
    return row
