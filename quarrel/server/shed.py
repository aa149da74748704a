"""Load shedding: a full server refuses from the raw bytes of a request, without parser, task or JSON.

Under overload the cost of refusals is taken from the requests that are served.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

from quarrel.server.errors import Refused, error_body
from quarrel.server.keys import Keyring
from quarrel.server.metrics import Metrics

Gate = Callable[[str], None]
"""Raises `Refused` where no request to that route can be taken, whatever it says."""
GENERATING = frozenset(
    f"{room}/{what}"
    for room, all in (
        ("/v1", ("completions", "chat/completions", "responses", "messages")),
        ("/api", ("generate", "stream", "chat")),
        ("", ("completion", "infill")),
    )
    for what in all
)
"""Routes whose requests wait in a model's queue."""
_FIRST = re.compile(rb"POST (/[a-z0-9/]+) HTTP/1\.1\r\n")
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,9})[ \t]*\r\n")
_KEY = re.compile(rb"\r\n(authorization|x-api-key):[ \t]*([^\r\n]*)", re.IGNORECASE)
_LEFT = (b"\r\ntransfer-encoding", b"\r\norigin:", b"\r\nupgrade:", b"\r\nexpect:")
"""Headers of requests that are read properly first."""


@dataclass(frozen=True)
class Answer:
    """What is sent, and whether the connection ends with it."""

    data: bytes
    close: bool
    path: str
    request_id: str


class Shed:
    """Answers a request that came whole and in one piece. Whatever is not of the plainest form is left to the parser."""

    def __init__(
        self,
        check_capacity: Gate,
        keys: Keyring,
        metrics: Metrics,
        headers: list[tuple[bytes, bytes]],
        *,
        ollama: bool = False,
        llama: bool = False,
    ) -> None:
        self._check_capacity, self._keys, self._metrics = check_capacity, keys, metrics
        self._ollama, self._llama = ollama, llama
        self._headers = b"".join(name + b": " + value + b"\r\n" for name, value in headers)

    def __call__(self, data: bytes) -> Answer | None:
        """None: it is not for here. data: all that is there of a request, from its first byte."""
        first = _FIRST.match(data)
        if first is None or (path := first[1].decode()) not in GENERATING:
            return None
        end = data.find(b"\r\n\r\n")
        head = data[: end + 2].lower()
        lengths = _LENGTH.findall(head)
        if end < 0 or len(lengths) != 1 or head.count(b"content-length") != 1 or any(h in head for h in _LEFT):
            return None
        if head.count(b"\n") != head.count(b"\r\n"):
            return None  # the parser takes a bare line feed for the end of a line, and so of a head
        if len(data) != end + 4 + int(lengths[0]) or not self._may_ask(data[: end + 2]):
            return None
        try:
            self._check_capacity(path)
        except Refused as refusal:
            return self._answer(path, refusal, b"\r\nconnection: close" in head, int(lengths[0]))
        return None

    def _may_ask(self, head: bytes) -> bool:
        """A caller without a good key is left to the middleware, which says so, and not how full the server is."""
        if not self._keys.keys():
            return True
        found = _KEY.findall(head)
        if len(found) != 1:
            return False
        name, value = found[0][0].lower(), found[0][1].decode("latin-1").strip()
        kind, _, bearer = value.partition(" ")
        secret = value if name == b"x-api-key" else bearer.strip() if kind.lower() in ("bearer", "apikey") else ""
        return bool(secret) and self._keys.find(secret) is not None

    def crowded(self, data: bytes, refusal: Refused) -> Answer:
        """For a connection that is one too many, whose first bytes these are. It ends with the answer."""
        words = data[:256].split(b" ", 2)
        return self._answer(words[1].decode("latin-1") if len(words) == 3 else "", refusal, True, 0, "none")

    def _answer(self, path: str, refusal: Refused, close: bool, received: int, route: str | None = None) -> Answer:
        request_id = "req-" + secrets.token_hex(8)
        body = json.dumps(error_body(path, refusal, ollama=self._ollama, llama=self._llama)).encode()
        lines = [f"{name}: {value}\r\n" for name, value in refusal.headers().items()]
        lines += [f"X-Request-Id: {request_id}\r\nContent-Length: {len(body)}\r\nContent-Type: application/json\r\n"]
        lines += ["Connection: close\r\n"] if close else []
        head = (
            f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}\r\n".encode()
            + self._headers
            + "".join(lines).encode()
        )
        self._metrics.errors.labels(refusal.code).inc()
        self._metrics.answered("other" if route else "POST", route or path, refusal.status, 0.0, received, len(body))
        return Answer(head + b"\r\n" + body, close, path, request_id)
