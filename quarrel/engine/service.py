"""How a request is to be served: what changes when its tokens come, never which."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from quarrel.errors import RequestError

Priority = Literal["interactive", "batch"]
MAX_SECONDS = 1e6
MAX_SALT = 256
MAX_DRAFT = 16


@dataclass(frozen=True)
class Service:
    """Every field is checked; `RequestError` names the field, the value and its range."""

    priority: Priority = "interactive"
    """`batch` goes behind what is interactive, unless it has waited ten seconds longer."""
    queue_seconds: float | None = None
    """Fails with DeadlineExceeded if its first step has not begun by then."""
    total_seconds: float | None = None
    """Fails with DeadlineExceeded, with the tokens so far in its result, if it is not done by then."""
    cache_salt: str = ""
    """Only requests of the same salt share prompts in the cache, so that none can measure what another has sent."""
    speculate: int = 0
    """How many tokens may be drafted at once from earlier places of the text and verified in one step; 0 is off."""
    draft: int = 8
    """How many the draft model may propose at once, where there is one and the text itself gives no draft; 0 is off."""
    progress: bool = False
    """Chunks also say how much of a long prompt has been read (`Chunk.read`)."""

    def __post_init__(self) -> None:
        if self.priority not in get_args(Priority):
            raise RequestError(
                f"priority is {self.priority!r}, wanted one of {', '.join(get_args(Priority))}", "service.priority"
            )
        for name in ("queue_seconds", "total_seconds"):
            value = getattr(self, name)
            sound = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if value is not None and not (sound and 0 < value <= MAX_SECONDS):
                wanted = f"seconds above 0 and up to {MAX_SECONDS:g}, or None"
                raise RequestError(f"{name} is {value!r}, wanted {wanted}", f"service.{name}")
        if not isinstance(self.cache_salt, str) or len(self.cache_salt) > MAX_SALT:
            raise RequestError(
                f"cache_salt is a {type(self.cache_salt).__name__}, wanted a text of at most {MAX_SALT} letters",
                "service.cache_salt",
            )
        if not isinstance(self.progress, bool):
            raise RequestError(f"progress is {self.progress!r}, wanted True or False", "service.progress")
        for name in ("speculate", "draft"):
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_DRAFT:
                raise RequestError(f"{name} is {count!r}, wanted a whole number from 0 to {MAX_DRAFT}", f"service.{name}")

    @property
    def rank(self) -> int:
        return get_args(Priority).index(self.priority)

    @property
    def salt(self) -> bytes:
        return self.cache_salt.encode("utf-8", "surrogatepass")


DEFAULT_SERVICE = Service()
