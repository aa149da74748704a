"""Prefill and decode apart: long prompts are read by another process (`prompt_reader.py`), whose cache blocks come here.

A question is JSON: `tokens`, `salt`, `adapter`. The answer is the saved text (`engine/saved.py`) without a check sum.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from quarrel.engine import Request
from quarrel.env import read_environment
from quarrel.errors import QuarrelError

if TYPE_CHECKING:
    from quarrel.llm.saved import Prefixes

LEAST = 256
"""Tokens that must be missing here: for fewer, the way there and back is longer."""
SECONDS = 120.0
"""For which a prompt is waited for."""
READING = 4
"""Prompts that each process reads for this one at once: what has come of them waits in this one's memory."""
PAUSE = 5.0
"""For which a process is left alone that did not answer."""
log = logging.getLogger("quarrel")


class Prefillers:
    """The processes that read prompts for this one. addresses: grpc://HOST:PORT, with commas between several; each prompt
    goes to the one that reads the fewest for this process."""

    def __init__(self, addresses: str, prefixes: Prefixes, adapters: tuple[str, ...]) -> None:
        from quarrel.flight.handover import Taker  # only here: most models have none

        key = read_environment().prefill_key
        self._takers = [Taker(address.strip(), SECONDS, key) for address in addresses.split(",")]
        self._prefixes, self._adapters = prefixes, adapters
        self._lock, self._places = threading.Lock(), threading.Semaphore(READING * len(self._takers))
        self._reading, self._back, self._gone = [0] * len(self._takers), [0.0] * len(self._takers), set[int]()
        prefixes.check()

    def fetch(self, request: Request) -> int:
        """Has a request's prompt read elsewhere, if it is long and not known here: how many of its tokens are known then.
        Where nobody can, it is read here as any other is, and a line of the log says so once."""
        tokens = list(request.tokens[:-1])  # the last one always runs here
        if len(tokens) < LEAST or request.prompt_logprobs or request.sight is not None:
            return 0
        place: dict[str, Any] = {
            "salt": request.service.cache_salt,
            "adapter": self._adapters[request.adapter - 1] if request.adapter else None,
        }
        known = self._prefixes.known(tokens, **place)
        if len(tokens) - known < LEAST or not self._places.acquire(timeout=SECONDS):
            return known
        try:
            return self._fetched(tokens, place) or known
        finally:
            self._places.release()

    def close(self) -> None:
        for taker in self._takers:
            taker.close()

    def _fetched(self, tokens: list[int], place: dict[str, Any]) -> int:
        question = json.dumps({"tokens": tokens, **place}).encode()
        tried: set[int] = set()
        while (which := self._next(tried)) is not None:
            tried.add(which)
            try:
                found = self._take(which, question, place)
            except QuarrelError as error:
                self._failed(which, error)
                continue
            finally:
                with self._lock:
                    self._reading[which] -= 1
            with self._lock:
                self._gone.discard(which)
            return found
        return 0

    def _take(self, which: int, question: bytes, place: dict[str, Any]) -> int:
        taken = self._takers[which].take(question)
        try:
            return len(self._prefixes.put(taken, check=False, **place))
        finally:
            taken.close()

    def _next(self, tried: set[int]) -> int | None:
        now = time.monotonic()
        with self._lock:
            free = [i for i, back in enumerate(self._back) if back <= now and i not in tried]
            which = min(free, key=lambda i: self._reading[i], default=None)
            if which is not None:
                self._reading[which] += 1
            return which

    def _failed(self, which: int, error: QuarrelError) -> None:
        with self._lock:
            self._back[which] = time.monotonic() + PAUSE
            first = which not in self._gone
            self._gone.add(which)
        if first:
            log.warning("a prompt is not read elsewhere: %s", error)
