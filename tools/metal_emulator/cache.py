"""Built objects, kept under the hash of all that went into them, in the user's cache directory."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
METAL_HEADERS = PACKAGE / "metal"
RUNTIME_SOURCES = PACKAGE / "runtime"


def cache_directory() -> Path:
    """$XDG_CACHE_HOME or ~/.cache, quarrel/metal_emulator in it; safe to delete at any time."""
    root = os.environ.get("XDG_CACHE_HOME")
    path = (Path(root) if root else Path.home() / ".cache") / "quarrel" / "metal_emulator"
    path.mkdir(parents=True, exist_ok=True)
    return path


def content_key(parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:".encode() + part.encode())
    return digest.hexdigest()[:24]


@cache
def tree_key(directory: Path) -> str:
    """The hash of every file below a directory."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return content_key(f"{path.relative_to(directory)}\n{path.read_text()}" for path in files)


def cached(name: str, build: Callable[[Path], None]) -> Path:
    """The cached file of this name; `build` writes it to the path it is given if it is not there yet.

    Two processes may build the same file at once: each writes its own and renames it.
    """
    target = cache_directory() / name
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=cache_directory(), prefix="build-") as work:
            made = Path(work) / name
            build(made)
            made.replace(target)
    return target
