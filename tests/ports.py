"""A port for a program that has to be told one."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """One that the system gives to nobody else meanwhile: it is bound, and who asks for it by its number, with
    SO_REUSEADDR, gets it all the same. On other systems than Linux it is merely free."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        if sys.platform != "linux":
            held.close()
        yield port
