"""What a command line asks of a request beside its sampling: a structure, guessing, a deadline, an adapter."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from quarrel.cli.parser import UsageError
from quarrel.engine import Service
from quarrel.errors import RequestError
from quarrel.llm import Structure
from quarrel.llm.structured import MAX_TEXT


@dataclass(frozen=True)
class Asked:
    """As `LLM.stream` and `LLM.chat` take it."""

    structure: Structure | None
    service: Service
    adapter: str | None


def asked(args: argparse.Namespace) -> Asked:
    """Refused before a model is loaded for nothing."""
    service = Service(speculate=args.lookup, draft=args.draft_max, total_seconds=args.timeout)
    return Asked(structure_of(args), service, next(iter(adapters_of(args)), None))


def structure_of(args: argparse.Namespace) -> Structure | None:
    """The one structure that was asked for."""
    given = {flag: text for flag in ("json_schema", "regex", "grammar") if (text := getattr(args, flag)) is not None}
    if len(given) > 1:
        flags = " and ".join(f"--{flag.replace('_', '-')}" for flag in given)
        raise UsageError(f"{flags} are given together; a text keeps to one structure")
    if args.json_schema is not None:
        schema: str = args.json_schema
        return Structure.json(schema if schema.lstrip().startswith("{") else _read(schema))
    if args.regex is not None:
        return Structure.regex(args.regex)
    return None if args.grammar is None else Structure.lark(_read(args.grammar))


def adapters_of(args: argparse.Namespace) -> dict[str, str]:
    """The adapters to load, by name: NAME=FILE, or FILE, which is called like its file."""
    adapters: dict[str, str] = {}
    for given in args.lora or ():
        name, equals, path = given.partition("=")
        if not equals or Path(given).is_file():
            name, path = Path(given).name.removesuffix(".gguf"), given
        if name in adapters:
            raise UsageError(f"two adapters are called {name!r}; name them, as in --lora NAME=FILE")
        adapters[name] = path
    return adapters


def _read(path: str) -> str:
    with Path(path).expanduser().open("rb") as file:
        data = file.read(4 * MAX_TEXT + 1)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is no UTF-8 text ({error.reason} at byte {error.start})") from None
