"""Responses that are kept for a while, in memory: for their caller alone, who may look at them or go on from them."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from quarrel.server.errors import Refused

Json = dict[str, Any]
MOST = 1024
MAX_CHARACTERS = 32 << 20
"""Of all; the oldest go first."""


@dataclass(frozen=True)
class Stored:
    """A response, and the items that it answered, with those of the responses before it."""

    caller: str
    row: Json
    items: tuple[Json, ...]
    size: int


class Responses:
    """Those of all callers, by id."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Stored] = OrderedDict()
        self._size = 0

    def keep(self, caller: str, row: Json, items: list[Json]) -> None:
        """Forgets the oldest where there is no room."""
        size = len(json.dumps(row)) + len(json.dumps(items))
        if size > MAX_CHARACTERS:
            return
        self._kept[row["id"]] = Stored(caller, row, tuple(items), size)
        self._size += size
        while len(self._kept) > MOST or self._size > MAX_CHARACTERS:
            self._size -= self._kept.popitem(last=False)[1].size

    def find(self, caller: str, id: str, field: str | None = None) -> Stored:
        """Raises `Refused` where there is none of this caller's. field: of a request, that names it."""
        found = self._kept.get(id)
        if found is None or found.caller != caller:
            text = f"there is no response {id[:80]!r} here: they are kept in memory, as far as there is room"
            code = "not_found" if field is None else "previous_response_not_found"
            raise Refused(404 if field is None else 400, code, text, param=field)
        return found

    def forget(self, caller: str, id: str) -> None:
        """Raises `Refused` as `find` does."""
        self._size -= self.find(caller, id).size
        del self._kept[id]
