"""`quarrel keys`: the server's API keys."""

from __future__ import annotations

import argparse
import os
import time
from datetime import UTC, datetime
from pathlib import Path

from quarrel.cli.flags import UsageError
from quarrel.cli.terminal import line, note, table, visible, write_json
from quarrel.server.keys import Key, Keyring
from quarrel.server.settings import DATA_DIR, from_environment

MOST_DAYS = 36500
"""A century; a key for longer has no day on which it expires."""


def run(args: argparse.Namespace) -> int:
    """Status 0."""
    folder = args.data_dir or from_environment(os.environ).get("data_dir") or DATA_DIR
    ring = Keyring(Path(str(folder)).expanduser())
    if args.action == "list":
        if args.what:
            raise UsageError(f"list takes no name, got {args.what!r}: it lists all keys")
        return _list(ring, args.json)
    if not args.what:
        raise UsageError("create wants a name" if args.action == "create" else f"{args.action} wants the id of a key")
    if args.days is not None and not 0 < args.days <= MOST_DAYS:
        raise UsageError(f"--days is {args.days:g}, wanted more than 0 and at most {MOST_DAYS}")
    if not 0 <= args.overlap <= 24 * MOST_DAYS:
        raise UsageError(f"--overlap is {args.overlap:g}, wanted 0 to {24 * MOST_DAYS}")
    if args.action == "revoke":
        key = ring.revoke(args.what)
        if args.json:
            write_json(_row(key))
        else:
            line(f"{key.id} ({visible(key.name)}) is revoked")
        return 0
    if args.action == "create":
        key, secret = ring.create(args.what, None if args.days is None else args.days * 86400)
    else:
        key, secret = ring.rotate(args.what, args.overlap * 3600)
    if args.json:
        write_json({**_row(key), "key": secret})
    else:
        line(secret)
        note(f"quarrel keys: this is key {key.id}; it is shown this once, and stored as a hash only")
    return 0


def _list(ring: Keyring, as_json: bool) -> int:
    keys = ring.keys()
    if as_json:
        write_json([_row(key) for key in keys])
        return 0
    for text in table([["id", "name", "created", "expires", "state"], *(_columns(key) for key in keys)]):
        line(text)
    return 0


def _row(key: Key) -> dict[str, object]:
    return {"id": key.id, "name": key.name, "created": key.created, "expires": key.expires, "state": _state(key)}


def _columns(key: Key) -> list[str]:
    expires = "never" if key.expires is None else _day(key.expires)
    return [key.id, visible(key.name), _day(key.created), expires, _state(key)]


def _state(key: Key) -> str:
    if key.revoked:
        return "revoked"
    return "usable" if key.usable(time.time()) else "expired"


def _day(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError, OSError):  # a file written by hand, or by a version that took any number
        return "no date"
