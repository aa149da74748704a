"""Pictures fetched from the web: by http and https, from public addresses only, within limits of bytes and time.

A name is resolved once, and the address that was checked is the one that is connected to, so that a name which leads
elsewhere a moment later changes nothing. Each step of a redirect is checked as the first one was. No proxy is used.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Final
from urllib.parse import quote, urljoin, urlsplit

from quarrel.errors import RequestError

SECONDS: Final = 10.0
"""For a picture, with all redirects."""
MOST_REDIRECTS: Final = 3
PIECE: Final = 1 << 16
_PORTS: Final = {"http": 80, "https": 443}
_HEADERS: Final = {"Accept": "image/*", "User-Agent": "quarrel", "Connection": "close"}
_OURS: Final = ("192.0.0.0/24", "168.63.129.16/32", "64:ff9b:1::/48")
"""Public by their numbers as Python has them, and yet near: where clouds answer a machine about itself, among others."""
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
_SAFE: Final = "%/:=&?~+!$,;'@()*[]"
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class _Refused(Exception):
    """Why a picture is not fetched, as the end of a sentence."""


def is_address(source: object) -> bool:
    """Whether a picture is named by a URL of the web."""
    return isinstance(source, str) and source[:8].lower().startswith(("http://", "https://"))


def fetched(url: str, most: int, seconds: float = SECONDS) -> bytes:
    """What lies there, `most` bytes at most. Raises RequestError with one sentence for whatever goes wrong."""
    fetch, done = _Fetch(most), Future[bytes]()

    def work() -> None:
        try:
            done.set_result(fetch.follow(url))
        except _Refused as reason:
            done.set_exception(reason)
        except ssl.SSLError as error:
            done.set_exception(_Refused(f"its server cannot be trusted ({error.reason})"))
        except Exception as error:  # of the network, or of a strange address
            done.set_exception(_Refused(f"its server gave no answer ({type(error).__name__})"))

    # Looking up a name cannot be stopped, so that it is waited for on another thread.
    threading.Thread(target=work, name="quarrel-fetch", daemon=True).start()
    try:
        return done.result(seconds)
    except TimeoutError:
        reason = f"it takes longer than {seconds:g} seconds"
    except _Refused as error:
        reason = str(error)
    finally:
        fetch.stop()
    raise RequestError(f"the image {url[:100]!r} is not fetched: {reason}", "image") from None


class _Fetch:
    """One picture on its way; `stop`, from another thread, ends it."""

    def __init__(self, most: int) -> None:
        self._most, self._stopped = most, False
        self._socket: socket.socket | None = None

    def stop(self) -> None:
        self._stopped = True
        if (link := self._socket) is not None:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def follow(self, url: str) -> bytes:
        for _ in range(1 + MOST_REDIRECTS):
            with self._answer(url) as answer:
                if answer.status in (301, 302, 303, 307, 308) and (to := answer.getheader("Location")):
                    url = urljoin(url, to)
                    continue
                if answer.status != 200:
                    raise _Refused(f"its server says {answer.status}")
                return self._body(answer)
        raise _Refused(f"it is redirected more than {MOST_REDIRECTS} times")

    def _body(self, answer: http.client.HTTPResponse) -> bytes:
        if (answer.length or 0) > self._most:
            raise _Refused(f"it has {answer.length} bytes, wanted at most {self._most >> 20} MiB")
        found = bytearray()
        while piece := answer.read(PIECE):
            found += piece
            if len(found) > self._most:
                raise _Refused(f"it has more than {self._most >> 20} MiB")
        return bytes(found)

    @contextlib.contextmanager
    def _answer(self, url: str) -> Iterator[http.client.HTTPResponse]:
        parts = urlsplit(url)
        if parts.scheme not in _PORTS or not parts.hostname:
            raise _Refused("it is no address of http or https")
        port = parts.port or _PORTS[parts.scheme]
        host = parts.hostname.encode("idna").decode() if not parts.hostname.isascii() else parts.hostname
        connection = http.client.HTTPConnection(host, port)
        with socket.create_connection((public_address(host, port), port), SECONDS) as plain:
            tls = ssl.create_default_context() if parts.scheme == "https" else None
            with plain if tls is None else tls.wrap_socket(plain, server_hostname=host) as link:
                self._socket = connection.sock = link
                if self._stopped:
                    raise _Refused("it takes too long")
                target = quote(parts.path or "/", safe=_SAFE.replace("?", ""))
                target += f"?{quote(parts.query, safe=_SAFE)}" if parts.query else ""
                connection.request("GET", target, headers=_HEADERS)
                with connection.getresponse() as answer:
                    yield answer


def public_address(host: str, port: int) -> str:
    """The address of a name, all of whose addresses are public; whoever could choose among them would choose another."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise _Refused(f"the name {host[:80]!r} has no address") from None
    addresses = [str(entry[4][0]) for entry in found]
    for address in addresses:
        if not is_public(address):
            raise _Refused(f"{host[:80]!r} is an address of a private network or of this machine")
    return addresses[0]


def is_public(text: str) -> bool:
    """Whether anyone on the internet reaches the address; those that hold another one inside are as that one is."""
    try:
        address: Address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if address in _NAT64 or int(address) >> 32 == 0:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None and not is_public(str(inner)):
            return False
        if address.ipv4_mapped is not None:
            return True
    near = any(address in ipaddress.ip_network(network) for network in _OURS)
    return address.is_global and not address.is_multicast and not near
