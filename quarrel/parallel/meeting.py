"""Where the members of a model find each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Meeting:
    """A folder of the members' machine. address: where this member is reached."""

    folder: Path
    address: str = "127.0.0.1"

    def store(self, name: str, size: int) -> Any:
        """What the members of a group write their addresses into."""
        import torch.distributed as dist

        return dist.FileStore(str(self.folder / name), size)
