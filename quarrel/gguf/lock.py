"""A file that one process at a time holds: flock where there is one, Windows' own lock elsewhere."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import IO, Any

from quarrel.errors import DownloadError

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]


def locked(file: int) -> bool:
    """Locks an open file until it is closed; False where another process has done so. It is at its end then."""
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            msvcrt: Any = importlib.import_module("msvcrt")
            os.lseek(file, 0, os.SEEK_SET)  # the lock is of the byte where the file stands
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
            os.lseek(file, 0, os.SEEK_END)
    except OSError:
        return False
    return True


def hold(file: IO[Any], path: Path) -> None:
    """Locks a file that is being downloaded. Raises DownloadError where another process has it."""
    if not locked(file.fileno()):
        raise DownloadError(f"another process is downloading {path}: wait for it")
    file.seek(0, os.SEEK_END)
