"""A file of weights, mapped read-only."""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from pathlib import Path

import numpy as np

from quarrel.errors import GGUFError, ModelNotFound

_READ = os.O_RDONLY
# Without O_NONBLOCK, opening a FIFO would wait for a writer. Windows has the last one only, and would read text without it.
for _name in ("O_CLOEXEC", "O_NONBLOCK", "O_BINARY"):
    _READ |= getattr(os, _name, 0)


class Mapped:
    """One file. Its descriptor stays open, so that what was checked, what is mapped and what is watched are one.

    Raises ModelNotFound where there is none, GGUFError where it cannot be mapped.
    """

    descriptor = -1
    map: mmap.mmap | None = None
    bytes: np.ndarray | None = None

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.descriptor = os.open(path, _READ)
        except FileNotFoundError:
            raise ModelNotFound(f"there is no file {path}") from None
        except (OSError, ValueError) as error:
            raise GGUFError(f"cannot be read: {error}") from None
        try:
            status = os.fstat(self.descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise GGUFError("is no regular file")
            if not status.st_size:
                raise GGUFError("is empty")
            self.state = _state(status)
            self.map = mmap.mmap(self.descriptor, status.st_size, access=mmap.ACCESS_READ)
            self.bytes = np.frombuffer(self.map, np.uint8)
        except (OSError, ValueError) as error:
            self.close()
            raise GGUFError(f"cannot be mapped: {error}") from None
        except BaseException:
            self.close()
            raise

    def check_unchanged(self) -> None:
        if self.descriptor < 0 or self.map is None:
            raise GGUFError(f"{self.path} is closed")
        if (now := _state(os.fstat(self.descriptor))) != self.state:
            change = f"{self.state[0]} bytes then, {now[0]} now"
            raise GGUFError(f"{self.path} changed while it was open ({change}): load it again")

    def advise(self, advice: str, start: int, size: int) -> None:
        flag = getattr(mmap, advice, None)
        if flag is not None and self.map is not None:  # a system without madvise still works, only slower
            page = start // mmap.PAGESIZE * mmap.PAGESIZE
            self.map.madvise(flag, page, min(start + size, len(self.map)) - page)

    def close(self) -> None:
        self.bytes = None
        if self.map is not None:
            # Views handed out keep the mapping alive until the last of them dies.
            with contextlib.suppress(BufferError):
                self.map.close()
            self.map = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        self.close()


def _state(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns
