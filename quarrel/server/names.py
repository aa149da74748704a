"""Further names of models, made and taken away by requests, and kept in a file for the next start."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quarrel.server.errors import Refused
from quarrel.server.variants import Prompting

MOST = 1000
_NAME = re.compile(
    r"([A-Za-z0-9_][A-Za-z0-9_.-]{0,79}/){0,3}[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,79})?"
)
log = logging.getLogger("quarrel.server")


@dataclass(frozen=True)
class Name:
    """What a model is called, and what goes with its requests. source: as `Entry` has it."""

    name: str
    source: str
    prompting: Prompting = field(default_factory=Prompting)
    adapters: Mapping[str, str] = field(default_factory=dict)
    """LoRA adapters that the model is loaded with, by name; requests take the first."""
    created: int = 0


def folded(name: str) -> str:
    """Names are the same without regard to case, and with the tag `latest` or none."""
    return name.removesuffix(":latest").casefold()


def checked(name: str) -> str:
    """A name for a model to be made. Raises `Refused`."""
    if _NAME.fullmatch(name) is None:
        raise Refused(400, "invalid_request", f"invalid model name: {name[:80]!r}, wanted such as mine or mine:tag")
    return name.removesuffix(":latest")


class Names:
    """Those that requests made, and what of the folder they took away."""

    def __init__(self, file: Path | None) -> None:
        """file: where they are kept; None keeps nothing."""
        self._file = file
        self._made: dict[str, Name] = {}
        self.forgotten: set[str] = set()
        """Files of the folder that are not offered any more."""
        if file is not None and file.exists():
            self._read(file)

    def __iter__(self) -> Any:
        return iter(list(self._made.values()))

    def get(self, name: str) -> Name | None:
        return self._made.get(folded(name))

    def add(self, made: Name) -> None:
        """Puts it in the place of another of that name."""
        if len(self._made) >= MOST and folded(made.name) not in self._made:
            raise Refused(400, "invalid_request", f"there are {MOST} names already: delete one of them")
        self._made[folded(made.name)] = made
        self.forgotten.discard(made.source)
        self._write()

    def remove(self, name: str) -> None:
        del self._made[folded(name)]
        self._write()

    def forget(self, source: str) -> None:
        self.forgotten.add(source)
        self._write()

    def _read(self, file: Path) -> None:
        try:
            kept = json.loads(file.read_text("utf-8"))
            for row in kept["names"]:
                name = Name(**{**row, "prompting": Prompting(**row["prompting"])})
                self._made[folded(name.name)] = name
            self.forgotten.update(kept["forgotten"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            log.error("%s cannot be read (%s): the names in it are not offered", file, error)

    def _write(self) -> None:
        if self._file is None:
            return
        rows = [asdict(name) for name in self._made.values()]
        text = json.dumps({"names": rows, "forgotten": sorted(self.forgotten)}, indent=1)
        partial = self._file.with_suffix(f".{os.getpid()}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(text, "utf-8")
            partial.replace(self._file)
        except OSError as error:
            log.error("%s cannot be written (%s): the names of models are good until the server ends", self._file, error)


def now() -> int:
    """As names are dated."""
    return int(time.time())
