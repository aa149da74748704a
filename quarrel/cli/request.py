"""What a command line says about a request: sampling, a structure, drafts, a deadline, an adapter, a chat template."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from quarrel.cli.flags import UsageError, adapters_of
from quarrel.cli.samplers import sampling_of
from quarrel.engine import SamplingParams, Service, merged
from quarrel.errors import RequestError
from quarrel.llm import Structure
from quarrel.llm.requests import RequestKeywords
from quarrel.llm.structured import MAX_TEXT

MAX_TEMPLATE = 4 << 20


def request_keywords(args: argparse.Namespace) -> RequestKeywords:
    """As the calls of `LLM` take them; refused before a model is loaded for nothing."""
    sampling = sampling_of(args)
    merged(SamplingParams(), sampling)
    shown = sys.stderr.isatty()  # where a line says how far a prompt has been read
    service = Service(speculate=args.lookup, draft=args.draft_max, total_seconds=args.timeout, progress=shown)
    return {
        **sampling,
        "service": service,
        "structure": _structure_of(args),
        "adapter": next(iter(adapters_of(args)), None),
        "prompt_logprobs": False,
        "overflow": getattr(args, "overflow", "stop"),
        "keep": None,
        "names": (),
        "thinking_budget": None,
    }


def template_of(args: argparse.Namespace) -> str | None:
    """The chat template: the text of a file, or a name."""
    given: str | None = args.chat_template
    if given is None or not Path(given).is_file():
        return given
    with Path(given).open("rb") as file:
        data = file.read(MAX_TEMPLATE + 1)
    if len(data) > MAX_TEMPLATE:
        raise RequestError(f"the chat template {given} is larger than {MAX_TEMPLATE >> 20} MiB; choose another file")
    return data.decode("utf-8", "replace")


def _structure_of(args: argparse.Namespace) -> Structure | None:
    names = [name for name in ("json_schema", "regex", "grammar") if getattr(args, name) is not None]
    if len(names) > 1:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in names)
        raise UsageError(f"{flags} are given together; a text keeps to one structure")
    if args.json_schema is not None:
        schema: str = args.json_schema
        return Structure.json(schema if schema.lstrip().startswith("{") else _read(schema))
    if args.regex is not None:
        return Structure.regex(args.regex)
    return None if args.grammar is None else Structure.lark(_read(args.grammar))


def _read(path: str) -> str:
    with Path(path).expanduser().open("rb") as file:
        data = file.read(4 * MAX_TEXT + 1)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is no UTF-8 text ({error.reason} at byte {error.start})") from None
