"""SHA-256 of models' files: each is read once, behind everything else, and what was found is kept on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from quarrel.env import cache_home

PIECE = 8 << 20
# Stores name what they downloaded by its digest: Ollama's blobs, and where the links of the Hugging Face cache lead.
_NAMED = re.compile(r"(?:sha256-)?([0-9a-f]{64})")


class Digests:
    """Of files, as 64 hexadecimal digits; of a model in several files, of all their bytes in order. Safe for threads."""

    def __init__(self, file: Path | None = None) -> None:
        """file: where digests are kept; by default beside the compiled kernels."""
        self._file = file or cache_home() / "quarrel" / "digests.json"
        self._lock, self._turn = threading.Lock(), threading.Lock()
        self._pending: dict[str, Future[str]] = {}

    def of(self, paths: Sequence[Path]) -> Future[str]:
        """The digest, at once where it is known; else a thread of its own reads the files, one model after the other.

        Fails with OSError where a file cannot be read.
        """
        made: Future[str] = Future()
        try:
            real = [p.resolve(strict=True) for p in paths]
            key = "\0".join(f"{p}\0{(s := p.stat()).st_size}\0{s.st_mtime_ns}" for p in real)
        except OSError as error:
            made.set_exception(error)
            return made
        named = _NAMED.fullmatch(real[0].name) if len(real) == 1 else None
        with self._lock:
            known = named[1] if named else self._kept().get(key)
            if known is not None:
                made.set_result(known)
                return made
            if key in self._pending:
                return self._pending[key]
            self._pending[key] = made
        threading.Thread(target=self._compute, args=(key, real, made), name="quarrel-digest", daemon=True).start()
        return made

    def _compute(self, key: str, paths: Sequence[Path], made: Future[str]) -> None:
        try:
            with self._turn:
                digest = hashlib.sha256()
                for path in paths:
                    with path.open("rb") as file:
                        while piece := file.read(PIECE):
                            digest.update(piece)
            with self._lock:
                with contextlib.suppress(OSError):  # a full or read-only disk costs the next start its time
                    self._keep({**self._kept(), key: digest.hexdigest()})
                del self._pending[key]
            made.set_result(digest.hexdigest())
        except BaseException as error:
            with self._lock:
                self._pending.pop(key, None)
            made.set_exception(error)

    def _kept(self) -> dict[str, str]:
        try:
            found = json.loads(self._file.read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _keep(self, digests: dict[str, str]) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        partial = self._file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(digests, indent=0), "utf-8")
        partial.replace(self._file)
