"""uvicorn's connections with what they lack: a deadline for the headers, a bound for each address, answers in one piece."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any, Protocol

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from quarrel.server.callers import Connections, Proxies
from quarrel.server.errors import Refused
from quarrel.server.settings import Settings, networks

MAX_MESSAGE = 8 << 20
"""Characters of a WebSocket's message, which may hold images."""
MAX_HEAD = 32 << 10
"""Bytes of a request's head that the parser waits for."""
MOST_CROWDED = 1024
"""Connections beyond an address's bound that wait for their refusal at once; what comes then is cut."""


class Answering(Protocol):
    """What knows answers to bytes that no parser has seen."""

    def shed(self, data: bytes, caller: str) -> tuple[bytes, bool] | None:
        """What these bytes of a new request get, and whether the connection ends; None: they are read."""

    def crowded(self, data: bytes, caller: str, refusal: Refused) -> bytes:
        """What a connection gets that is one too many."""


def protocol_for(settings: Settings, answers: Answering | None = None) -> type[asyncio.Protocol]:
    """For `uvicorn.Config(http=...)`."""
    connections = Connections(settings.connections_per_address)
    proxies = Proxies(networks(settings.trusted_proxies))
    crowd: set[asyncio.Protocol] = set()

    class GuardedProtocol(H11Protocol):
        """A connection that has not sent a whole request head in time is closed: it costs a socket and nothing else."""

        _deadline: asyncio.TimerHandle | None = None
        _address: str | None = None
        """That it counts for."""
        _refused = False
        _below: Any = None

        def connection_made(self, transport: Any) -> None:
            self._below = transport
            super().connection_made(GatheredTransport(transport, self.loop))  # type: ignore[arg-type]
            address = self.client[0] if self.client else ""
            if proxies.trust(address) or connections.take(address):
                self._address = None if proxies.trust(address) else address
                self._expect_head()
            elif answers is None or len(crowd) >= MOST_CROWDED:
                transport.close()
            else:
                crowd.add(self)
                self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._cancel()
            self._free()
            crowd.discard(self)
            super().connection_lost(exc)
            # asyncio leaves this in a circle with itself, which would be there until the next whole collection.
            if hasattr(self._below, "_read_ready_cb"):
                self._below._read_ready_cb = None

        def data_received(self, data: bytes) -> None:
            if self in crowd:
                self._refuse(data, connections.refusal())
                return
            if self._refused:
                return
            caller = self.client[0] if self.client else "local"
            if answers is not None and self._is_new() and (answer := answers.shed(data, caller)) is not None:
                self._unset_keepalive_if_required()
                self._cancel()
                self.transport.write(answer[0])
                if answer[1]:
                    self.transport.close()
                else:
                    self._expect_head()
                return
            super().data_received(data)
            if self._refused:  # what still comes is dropped for as long as a head may take
                if self._deadline is None:
                    self._expect_head()
                return
            # DONE and SEND_BODY: it was answered already, and sends what nobody wants to know.
            if self.conn.our_state in (h11.IDLE, h11.DONE) and self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
                if self._deadline is None:
                    self._expect_head()
            else:
                self._cancel()

        def handle_events(self) -> None:
            if self.conn.their_state is h11.IDLE and (fault := fault_of_head(self.conn.trailing_data[0])):
                self.send_400_response(fault)
                return
            super().handle_events()

        def send_400_response(self, msg: str) -> None:
            if self.cycle is not None and not self.cycle.response_complete:
                self.cycle.disconnected = True  # this is the answer: what the route is about to say goes nowhere
                self.cycle.message_event.set()
            head = self.conn.trailing_data[0]
            whole = answers is not None and self.conn.our_state is h11.IDLE and self._below.can_write_eof()
            if len(head) > MAX_HEAD and whole:
                self._refuse(head, Refused(431, "too_large", f"the request's headers are over {MAX_HEAD} bytes: send less"))
                return
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # not by h11, which may still think of a HEAD before
                self.transport.write(f"{_HEAD_400}{len(msg)}\r\n\r\n{msg}".encode("ascii", "replace"))
            self.transport.close()

        def _is_new(self) -> bool:
            """Whether what comes now is the first of a request, of somebody who takes the answers."""
            idle = self.conn.our_state is h11.IDLE and self.conn.their_state is h11.IDLE and not self.flow.write_paused
            return idle and not self.conn.trailing_data[0] and (self.cycle is None or self.cycle.response_complete)

        def _unsupported_upgrade_warning(self) -> None:
            """Java's client offers HTTP/2 with every request, and is content with an answer in HTTP/1.1."""

        def handle_websocket_upgrade(self, event: Any) -> None:
            self._cancel()
            self.transport = self._below
            super().handle_websocket_upgrade(event)
            # The socket now belongs to another protocol, and still counts.
            self._below.get_protocol().on_lost = self._free

        def _refuse(self, data: bytes, refusal: Refused) -> None:
            """Answers once, and drops what else comes until the other side has read that, or its time is over."""
            if answers is not None and self._below.can_write_eof() and not self._refused:
                self._refused = True
                caller = self.client[0] if self.client else "local"
                self.transport.write(answers.crowded(data, caller, refusal))
                self.transport.write_eof()

        def _expect_head(self) -> None:
            self._deadline = self.loop.call_later(settings.header_timeout, self._give_up)

        def _give_up(self) -> None:
            self._deadline = None
            if not self.transport.is_closing():
                self.transport.close()

        def _cancel(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _free(self) -> None:
            if self._address is not None:
                connections.free(self._address)
                self._address = None

    return GuardedProtocol


def fault_of_head(data: bytes) -> str:
    """What is wrong with the lines of a request's head, as far as it is there: what one server takes for the end of a line
    and another does not, a proxy and this one may take for different requests."""
    end = _BLANK.search(data)
    head = data if end is None else data[: end.end()]
    if _BARE.search(head):
        return "a line of the request's head ends without CR LF"
    return "a header is folded over several lines" if _FOLDED.search(head) else ""


_HEAD_400 = "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\nContent-Length: "
_BLANK = re.compile(rb"\r?\n\r?\n")
_BARE = re.compile(rb"(?<!\r)\n|\r(?!\n|\Z)")
_FOLDED = re.compile(rb"\n[ \t]")


class CountedWebSocket(WebSocketsSansIOProtocol):
    """Tells when it ends."""

    on_lost: Callable[[], None] | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost()


class GatheredTransport:
    """A transport whose writes of one turn of the event loop leave together: head and body of an answer cost one call."""

    def __init__(self, below: Any, events: asyncio.AbstractEventLoop) -> None:
        self._below, self._events = below, events
        self._pending: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)

    def write(self, data: bytes) -> None:
        if not data:
            return
        if not self._pending:
            self._events.call_soon(self._send)
        self._pending.append(data)

    def write_eof(self) -> None:
        self._send()
        self._below.write_eof()

    def close(self) -> None:
        self._send()
        self._below.close()

    def _send(self) -> None:
        if self._pending:
            data, self._pending = b"".join(self._pending), []
            self._below.write(data)
