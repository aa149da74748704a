"""API keys: made, listed, rotated, expired and revoked. Only their hashes are stored.

A key is 256 random bits, so that a plain SHA-256 of it can neither be reversed nor guessed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from quarrel.errors import ConfigError, RequestError

PREFIX = "qk-"
FILE, MARK = "keys.json", "keys.made"
"""The keys, and an empty file beside them that says that there are some: both are gone, or there are keys."""
MAX_NAME = 64
GIVEN = "given"
"""Id and name of the first key that the environment or a command line gave."""


@dataclass(frozen=True)
class Key:
    """What is known of one key. Times are Unix seconds; `expires` None is never."""

    id: str
    name: str
    hash: str
    created: float
    expires: float | None = None
    revoked: bool = False

    def usable(self, now: float) -> bool:
        return not self.revoked and (self.expires is None or now < self.expires)


class Keyring:
    """The keys in a folder's `keys.json`, read again when the file changes. Safe for several processes.

    given: keys more, which are never written.
    """

    def __init__(self, folder: Path, given: Sequence[str] = ()) -> None:
        self.path = folder / FILE
        ids = (GIVEN, *(f"{GIVEN} {i}" for i in range(2, 1 + len(given))))  # each is a caller of its own
        self._given = tuple(Key(id, id, _hash(key), time.time()) for id, key in zip(ids, given))
        self._mark = folder / MARK
        self._stamp: tuple[int, int, int] | None = None
        self._keys: tuple[Key, ...] = ()

    def keys(self) -> tuple[Key, ...]:
        """All of them, revoked and expired ones too. Raises ConfigError for a file that cannot be read, or has gone."""
        try:
            status = self.path.stat()
        except FileNotFoundError as error:
            if self._keys or (self._mark.exists() and not self._given):  # nobody opens a server by taking a file away
                wanted = f"put the API keys back, or remove {self._mark} and start again to go on without"
                raise ConfigError(f"{self.path} has gone: {wanted}") from error
            return self._given
        except OSError as error:
            raise ConfigError(f"{self.path}: the API keys cannot be read ({error.strerror})") from error
        stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        if stamp != self._stamp:
            self._keys, self._stamp = self._read(), stamp
        return (*self._keys, *self._given)

    def find(self, secret: str) -> Key | None:
        """The usable key with this secret. Compares with every hash, each in constant time."""
        digest = _hash(secret)
        found = None
        for key in self.keys():
            if hmac.compare_digest(key.hash, digest):
                found = key
        return found if found is not None and found.usable(time.time()) else None

    def create(self, name: str, expires_in: float | None = None) -> tuple[Key, str]:
        """A new key and its secret, which is shown this once."""
        if not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise RequestError(f"a key's name is {name!r}, wanted 1 to {MAX_NAME} printable characters")
        secret = PREFIX + secrets.token_urlsafe(32)
        now = time.time()
        key = Key(secrets.token_hex(4), name, _hash(secret), now, None if expires_in is None else now + expires_in)
        self._write([*self.keys(), key])
        return key, secret

    def revoke(self, id: str) -> Key:
        """Makes a key useless at once."""
        key = replace(self._one(id), revoked=True)
        self._write([key if k.id == id else k for k in self.keys()])
        return key

    def rotate(self, id: str, overlap: float = 0.0) -> tuple[Key, str]:
        """A new key of the same name; the old one works for `overlap` seconds more, but not longer than it would have."""
        old, now = self._one(id), time.time()
        left = None if old.expires is None else max(old.expires - now, 0.0)
        new, secret = self.create(old.name, left)
        last = now + overlap if left is None else now + min(overlap, left)
        ended = replace(old, expires=last) if overlap else replace(old, revoked=True)
        self._write([ended if k.id == id else k for k in self.keys()])
        return new, secret

    def _one(self, id: str) -> Key:
        for key in self.keys():
            if key.id == id:
                return key
        raise RequestError(f"there is no API key {id!r}: `quarrel keys list` shows the ids")

    def _read(self) -> tuple[Key, ...]:
        try:
            rows = json.loads(self.path.read_text("utf-8"))
            if not isinstance(rows, list) or not rows:  # never "no keys": that would open the server
                raise ValueError("it holds none")
            return tuple(_key(row) for row in rows)
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise ConfigError(f"{self.path} is not a list of API keys ({error}): repair or remove it") from error

    def _write(self, keys: Iterable[Key]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._mark.touch(mode=0o600)
        # A reader sees the old file or the new one, never half of one.
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=".keys-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump([asdict(k) for k in keys if k not in self._given], file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self.path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        self._stamp = None


def _key(row: dict[str, Any]) -> Key:
    """As it was written; TypeError for anything else, which could not be compared later."""
    key = Key(**row)
    times = (key.created, 0.0 if key.expires is None else key.expires)
    texts = (key.id, key.name, key.hash)
    if not (all(isinstance(t, str) for t in texts) and all(isinstance(t, int | float) for t in times)):
        raise TypeError(f"the key {str(key.id)[:40]!r} has a field of another type")
    if not (isinstance(key.revoked, bool) and key.hash.isascii()):
        raise TypeError(f"the key {key.id[:40]!r} has a field of another type")
    return key


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
