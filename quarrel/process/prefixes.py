"""What the cache of a model in another process has of texts: that process writes the files, and reads them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quarrel.child.wire import Json


@dataclass(frozen=True)
class RemotePrefixes:
    """As `llm.saved.Prefixes`. call: sends a method's name and arguments there, and waits."""

    call: Callable[..., Json]

    def save(
        self, tokens: Sequence[int], path: str | os.PathLike[str], *, salt: str = "", adapter: str | None = None
    ) -> tuple[int, int]:
        count, size = self.call("save", [list(tokens), os.path.abspath(path)], {"salt": salt, "adapter": adapter})
        return count, size

    def restore(self, path: str | os.PathLike[str], *, salt: str = "", adapter: str | None = None) -> tuple[list[int], int]:
        tokens, size = self.call("restore", [os.path.abspath(path)], {"salt": salt, "adapter": adapter})
        return tokens, size

    def forget(self, tokens: Sequence[int], *, shared: int = 0, salt: str = "", adapter: str | None = None) -> None:
        self.call("forget", [list(tokens)], {"shared": shared, "salt": salt, "adapter": adapter})
