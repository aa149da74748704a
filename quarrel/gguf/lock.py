"""A file that one process at a time writes: flock where there is one, Windows' own lock elsewhere."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import IO, Any

from quarrel.errors import DownloadError

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]


def hold(file: IO[Any], path: Path) -> None:
    """Until the file is closed; it is at its end then. Raises DownloadError where another process has it."""
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            msvcrt: Any = importlib.import_module("msvcrt")
            file.seek(0)  # the lock is of the byte where the file stands
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            file.seek(0, 2)
    except OSError:
        raise DownloadError(f"another process is downloading {path}: wait for it") from None
