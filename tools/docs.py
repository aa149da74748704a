"""Writes `docs/cli.md` from the parser itself: `python -m tools.docs`. A test compares the two."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from quarrel.cli.parser import make_parser

PAGE = Path(__file__).resolve().parents[1] / "docs" / "cli.md"

HEAD = """\
# The command line

`python -m quarrel COMMAND` and `quarrel COMMAND` are the same. This page is written by `python -m tools.docs` from the
parser; `quarrel COMMAND --help` shows the same in the terminal.

Results go to standard output, everything else (progress, speeds, errors) to standard error. With `--json` standard output
holds JSON and nothing else. Status: 0 done, 1 an error, told in one sentence, 2 a wrong command line, 3 done but for
some bad rows (`embed`), 130 after Ctrl-C, 141 when the reader of a pipe has gone.
"""


def page() -> str:
    """The whole page."""
    return HEAD + "".join(_section(name, parser) for name, parser in _commands())


def _commands() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in make_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def _section(name: str, parser: argparse.ArgumentParser) -> str:
    lines = [f"\n## {name}\n", f"    {parser.usage}\n", f"{parser.description}\n"]
    for group in parser._action_groups:
        actions = [a for a in group._group_actions if a.help != argparse.SUPPRESS and a.dest != "help"]
        if not actions:
            continue
        title = {"positional arguments": "argument", "options": "option"}.get(group.title or "", group.title)
        lines += [f"| {title} | |", "|---|---|"]
        lines += [f"| {_spelling(action)} | {_escaped(action.help or '')} |" for action in actions]
        lines.append("")
    return "\n".join(lines)


def _spelling(action: argparse.Action) -> str:
    value = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else "")
    if not action.option_strings:
        return f"`{value}`"
    takes_value = action.nargs != 0 and value
    return ", ".join(f"`{flag} {value}`" if takes_value else f"`{flag}`" for flag in action.option_strings)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("%%", "%")


def main() -> None:
    PAGE.write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
