"""`quarrel list`: the models of this machine."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime

from quarrel.cli.library import models
from quarrel.cli.terminal import amount, line, table, visible, write_json


def run(args: argparse.Namespace) -> int:
    found = [model for model in models() if args.pattern.casefold() in model.name.casefold()]
    if args.json:
        write_json([{"name": m.name, "where": m.where, "bytes": m.nbytes, "files": list(map(str, m.paths))} for m in found])
        return 0
    rows = [["name", "size", "changed", "where"]]
    for m in found:
        day = datetime.fromtimestamp(m.changed, UTC).strftime("%Y-%m-%d")
        rows.append([visible(m.name), amount(m.nbytes), day, visible(str(m.paths[0].parent))])
    for text in table(rows, right=(1,), indent=""):
        line(text)
    return 0
