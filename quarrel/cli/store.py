"""A vector store by the options that name it."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from quarrel.cli.flags import UsageError

if TYPE_CHECKING:
    from quarrel.flight import LongbowClient

DATA = "grpc://127.0.0.1:3000"
CONDITION = re.compile(r"\s*([^=!<>]+?)\s*(==|!=|>=|<=|=|>|<)\s*(.*?)\s*")


def client_of(args: argparse.Namespace, address: str) -> LongbowClient:
    """The client; nothing is connected yet. `args` has the flight options."""
    from quarrel.flight import Access, LongbowClient

    headers = {}
    for given in args.header or ():
        name, equals, value = given.partition("=")
        if not equals or not re.fullmatch(r"[-\w.]+", name, re.ASCII) or not (value.isascii() and value.isprintable()):
            raise UsageError(f"--header takes NAME=VALUE in printable ASCII, got {given!r}")
        headers[name] = value
    root = Path(args.tls_root).read_bytes() if args.tls_root else None
    access = Access(timeout=args.timeout, headers=headers, tls_root=root)
    return LongbowClient(address, args.meta or next_port(address), access=access)


def dataset_of(args: argparse.Namespace) -> str:
    """The dataset that is meant."""
    if not args.dataset:
        raise UsageError("a store holds many datasets; name one by --dataset")
    name: str = args.dataset
    return name


def condition_of(given: str) -> tuple[str, str, str]:
    """A filter as it is typed."""
    match = CONDITION.fullmatch(given)
    if not match:
        raise UsageError(f"--filter takes a column, a comparison and a value, such as year>=1990, got {given!r}")
    return match[1], match[2], match[3]


def next_port(address: str) -> str:
    """Longbow's second port stands behind its first."""
    host, _, port = address.rpartition(":")
    if not re.fullmatch(r"\d{1,5}", port) or "//" not in host:
        raise UsageError(f"the address {address!r} has no port; write grpc://host:3000")
    return f"{host}:{int(port) + 1}"
