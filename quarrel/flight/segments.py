"""Memory that a process lends to another one of its host, which fills it: no byte of it goes through a connection.

It is a memfd of Linux: no folder has a file of it, it ends with the last process that has it, and it is sealed, so that who
was told its name can rely on its size. The other process opens it by /proc, for which both must be of one user and see each
other, and nothing else but what has that name, of which 128 bits are random. Elsewhere it is memory as any other.
"""

from __future__ import annotations

import mmap
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quarrel.errors import RequestError

Bytes = npt.NDArray[np.uint8]
Pin = Callable[[Bytes], Callable[[], None]]
UNIT = 64 << 20
"""Sizes are multiples of it, so that texts of about one length find the memory of others."""
KEPT = 4 << 30
"""Bytes that wait for the next text; what comes back beside so many is given up."""


@dataclass(frozen=True)
class Name:
    """Of a segment, for processes of this host."""

    host: str
    pid: int
    fd: int
    token: str

    @property
    def link(self) -> str:
        """What /proc says that it is."""
        return f"/memfd:quarrel-{self.token} (deleted)"

    @property
    def path(self) -> str:
        return f"/proc/{self.pid}/fd/{self.fd}"

    def exists(self) -> bool:
        with suppress(OSError):
            return os.readlink(self.path) == self.link
        return False


class Segment:
    """array: its bytes, which a device copies by itself if `pin` brings that about."""

    def __init__(self, file: int, size: int, pin: Pin) -> None:
        self.array: Bytes = np.frombuffer(mmap.mmap(file, size), np.uint8)
        self._unpin = pin(self.array)

    def close(self) -> None:
        self._unpin()
        self.array = self.array[:0].copy()


class Lent(Segment):
    """One of this process. name: for others; None where there can be none."""

    def __init__(self, size: int, pin: Pin) -> None:
        self.name: Name | None = None
        self._file, token = -1, secrets.token_hex(16)
        with suppress(OSError, AttributeError):
            self._file = _made(f"quarrel-{token}", size)
            self.name = Name(_here(), os.getpid(), self._file, token)
        try:
            super().__init__(self._file, size, pin)
        except OSError as error:
            self._end()
            raise RequestError(f"there are no {size} bytes of memory for a prompt: {error.strerror}") from None

    def close(self) -> None:
        super().close()
        self._end()

    def _end(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


class Lender:
    """Segments that are lent, each for one text at a time, and kept for others."""

    def __init__(self, pin: Pin) -> None:
        self._pin, self._lock, self._idle, self._closed = pin, threading.Lock(), list[Lent](), False

    @contextmanager
    def lend(self, size: int) -> Iterator[Lent]:
        """One of so many bytes or more. It is not used again where what was done with it fails: the other process may be
        writing still."""
        lent = self._find(size) or Lent(-(-size // UNIT) * UNIT, self._pin)
        try:
            yield lent
        except BaseException:
            lent.close()
            raise
        with self._lock:
            keeps = not self._closed and sum(len(one.array) for one in self._idle) < KEPT
            if keeps:
                self._idle.append(lent)
        if not keeps:
            lent.close()

    def close(self) -> None:
        with self._lock:
            self._closed, idle, self._idle = True, self._idle, []
        for lent in idle:
            lent.close()

    def _find(self, size: int) -> Lent | None:
        """The smallest that has room; where none has, the smallest makes room."""
        with self._lock:
            self._idle.sort(key=lambda one: len(one.array))
            found = next((one for one in self._idle if len(one.array) >= size), None)
            small = self._idle[0] if self._idle and found is None else None
            for one in (found, small):
                if one is not None:
                    self._idle.remove(one)
        if small is not None:
            small.close()
        return found


class Borrower:
    """Segments of other processes, by what those say that they are. most: bytes of each that are used."""

    def __init__(self, pin: Pin, most: int) -> None:
        self._pin, self._most = pin, -(-most // UNIT) * UNIT
        self._lock, self._idle = threading.Lock(), dict[Name, Segment]()

    @contextmanager
    def borrow(self, given: object) -> Iterator[Bytes | None]:
        """None where it is another host's, or cannot be seen from here. Raises RequestError for what is no segment."""
        name = _name_of(given)
        self.tidy()
        with self._lock:
            segment = self._idle.pop(name, None) if name is not None else None
        if name is not None and segment is None:
            segment = self._opened(name)
        if name is None or segment is None:
            yield None
            return
        try:
            yield segment.array
        finally:
            with self._lock:
                keeps = name not in self._idle and sum(len(s.array) for s in self._idle.values()) < KEPT
                if keeps:
                    self._idle[name] = segment
            if not keeps:
                segment.close()

    def tidy(self) -> None:
        """Lets go of those whose process has, or is gone."""
        with self._lock:
            gone = [self._idle.pop(name) for name in list(self._idle) if not name.exists()]
        for segment in gone:
            segment.close()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, {}
        for segment in idle.values():
            segment.close()

    def _opened(self, name: Name) -> Segment | None:
        if sys.platform != "linux" or name.host != _here():
            return None
        file = -1
        try:
            seen = os.open(name.path, os.O_PATH | os.O_CLOEXEC)  # which opens nothing yet
            try:
                link = f"/proc/self/fd/{seen}"
                if os.readlink(link) != name.link:
                    raise RequestError("the memory that the question names is something else: both sides want one version")
                file = os.open(link, os.O_RDWR | os.O_CLOEXEC)
            finally:
                os.close(seen)
            size = min(os.fstat(file).st_size, self._most)
            if not (size and _is_sealed(file)):
                raise RequestError("the memory that the question names is empty or not sealed: both sides want one version")
            return Segment(file, size, self._pin)
        except OSError:
            return None  # another user's, or gone
        finally:
            if file >= 0:
                os.close(file)


def _name_of(found: object) -> Name | None:
    if found is None:
        return None
    kinds = {"host": str, "pid": int, "fd": int, "token": str}
    if not isinstance(found, dict) or {key: type(value) for key, value in found.items()} != kinds:
        raise RequestError("the question does not name its memory as this version does: both sides want the same one")
    name = Name(**found)
    if name.pid < 1 or name.fd < 0 or not name.token.isalnum() or len(name.token) != 32:
        raise RequestError("the question does not name its memory as this version does: both sides want the same one")
    return name


def _here() -> str:
    """What processes that may see each other have in common; another value in each where that cannot be told."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return _SELF


_SELF = secrets.token_hex(16)

if sys.platform == "linux":
    import fcntl

    _SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

    def _made(name: str, size: int) -> int:
        file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(file, 0o600)
            os.ftruncate(file, size)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(file)
            raise
        return file

    def _is_sealed(file: int) -> bool:
        return fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS == _SEALS

else:

    def _made(name: str, size: int) -> int:
        raise OSError("no other process can open memory here")

    def _is_sealed(file: int) -> bool:
        return False
