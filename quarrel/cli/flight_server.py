"""`quarrel flight-server`: a stand-in for Longbow, to try the commands that speak to it."""

from __future__ import annotations

import argparse

from quarrel.cli.flags import UsageError
from quarrel.cli.terminal import line, note, write_json
from quarrel.env import memory_of
from quarrel.errors import ConfigError


def run(args: argparse.Namespace) -> int:
    from quarrel.flight.local_server import LocalServer
    from quarrel.flight.store import Store

    meta = args.meta_port if args.meta_port is not None else (args.port and args.port + 1)
    for port in (args.port, meta):
        if not 0 <= port <= 65535:
            raise UsageError(f"a port is {port}, wanted 0 to 65535")
    if not args.index_rate > 0:
        raise UsageError(f"--index-rate is {args.index_rate:g}, wanted rows above 0")
    store = Store(kind=args.kind, rate=args.index_rate, memory=_memory(args.memory))
    with LocalServer(args.host, args.port, meta, store) as server:
        note("This is a stand-in for Longbow: in memory, searched by brute force. Ctrl-C ends it, and its data is gone.")
        if args.json:
            write_json({"stand_in": True, "data": server.data, "meta": server.meta})
        else:
            line(f"data {server.data}, meta {server.meta}")
        server.wait()
    return 0


def _memory(given: str | None) -> int | None:
    try:
        nbytes = None if given is None else memory_of(given)
    except ConfigError:
        nbytes = 0.0
    if isinstance(nbytes, float):
        raise UsageError(f"--memory is {given!r}, wanted bytes such as 512MiB or 16GB")
    return nbytes
