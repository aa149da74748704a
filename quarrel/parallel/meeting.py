"""Where the members of a model find each other."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Meeting:
    """A folder of the members' machine, or a port of the first member's. address: where this member is reached."""

    folder: str
    address: str = "127.0.0.1"
    host: str = ""
    port: int = 0

    @property
    def one_host(self) -> bool:
        """Whether all members are on this machine."""
        return not self.port

    def store(self, name: str, size: int) -> Any:
        """What the members of a group write their addresses into."""
        import torch.distributed as dist

        if not self.port:
            return dist.FileStore(str(Path(self.folder) / name), size)
        return dist.PrefixStore(name, dist.TCPStore(self.host, self.port, is_master=False, wait_for_workers=False))


def store_at(address: str) -> tuple[Any, int]:
    """The store that members on several hosts meet at, and its port: theirs as long as it is kept."""
    import torch.distributed as dist

    server = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    port = server.getsockname()[1]
    return dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()), port
