"""A model that a server offers, and one that it has loaded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from quarrel.llm import Model

State = Literal["unloaded", "loading", "loaded", "failed"]


class LoadedModel:
    """A loaded model and how many requests it serves; closed when it is retired and the last one has ended."""

    def __init__(self, llm: Model) -> None:
        self.llm = llm
        self.users = 0
        self.since = self.used = time.monotonic()
        self.closing: asyncio.Future[None] | None = None
        """Done when its memory is free again."""
        self._retired = False

    def take(self) -> None:
        self.users += 1
        self.used = time.monotonic()

    def drop(self) -> None:
        self.users -= 1
        self.used = time.monotonic()
        self._close_if_done()

    def retire(self) -> None:
        self._retired = True
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._retired and not self.users:
            # Closing waits for the step that runs.
            self.closing = asyncio.get_running_loop().run_in_executor(None, self.llm.close)


@dataclass(eq=False)
class Entry:
    """One offered model. `name` is what requests say, `source` what is loaded."""

    name: str
    source: str
    state: State = "unloaded"
    loaded: LoadedModel | None = None
    error: str = ""
    created: int = 0
    load_seconds: float = 0.0
    restarts: int = 0
    """How often its process ended and was started again."""
    delay: float = 0.0
    """Seconds to wait before the next start."""
    again_at: float = 0.0
    """When that will be; until then requests are refused."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """That it is loaded with, beside those of every model."""
    until: float | None = None
    """When it is unloaded unless it is used before that, as `time.time` has it; None: never."""
    resting: asyncio.TimerHandle | None = None
    lasting: float | None = None
    """Seconds without use that a request has given it; None: as the server has it."""
    rested: bool = False
    """Whether it was unloaded because nobody used it: the next request loads it again."""
