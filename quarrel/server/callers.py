"""Who calls, by address: behind a trusted proxy whom it forwards; and how many connections each address holds."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from quarrel.server.errors import Refused
from quarrel.server.settings import Network


class Proxies:
    """Those whose X-Forwarded-For is believed."""

    def __init__(self, networks: Sequence[Network]) -> None:
        self._networks = networks

    def trust(self, address: str) -> bool:
        made = _parsed(address)
        return made is not None and any(made in network for network in self._networks)

    def caller(self, peer: str, forwarded: str) -> str:
        """The last address that no trusted proxy has: what stands before it, anybody may have written."""
        caller = peer
        for entry in reversed(forwarded.split(",")):
            if not self.trust(caller):
                break
            made = _parsed(entry)
            if made is None:
                break
            caller = str(made)
        return caller


class Connections:
    """Counts what each address holds, up to `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._counts: Counter[str] = Counter()

    def take(self, address: str) -> bool:
        if self._counts[address] >= self._most:
            return False
        self._counts[address] += 1
        return True

    def free(self, address: str) -> None:
        self._counts[address] -= 1
        if not self._counts[address]:
            del self._counts[address]

    @contextmanager
    def counted(self, address: str) -> Iterator[None]:
        """For the time of a block; raises `Refused` (429)."""
        if not self.take(address):
            raise self.refusal()
        try:
            yield
        finally:
            self.free(address)

    def refusal(self) -> Refused:
        message = (
            f"this address holds {self._most} connections already: end one, or start the server with more --connections"
        )
        return Refused(429, "too_many_connections", message, retry_after=1.0)


def _parsed(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """An address, also with a port, as some proxies write it."""
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        made = ipaddress.ip_address(text)
    except ValueError:
        return None
    return made.ipv4_mapped or made if isinstance(made, ipaddress.IPv6Address) else made
