"""Answers of the WebSocket that outlast their connection: a page that is loaded again finds by its name what runs, and what
came meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from quarrel.server.errors import Refused

KEPT_SECONDS = 120.0
"""How long an answer runs on that nobody follows, and how long one that has ended can be found."""
MAX_KEPT = 64
"""Of one caller."""
MAX_ANSWERS = 1024
MAX_TEXT = 8 << 20
"""Characters of all answers that have ended."""

Json = dict[str, Any]


class Follower(Protocol):
    """Whoever hears of an answer."""

    def hear(self, kind: str, payload: Json) -> None: ...

    def ended(self, answer: Answer) -> None: ...


class Answer:
    """What has come of one request. kept: it outlasts the connection that asked for it."""

    def __init__(self, id: str, caller: str, *, kept: bool) -> None:
        self.id, self.caller, self.kept = id, caller, kept
        self.text = ""
        self.end: tuple[str, Json] | None = None
        """The message that was its last."""
        self.followers: set[Follower] = set()
        self.task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def follow(self, follower: Follower) -> None:
        self.followers.add(follower)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def leave(self, follower: Follower) -> None:
        """Without a follower it ends: at once, or after a while if it is kept."""
        self.followers.discard(follower)
        if self.followers or self.task is None or self.task.done():
            return
        if self.kept:
            self._timer = asyncio.get_running_loop().call_later(KEPT_SECONDS, self.task.cancel)
        else:
            self.task.cancel()

    def say(self, kind: str, payload: Json) -> None:
        """To all who follow it."""
        if kind == "inference" and self.kept:
            self.text += payload["token"]
        if kind == "error" or (kind == "inference" and payload["complete"]):
            self.end = (kind, payload)
        for follower in tuple(self.followers):
            follower.hear(kind, payload)


class Answers:
    """The kept ones, by caller and name: nobody finds those of another caller."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], Answer] = {}

    def keep(self, answer: Answer) -> None:
        """Raises `Refused` where the name is taken, or too many run."""
        if (answer.caller, answer.id) in self._kept:
            raise Refused(400, "invalid_request", f"the request {answer.id!r} is known already")
        own = [a for a in self._kept.values() if a.caller == answer.caller]
        for found, most in ((own, MAX_KEPT), (list(self._kept.values()), MAX_ANSWERS)):
            if len(found) >= most:
                oldest = next((a for a in found if a.end is not None), None)
                if oldest is None:
                    raise Refused(429, "queue_full", f"{most} kept answers run already: try again later", retry_after=5.0)
                self._forget(oldest)
        self._kept[answer.caller, answer.id] = answer

    def find(self, caller: str, id: object) -> Answer:
        """Raises `Refused` for one that is not there."""
        found = self._kept.get((caller, id)) if isinstance(id, str) else None
        if found is None:
            raise Refused(404, "not_running", "this request is not running, and its answer is no longer kept")
        return found

    def ended(self, answer: Answer) -> None:
        """Keeps what has ended for a while, as far as there is room."""
        if not answer.kept:
            return
        asyncio.get_running_loop().call_later(KEPT_SECONDS, self._forget, answer)
        done = [a for a in self._kept.values() if a.end is not None]
        while len(done) > 1 and sum(len(a.text) for a in done) > MAX_TEXT:
            self._forget(done.pop(0))

    def _forget(self, answer: Answer) -> None:
        if self._kept.get((answer.caller, answer.id)) is answer:
            del self._kept[answer.caller, answer.id]
