"""`quarrel completion`: a script for a shell."""

from __future__ import annotations

import argparse

from quarrel.cli.parser import commands_of, make_parser
from quarrel.cli.terminal import write, write_json
from quarrel.errors import QuarrelError, installing

_PATHS = ("MODEL", "FILE", "FOLDER", "IN", "OUT", "NAME_OR_FILE")


def run(args: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError:
        raise QuarrelError(f"the script is written by shtab: {installing('terminal')}") from None
    parser = make_parser()
    for command in commands_of(parser).values():
        for action in command._actions:
            if action.metavar in _PATHS:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    script = shtab.complete(parser, args.shell)
    if args.json:
        write_json({"shell": args.shell, "script": script})
    else:
        write(script + "\n")
    return 0
