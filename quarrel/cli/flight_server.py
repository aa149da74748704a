"""`quarrel flight-server`: a stand-in for Longbow, to try the commands that speak to it."""

from __future__ import annotations

import argparse

from quarrel.cli.flags import UsageError
from quarrel.cli.terminal import line, note, write_json


def run(args: argparse.Namespace) -> int:
    from quarrel.flight.local_server import LocalServer

    meta = args.meta_port if args.meta_port is not None else (args.port and args.port + 1)
    for port in (args.port, meta):
        if not 0 <= port <= 65535:
            raise UsageError(f"a port is {port}, wanted 0 to 65535")
    with LocalServer(args.host, args.port, meta) as server:
        if args.json:
            write_json({"stand_in": True, "data": server.data, "meta": server.meta})
        else:
            line(f"data {server.data}, meta {server.meta}")
        note("This is a stand-in for Longbow: in memory, searched by brute force. Ctrl-C ends it, and its data is gone.")
        server.wait()
    return 0
