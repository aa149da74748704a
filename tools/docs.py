"""Writes what docs/ takes from the code: `docs/cli.md` from the parser, and the table of rooms in `docs/structure.md`.

    python -m tools.docs

Tests fail where a page is out of date.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from quarrel.cli.parser import commands_of, make_parser
from tools import rooms

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "cli.md"
STRUCTURE = DOCS / "structure.md"

HEAD = """\
# The command line

`python -m quarrel COMMAND` and `quarrel COMMAND` are the same. This page is written by `python -m tools.docs` from the
parser; `quarrel COMMAND --help` shows the same in the terminal.

Results go to standard output, everything else (progress, speeds, errors) to standard error. With `--json` standard output
holds JSON and nothing else. Status: 0 done, 1 an error, which is one sentence, 2 a wrong command line, 3 done but for
some bad rows (`embed`), 130 after Ctrl-C, 141 when the reader of a pipe has gone.

# Defaults

`~/.config/quarrel/config.toml`, or the file that `--config` names, holds options by their long names, as if they stood in
front of what is typed: for every command, for one, and for one model, by the name that is typed or that of its file.

```toml
model = "mistral:7b"           # where none is named
temperature = 0.7

[serve]
port = 9000

[models."mistral:7b"]
system = "Be brief."
ctx = 16384
```
"""


def page() -> str:
    """The whole page."""
    return HEAD + "".join(_section(name, parser) for name, parser in commands_of(make_parser()).items())


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


def structure(text: str) -> str:
    """The page on structure with its table of rooms, the one that begins `| room |`, as `tools/rooms.py` has it."""
    before, _, rest = text.partition("| room |")
    _, _, after = rest.partition("\n\n")
    return f"{before}{rooms.table()}\n\n{after}"


def main() -> None:
    PAGE.write_text(page(), "utf-8")
    STRUCTURE.write_text(structure(STRUCTURE.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
