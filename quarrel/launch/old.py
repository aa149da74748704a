"""The engine that was there before, beside ours under another name: it takes what ours cannot."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from quarrel.launch.arguments import Arguments

SUFFIX = ".ollama"
"""Behind the name of the old engine; it stays in its folder, where it finds its libraries."""


def old_engine(args: Arguments) -> Path | None:
    """Named by `--old-engine`, or beside the link by which this one was started."""
    given = args.text("old_engine")
    path = Path(given) if given else Path(sys.argv[0]).with_name("llama-server" + SUFFIX)
    return path if path.is_file() and os.access(path, os.X_OK) else None


def hand_over(engine: Path, words: Sequence[str], args: Arguments) -> NoReturn:
    """Becomes the old engine, with the same arguments. Raises OSError where it cannot be started."""
    environment = dict(os.environ)
    libraries = args.text("old_library_path")
    if libraries:
        environment["LD_LIBRARY_PATH"] = libraries
    sys.stderr.flush()
    os.execve(engine, [str(engine), *theirs(words)], environment)


def theirs(words: Sequence[str]) -> list[str]:
    """The command line without what only ours knows."""
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word in ("--old-engine", "--old-library-path"):
            skip = True
        elif not word.startswith(("--old-engine=", "--old-library-path=")):
            kept.append(word)
    return kept
