"""One process at a time fills a target: two would give the same ids to different rows."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quarrel.errors import RequestError
from quarrel.gguf.lock import locked


@contextmanager
def alone(target: str) -> Iterator[None]:
    """Holds the target while the block runs, and no longer than this process lives. RequestError where another process of
    this machine holds it."""
    digest = hashlib.sha256(target.encode("utf-8", "surrogateescape")).hexdigest()[:32]
    file = _opened(Path(tempfile.gettempdir()) / f"quarrel-embed-{digest}.lock")
    try:
        if not locked(file):
            raise RequestError(f"another process is filling {target}: wait until it has ended, or name another target")
        yield
    finally:
        os.close(file)


def _opened(path: Path) -> int:
    """It is never written or removed: a removed one would no longer hold off who comes next."""
    no_links = getattr(os, "O_NOFOLLOW", 0)  # which Windows has not
    try:
        return os.open(path, os.O_RDONLY | no_links)  # perhaps another user's, whom the system lets nobody create again
    except FileNotFoundError:
        return os.open(path, os.O_RDONLY | os.O_CREAT | no_links, 0o644)
