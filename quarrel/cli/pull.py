"""`quarrel pull`: fetches a model, and prints where it lies."""

from __future__ import annotations

import argparse
import sys

from quarrel.cli.terminal import line, write_json
from quarrel.gguf import pull


def run(args: argparse.Namespace) -> int:
    found = pull(args.name, progress=sys.stderr.isatty(), registry=args.registry)
    sizes = [path.stat().st_size for path in found.paths]
    if args.json:
        write_json({"name": args.name, "files": [str(path) for path in found.paths], "bytes": sum(sizes)})
        return 0
    for path in found.paths:
        line(str(path))
    return 0
