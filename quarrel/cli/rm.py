"""`quarrel rm`: deletes models."""

from __future__ import annotations

import argparse

from quarrel.cli.library import remove
from quarrel.cli.terminal import amount, line, visible, write_json


def run(args: argparse.Namespace) -> int:
    """The first name that cannot be deleted ends it."""
    rows = []
    for name in args.names:
        rows.append({"name": name, "bytes": remove(name)})
        if not args.json:
            line(f"{visible(name)} is deleted, {amount(rows[-1]['bytes'])} are free")
    if args.json:
        write_json(rows)
    return 0
