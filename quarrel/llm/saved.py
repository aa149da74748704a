"""What a model has computed of a text's beginning, in a file: saved, restored another day or elsewhere, forgotten."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from quarrel.engine import Service, transfer
from quarrel.engine.engine import Engine
from quarrel.engine.generation import salt_of
from quarrel.engine.saved import Array, Identity, Reads, SavedPrefix
from quarrel.engine.saved import room as saved_room
from quarrel.errors import RequestError
from quarrel.gguf.digest import Digests
from quarrel.llm.adapters import adapter_index
from quarrel.llm.loaded import Loaded
from quarrel.llm.open import find
from quarrel.ops.transfer import CacheForm, Transfers, nothing

T = TypeVar("T")


class Prefixes:
    """Of one loaded model. salt: the `cache_salt` of the requests that have computed a text, or shall find it."""

    def __init__(self, parts: Loaded) -> None:
        self._parts = parts

    def save(
        self, tokens: Sequence[int], path: str | os.PathLike[str], *, salt: str = "", adapter: str | None = None
    ) -> tuple[int, int]:
        """Writes what the cache still has of a text, from its first token on: how many tokens, and the file's bytes.

        Raises RequestError where there is nothing, or no file can be written.
        """
        file = Path(path)
        saved, identity = self.take(tokens, salt=salt, adapter=adapter)
        partial = file.with_name(f"{file.name[:40]}.{secrets.token_hex(8)}.part")  # of a name's 255 bytes, at most 182
        try:
            with partial.open("wb") as made:
                size = saved.write(made, identity)
            partial.replace(file)
        except OSError as error:
            raise RequestError(f"{file.name} cannot be written: {error.strerror or error}") from error
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
        return len(saved.tokens), size

    def restore(self, path: str | os.PathLike[str], *, salt: str = "", adapter: str | None = None) -> tuple[list[int], int]:
        """Puts a saved text into the cache: its tokens, and the file's bytes. It stays there as long as any text that
        nobody uses.

        Raises RequestError for a file of another model, cache type or shape, one that is cut short or damaged, and where
        there is no room.
        """
        file = Path(path)
        if file.exists() and not file.is_file():
            raise RequestError(f"{file.name} is no file")
        try:
            with file.open("rb") as found:
                tokens = self.put(found, salt=salt, adapter=adapter)
                return tokens, found.tell()
        except OSError as error:
            raise RequestError(f"{file.name} cannot be read: {error.strerror or error}") from error

    def take(
        self, tokens: Sequence[int], *, salt: str = "", adapter: str | None = None, memory: Array | None = None
    ) -> tuple[SavedPrefix, Identity]:
        """As `save`, without a file: a copy, and whose it is. It lies in this memory, as `put` reads it, if it can."""
        index, own = self._place(salt, adapter)
        identity = self.identity(index)

        def place(text: tuple[int, ...], form: CacheForm) -> SavedPrefix | None:
            return None if memory is None else SavedPrefix.within(memory, text, form, identity)

        return self._run(lambda engine: transfer.take_out(engine, tokens, own, place))(), identity

    def put(self, file: Reads | Array, *, salt: str = "", adapter: str | None = None, check: bool = True) -> list[int]:
        """As `restore`, of a file that is open or memory. check: whether it has a check sum."""
        index, own = self._place(salt, adapter)
        n_vocab = self._parts.tokenizer.n_vocab
        saved = SavedPrefix.read(file, self.identity(index), self._form, self._parts.explanation.n_ctx, check=check)
        if not all(0 <= token < n_vocab for token in saved.tokens):
            raise RequestError(f"the saved prompt has tokens outside 0 to {n_vocab - 1}: save it again")
        restore = transfer.Restore(saved, own)
        try:
            self._run(restore.begin)
            while self._run(restore.write):
                pass
            return list(saved.tokens[: self._run(restore.enter)])
        finally:
            self._run(restore.release)()

    def room(self, tokens: int | None = None) -> int:
        """Bytes of memory that `take` and `put` want for so many tokens, or for the longest text."""
        identity = self.identity(0)
        identity = {**identity, "adapter": identity["model"]}  # as long as any
        return saved_room(self._parts.explanation.n_ctx if tokens is None else tokens, self._form, identity)

    def pin(self, memory: Array) -> Callable[[], None]:
        """Has the model's device copy from this memory and to it by itself, if it can, until what is returned is called."""
        engine = self._parts.loop.engine
        assert engine is not None
        return engine.step.pin(memory) if isinstance(engine.step, Transfers) else nothing

    def known(self, tokens: Sequence[int], *, salt: str = "", adapter: str | None = None) -> int:
        """How many of a text's first tokens are in the cache."""
        _, own = self._place(salt, adapter)
        return self._run(lambda engine: engine.cache.known(list(tokens), own).known)

    def forget(self, tokens: Sequence[int], *, shared: int = 0, salt: str = "", adapter: str | None = None) -> None:
        """Forgets what the cache has of a text behind its first `shared` tokens, and of all texts that go on from there."""
        _, own = self._place(salt, adapter)
        self._run(lambda engine: transfer.forget(engine.cache, list(tokens), own, shared))

    @cached_property
    def _form(self) -> CacheForm:
        return self._run(transfer.form_of)

    def _place(self, salt: str, adapter: str | None) -> tuple[int, bytes]:
        index = adapter_index(self._parts.adapters, adapter)
        return index, salt_of(Service(cache_salt=salt), index)

    def check(self) -> None:
        """Raises RequestError where nothing can be saved or restored; has the model's file read, by which it is known."""
        self._run(transfer.check)
        self.identity(0)

    def identity(self, adapter: int) -> Identity:
        """The files that a model's numbers come from, by digest, and what was done to them. A large file takes seconds to
        be read, once."""
        options, paths = self._parts.options, {"model": self._parts.file.files}
        if adapter:
            paths["adapter"] = find(list((options.adapters or {}).values())[adapter - 1]).paths
        try:
            facts = {name: Digests().of(files).result() for name, files in paths.items()}
        except OSError as error:
            raise RequestError(
                f"{error.filename}: {error.strerror}: the model's file is needed, to know it again"
            ) from error
        if options.quantize is not None:
            facts["quantisation"] = options.quantize
        if options.scaling:
            facts["rotation"] = f"{options.scaling} for {self._parts.explanation.n_ctx} tokens"
        return facts

    def _run(self, job: Callable[[Engine], T]) -> T:
        engine = self._parts.loop.engine
        assert engine is not None
        return self._parts.loop.run(lambda: job(engine))
