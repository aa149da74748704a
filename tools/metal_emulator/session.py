"""What is launched while the emulator is installed, and the settings in force."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from tools.metal_emulator.findings import Finding
from tools.metal_emulator.launcher import Statistics
from tools.metal_emulator.settings import Settings


@dataclass(frozen=True)
class Launch:
    """What one call came to."""

    name: str
    outputs: tuple[Any, ...]
    findings: tuple[Finding, ...]
    statistics: Statistics


@dataclass(frozen=True)
class Session:
    """The settings in force and what has been launched under them."""

    settings: Settings = field(default_factory=Settings)
    launches: list[Launch] = field(default_factory=list)


# A kernel object outlives the context it is first used in (backends cache them), so it asks at each call.
_SESSION: ContextVar[Session | None] = ContextVar("metal_emulator_session", default=None)


def current_session() -> Session:
    """That of the enclosing `session`; outside of one, and in a new thread, one with the default settings."""
    return _SESSION.get() or Session()


@contextmanager
def session(settings: Settings) -> Iterator[Session]:
    """Settings for every kernel called inside that has none of its own."""
    current = Session(settings)
    token = _SESSION.set(current)
    try:
        yield current
    finally:
        _SESSION.reset(token)
