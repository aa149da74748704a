"""uvicorn's HTTP/1.1 connection with what it lacks: a deadline for the headers, a bound on connections per address, and
answers that leave in one piece."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from quarrel.server.settings import Settings

Shed = Callable[[bytes, str], tuple[bytes, bool] | None]


def protocol_for(settings: Settings, shed: Shed | None = None) -> type[asyncio.Protocol]:
    """For `uvicorn.Config(http=...)`. shed: what bytes that need not be read get, and whether the connection ends."""
    open_connections: Counter[str] = Counter()

    class GuardedProtocol(H11Protocol):
        """A connection that has not sent a whole request head in time is closed: it costs a socket and nothing else."""

        _deadline: asyncio.TimerHandle | None = None
        _address: str | None = None
        _below: Any = None

        def connection_made(self, transport: Any) -> None:
            self._below = transport
            super().connection_made(GatheredTransport(transport, self.loop))  # type: ignore[arg-type]
            address = self.client[0] if self.client else ""
            if open_connections[address] >= settings.connections_per_address:
                transport.close()
                return
            open_connections[address] += 1
            self._address = address
            self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget()
            super().connection_lost(exc)
            # asyncio leaves this in a circle with itself, which would be there until the next whole collection.
            if hasattr(self._below, "_read_ready_cb"):
                self._below._read_ready_cb = None

        def data_received(self, data: bytes) -> None:
            if shed is not None and self._is_new() and (answer := shed(data, self._address or "local")) is not None:
                self._unset_keepalive_if_required()
                self._cancel()
                self.transport.write(answer[0])
                if answer[1]:
                    self.transport.close()
                else:
                    self._expect_head()
                return
            super().data_received(data)
            # DONE and SEND_BODY: it was answered already, and sends what nobody wants to know.
            if self.conn.our_state in (h11.IDLE, h11.DONE) and self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
                if self._deadline is None:
                    self._expect_head()
            else:
                self._cancel()

        def _is_new(self) -> bool:
            """Whether what comes now is the first of a request, of somebody who takes the answers."""
            idle = self.conn.our_state is h11.IDLE and self.conn.their_state is h11.IDLE and not self.flow.write_paused
            return idle and not self.conn.trailing_data[0] and (self.cycle is None or self.cycle.response_complete)

        def handle_websocket_upgrade(self, event: Any) -> None:
            self._forget()  # the socket now belongs to another protocol
            self.transport = self._below
            super().handle_websocket_upgrade(event)

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

        def _forget(self) -> None:
            self._cancel()
            if self._address is not None:
                open_connections[self._address] -= 1
                if not open_connections[self._address]:
                    del open_connections[self._address]
                self._address = None

    return GuardedProtocol


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

    def close(self) -> None:
        self._send()
        self._below.close()

    def _send(self) -> None:
        if self._pending:
            data, self._pending = b"".join(self._pending), []
            self._below.write(data)


def watch(listener: socket.socket, seconds: float) -> None:
    """Ends connections whose other side has gone without a word, or reads nothing, within about that time.

    A request that waits for such a caller then ends too. Each connection has from its listener what is set there.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    third = max(1, int(seconds / 3))
    # What a system does not have is left at its own defaults, which are hours.
    for name, value in (
        ("TCP_KEEPIDLE", third),
        ("TCP_KEEPINTVL", third),
        ("TCP_KEEPCNT", 2),
        ("TCP_USER_TIMEOUT", int(seconds * 1000)),
    ):
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
