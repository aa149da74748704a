"""One port of a Flight server: connection, deadlines, headers, retries, and its errors as sentences."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import urlsplit

import pyarrow as pa
from pyarrow import flight

from quarrel.errors import FlightDataError, FlightError, FlightNotFound, FlightUnavailable, RequestError
from quarrel.flight.rows import first_line, from_server

T = TypeVar("T")

MAX_MESSAGE = 512 << 20
"""Longbow's own limit, both ways."""
SCHEMES = ("grpc://", "grpc+tcp://", "grpc+tls://", "grpc+unix://")

FULL = " (a Longbow that has reached its LONGBOW_MAX_MEMORY takes no more rows, and says nothing)"
NOT_FOUND = re.compile(r"(NOT_FOUND: *)?dataset not found", re.IGNORECASE)


@dataclass(frozen=True)
class Retry:
    """Calls that change nothing are made again where the server cannot be reached: `attempts` in all, after pauses from
    `first` doubling up to `longest` seconds, each shortened at random by up to a half."""

    attempts: int = 5
    first: float = 0.1
    longest: float = 5.0

    def pauses(self) -> Iterator[float]:
        for i in range(self.attempts - 1):
            yield min(self.longest, self.first * 2**i) * random.uniform(0.5, 1.0)


@dataclass(frozen=True)
class Access:
    """How to speak to a server. timeout: seconds for a call. headers: sent with each. tls_root: PEM of who signed the
    server's certificate, in place of the system's; tls_chain and tls_key: PEM of our own."""

    timeout: float = 30.0
    headers: Mapping[str, str] = field(default_factory=dict)
    tls_root: bytes | None = None
    tls_chain: bytes | None = None
    tls_key: bytes | None = None


class Connection:
    """A client of one address. `run` maps errors and retries; safe for threads."""

    def __init__(self, address: str, access: Access, retry: Retry) -> None:
        if not _is_whole(address):
            raise RequestError(f"the address is {address!r}, wanted one such as grpc://host:3000 or grpc+tls://host:3000")
        if not access.timeout > 0:
            raise RequestError(f"the timeout is {access.timeout!r}, wanted seconds above 0")
        self.address, self._access, self._retry = address, access, retry
        self._client = self._connect()

    def _connect(self) -> flight.FlightClient:
        a = self._access
        options: list[tuple[str, int]] = [
            ("grpc.max_receive_message_length", MAX_MESSAGE),
            ("grpc.max_send_message_length", MAX_MESSAGE),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        try:
            return flight.FlightClient(
                self.address,
                tls_root_certs=a.tls_root,
                cert_chain=a.tls_chain,
                private_key=a.tls_key,
                generic_options=options,
            )
        except (pa.ArrowException, ValueError, TypeError) as error:
            raise RequestError(f"the address {self.address} cannot be used: {first_line(error)}") from None

    @property
    def client(self) -> flight.FlightClient:
        return self._client

    def options(self, timeout: float | None = None) -> flight.FlightCallOptions:
        headers = [(k.lower().encode(), v.encode()) for k, v in self._access.headers.items()]
        return flight.FlightCallOptions(timeout=timeout or self._access.timeout, headers=headers)

    def run(self, call: Callable[[], T], what: str, dataset: str = "", timeout: float | None = None) -> T:
        """What `call` returns; again where the server cannot be reached."""
        pauses = self._retry.pauses()
        while True:
            try:
                with self.sentences(what, dataset, timeout):
                    return call()
            except FlightUnavailable:
                pause = next(pauses, None)
                if pause is None:
                    raise
                time.sleep(pause)

    @contextmanager
    def sentences(
        self, what: str, dataset: str = "", timeout: float | None = None, *, writes: bool = False
    ) -> Iterator[None]:
        """Errors of the library as ours. dataset: the one that is meant where the server says NOT_FOUND."""
        try:
            yield
        except flight.FlightTimedOutError:
            raise FlightUnavailable(
                f"{self.address} did not finish {what} within {timeout or self._access.timeout:g} s: look at the server"
                f"{FULL if writes else ''}, or allow more"
            ) from None
        except flight.FlightUnavailableError as error:
            raise FlightUnavailable(
                f"{self.address} cannot be reached for {what} ({first_line(error)}): is the server running?"
            ) from None
        except flight.FlightUnauthenticatedError as error:
            raise FlightError(f"{self.address} wants other credentials for {what}: {first_line(error)}") from None
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # a file's, which the batches were read from
            if dataset and (isinstance(error, pa.ArrowKeyError) or NOT_FOUND.match(first_line(error))):
                raise self._not_found(dataset, first_line(error)) from None
            if isinstance(error, flight.FlightError) or from_server(error):
                raise FlightError(f"{self.address} refused {what}: {first_line(error)}") from None
            raise FlightDataError(
                f"{self.address} broke off, or sent what cannot be read, in {what}: {first_line(error)}"
            ) from None

    def _not_found(self, dataset: str, said: str) -> FlightNotFound:
        if said.startswith("id "):
            return FlightNotFound(f"there is no such row in {dataset!r} at {self.address}: {said}")
        return FlightNotFound(
            f"there is no dataset {dataset!r} in the store at {self.address}: fill it first, or see which there are"
            " (quarrel datasets list)"
        )

    def close(self) -> None:
        self._client.close()


def _is_whole(address: object) -> bool:
    """Whether it names a scheme, a host and a port: without a host, the library connects to whoever is there."""
    if not isinstance(address, str) or not address.startswith(SCHEMES):
        return False
    try:
        parts = urlsplit(address)
        return bool(parts.path.strip("/") if parts.scheme == "grpc+unix" else parts.hostname and parts.port)
    except ValueError:
        return False
