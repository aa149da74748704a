"""Chunks on their way to event loops, handed over together.

A call into an event loop wakes its thread, which then competes for the interpreter with the one that called: one for each
token of 256 requests costs more than all else between two steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from quarrel.engine.results import Chunk

if TYPE_CHECKING:
    import asyncio  # which takes long to import

Row = tuple[Any, Chunk]
"""A queue of chunks, and one for it."""


class OutputBuffer:
    """One thread fills and sends it."""

    def __init__(self) -> None:
        self._due: dict[asyncio.AbstractEventLoop, list[Row]] = {}
        self._given: dict[Callable[[list[Any]], None], list[Any]] = {}

    def put(self, events: asyncio.AbstractEventLoop, chunks: asyncio.Queue[Chunk], chunk: Chunk) -> None:
        self._due.setdefault(events, []).append((chunks, chunk))

    def put_to(self, to: Callable[[list[Any]], None], item: Any) -> None:
        """For a function instead, which gets all of its items at once."""
        self._given.setdefault(to, []).append(item)

    def send(self) -> None:
        """Puts chunks where they are read, with one call for each event loop."""
        if self._given:
            given, self._given = self._given, {}
            for to, items in given.items():
                to(items)
        if not self._due:
            return
        due, self._due = self._due, {}
        for events, rows in due.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads
                events.call_soon_threadsafe(_put, rows)


def _put(rows: Sequence[Row]) -> None:
    for chunks, chunk in rows:
        chunks.put_nowait(chunk)
