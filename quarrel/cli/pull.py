"""`quarrel pull`: fetches a model, and prints where it lies."""

from __future__ import annotations

import argparse
import sys

from quarrel.cli.terminal import line, write_json
from quarrel.gguf import pull


def run(args: argparse.Namespace) -> int:
    found = pull(args.name, progress=sys.stderr.isatty(), registry=args.registry)
    paths = (*found.paths, *([] if found.projector is None else [found.projector]))
    files = [file for path in paths for file in (path.iterdir() if path.is_dir() else (path,))]
    sizes = [file.stat().st_size for file in files if file.is_file()]
    if args.json:
        write_json({"name": args.name, "files": [str(path) for path in paths], "bytes": sum(sizes)})
        return 0
    for path in paths:
        line(str(path))
    return 0
