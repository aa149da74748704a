"""Sockets that listen, before there is a server to take what comes."""

from __future__ import annotations

import errno
import socket

from quarrel.errors import ConfigError

WAITING = 4096
"""Connections that the system keeps until they are taken."""
IDLE = 60.0


def bound(host: str, port: int, idle: float = IDLE) -> socket.socket:
    """A socket that listens there. Raises ConfigError where none can. idle: seconds, see `watch`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off, which holds an answer's body back for 40 ms, only where it reads TCP here.
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    watch(made, idle)
    try:
        made.bind((host, port))
        made.listen(WAITING)
    except (OSError, OverflowError) as error:
        made.close()
        raise ConfigError(f"{host}:{port} cannot be listened on: {_reason(error)}") from error
    made.setblocking(False)
    return made


def _reason(error: OSError | OverflowError) -> str:
    """Why an address cannot be bound, and what to do."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EADDRINUSE:
        return "another program has this port; end it, or choose another --port"
    if number == errno.EACCES:
        return "this user may not take ports so low; choose a --port above 1023"
    if number == errno.EADDRNOTAVAIL:
        return "this machine has no such address; choose another --host"
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"{reason}; choose another --host or --port"


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
