"""Prefill and decode apart: long prompts are read by another process (`prompt_reader.py`), whose cache blocks come here.

A question is JSON: `tokens`, `salt`, `adapter`, and `memory`, into which a process of this host puts the answer
(`flight/segments.py`). It is the saved text (`engine/saved.py`) without a check sum; nothing is sent where it lies there.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from dataclasses import asdict
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
"""Prompts that each process reads for this one at once: each has memory of its own here."""
PAUSE = 5.0
"""For which a process is left alone that did not answer."""
log = logging.getLogger("quarrel")


class Prefillers:
    """The processes that read prompts for this one. addresses: grpc://HOST:PORT, with commas between several; each prompt
    goes to the one that reads the fewest for this process."""

    def __init__(self, addresses: str, prefixes: Prefixes, adapters: tuple[str, ...]) -> None:
        from quarrel.flight.handover import Taker  # only here: most models have none
        from quarrel.flight.segments import Lender

        key = read_environment().prefill_key
        self._takers = [Taker(address.strip(), SECONDS, key) for address in addresses.split(",")]
        self._prefixes, self._adapters = prefixes, adapters
        self._lock, self._places = threading.Lock(), threading.Semaphore(READING * len(self._takers))
        self._reading, self._back, self._gone = [0] * len(self._takers), [0.0] * len(self._takers), set[int]()
        prefixes.check()
        self._lender, self._putting = Lender(prefixes.pin), threading.Lock()  # one by one, or the engine waits for several

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
        self._lender.close()

    def _fetched(self, tokens: list[int], place: dict[str, Any]) -> int:
        tried: set[int] = set()
        while (which := self._next(tried)) is not None:
            tried.add(which)
            try:
                found = self._take(which, tokens, place)
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

    def _take(self, which: int, tokens: list[int], place: dict[str, Any]) -> int:
        with self._lender.lend(self._prefixes.room(len(tokens))) as lent:
            lent.array[:64] = 0  # so that what lay there is no saved text any more
            question = {"tokens": tokens, **place, "memory": lent.name and asdict(lent.name)}
            taken = self._takers[which].take(json.dumps(question).encode())
            try:
                size = taken.readinto(lent.array)
            finally:
                taken.close()
            with self._putting:
                return len(self._prefixes.put(lent.array[: size or None], check=False, **place))

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
