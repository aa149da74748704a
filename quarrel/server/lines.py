"""Pieces of streams: one JSON value each, on a line of its own whoever splits them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

SSE = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Headers of server-sent events."""
DONE = "data: [DONE]\n\n"
"""The last event of OpenAI's streams."""
# Line breaks to Unicode, though not to JSON: clients that split as Unicode does (Python's str.splitlines, httpx) would
# cut a value in two.
_BREAKS = {ord(c): f"\\u{ord(c):04x}" for c in "\u0085\u2028\u2029"}


def dumps(row: Mapping[str, Any]) -> str:
    """JSON on one line, by any notion of a line."""
    return json.dumps(row, ensure_ascii=False).translate(_BREAKS)


def line(row: Mapping[str, Any]) -> str:
    """A line of a stream of JSON lines."""
    return dumps(row) + "\n"


def event(row: Mapping[str, Any], kind: str | None = None) -> str:
    """A server-sent event; kind: its name, where it has one."""
    head = "" if kind is None else f"event: {kind}\n"
    return f"{head}data: {dumps(row)}\n\n"
