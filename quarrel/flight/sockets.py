"""Connections of this process, by the port that they came in by."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress


def cut(port: int) -> None:
    """Breaks every connection that was accepted on a TCP port of this process, as its end would; the port stays open.

    The Flight library can only wait for its callers, and one who neither sends nor leaves would keep a server for ever.
    """
    for name in os.listdir("/dev/fd"):
        try:
            fd = os.dup(int(name))
        except OSError:
            continue  # it has been closed since it was listed
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            os.close(fd)
            continue
        with socket.socket(fileno=fd) as one, suppress(OSError):  # its other end may have gone
            listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockname()[1] == port and not listens:
                one.shutdown(socket.SHUT_RDWR)
