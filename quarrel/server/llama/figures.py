"""/metrics by llama-server's names: what its models have counted, also those that are out of memory now."""

from __future__ import annotations

import time
from collections import Counter

from quarrel.engine import Stats
from quarrel.llm import Model
from quarrel.server.models import ModelManager

_COUNTERS = (
    ("prompt_tokens_total", "Number of prompt tokens processed, excluding cached tokens", "prompt_tokens"),
    ("prompt_tokens_cached_total", "Number of prompt tokens reused from the cache", "known_tokens"),
    ("prompt_seconds_total", "Total time spent processing prompts", "prefill_seconds"),
    ("tokens_predicted_total", "Number of generation tokens processed", "drawn_tokens"),
    ("tokens_predicted_seconds_total", "Total time spent generating tokens", "decode_seconds"),
    ("n_decode_total", "Total number of steps of the model", "steps"),
    ("spec_decode_num_draft_tokens_total", "Speculative: Total draft tokens generated", "guessed_tokens"),
    ("spec_decode_num_accepted_tokens_total", "Speculative: Total draft tokens accepted", "right_tokens"),
    ("spec_decode_num_drafts_total", "Speculative: Total verification steps", "guesses"),
)
"""Its name, its help, and the field of `Stats`."""
_RATES = (
    ("prompt_tokens_seconds", "Average prompt throughput in tokens/s", "prompt_tokens", "prefill_seconds"),
    ("predicted_tokens_seconds", "Average generation throughput in tokens/s", "drawn_tokens", "decode_seconds"),
)
"""Since the last scrape: tokens over seconds."""


class Figures:
    """Of one application. `follow` is called wherever a model is loaded, on any thread."""

    def __init__(self) -> None:
        self.began = int(time.time())
        self.longest = 0
        """Tokens of the longest sequence so far."""
        self._running: dict[str, Stats] = {}
        self._before: Counter[str] = Counter()
        self._scraped: Counter[str] = Counter()

    def follow(self, source: str, llm: Model) -> None:
        """From now on what this model counts; what a copy of it before has counted is kept."""
        if (before := self._running.get(source)) is not None:
            self._before += _counted(before)
        self._running[source] = llm.stats()

    def text(self, models: ModelManager) -> bytes:
        """In Prometheus' format."""
        now = sum((_counted(stats) for stats in list(self._running.values())), Counter(self._before))
        busy = [e.loaded.llm.activity() for e in models.entries() if e.loaded is not None]
        rows: list[tuple[str, str, str, float]] = [(n, h, "counter", now[field]) for n, h, field in _COUNTERS]
        rows.append(("n_tokens_max", "Largest observed sequence length (prompt + generation)", "counter", self.longest))
        for name, help, tokens, seconds in _RATES:
            spent = now[seconds] - self._scraped[seconds]
            rows.append((name, help, "gauge", (now[tokens] - self._scraped[tokens]) / spent if spent else 0.0))
        share = now["sequences"] / max(now["steps"], 1)
        rows += [
            ("requests_processing", "Number of requests processing", "gauge", sum(a.running for a in busy)),
            ("requests_deferred", "Number of requests deferred", "gauge", sum(a.waiting for a in busy)),
            ("n_busy_slots_per_decode", "Average number of sequences per step", "gauge", share),
        ]
        self._scraped = now
        lines = (f"# HELP llamacpp:{n} {h}\n# TYPE llamacpp:{n} {kind}\nllamacpp:{n} {v}\n" for n, h, kind, v in rows)
        return "".join(lines).encode()


def _counted(stats: Stats) -> Counter[str]:
    made: Counter[str] = Counter({field: getattr(stats, field) for _, _, field in _COUNTERS})
    made["sequences"] = int(stats.batch_sequences.sum)
    return made
