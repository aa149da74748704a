"""The command line as argparse reads it, and a sentence for what it does not understand."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from quarrel import __version__
from quarrel.cli.commands import COMMANDS, default_model

_DEVICE = "a model runs on one device: --backend names it, and --gpu-layers leaves layers to the CPU"
_SPEED = "`python -m quarrel.bench` measures speed"
_CHECK = "QUARREL_CHECK=1 compares every op with its reference while it runs"
OTHERS_OPTIONS = {
    **dict.fromkeys(("-gpu", "--gpu"), _DEVICE),
    **dict.fromkeys(("-interactive", "--interactive"), "`quarrel chat` is a conversation"),
    **dict.fromkeys(("-benchmark", "--benchmark", "-debug-perf"), _SPEED),
    **dict.fromkeys(("-debug-dequant", "-debug-activations"), _CHECK),
    **dict.fromkeys(("-metrics", "--metrics"), "`quarrel serve` reports them at /metrics"),
    "-quality": "the options under sampling say how a text is drawn",
    "--api-key": "`quarrel keys create` makes a key, or WEBUI_API_KEY sets one; others can see a command line",
}
"""Options of other programs, this one's first version among them: what does the same here."""


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one sentence, without the usage before it and without the name of a Python type in it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self.register("type", int, _whole)
        self.register("type", float, _number)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')} (see {self.prog} --help)\n")


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None


def make_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The whole command line. only: of the commands, this one alone; to declare the options of all takes a while."""
    parser = Parser(
        prog="quarrel",
        description="Runs GGUF language models on an NVIDIA GPU or any CPU, in pure Python.",
        epilog='To begin with: quarrel generate "Once upon a time". Speed, and how good answers are, are measured by'
        " python -m quarrel.bench, python -m quarrel.perplexity and python -m quarrel.regress.",
    )
    parser.add_argument("--version", action="version", version=f"quarrel {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, usage, summary, details, add in COMMANDS:
        if only not in (None, name):
            continue
        command = commands.add_parser(
            name,
            usage=f"quarrel {name} [options]{usage}",
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}. {details}".rstrip(),
        )
        add(command)
        command.set_defaults(default_model=default_model(name))
        command.set_defaults(flags=[flag for action in command._actions for flag in action.option_strings])
        if name == "llama-server":
            continue
        file = "a TOML file with defaults of options; ~/.config/quarrel/config.toml by default"
        command.add_argument("--config", metavar="FILE", help=file)
        how = "each answer as one line of JSON" if name == "chat" else "one JSON document on standard output"
        command.add_argument("--json", action="store_true", help=f"print {how}")
    return parser


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The arguments, and words that no command understands."""
    args, unknown = parser.parse_known_args(words)
    if hasattr(args, "words") and not any(word.startswith("-") for word in unknown):
        # `MODEL -n 3 PROMPT`: argparse ends a list of arguments at the first option.
        args.words, unknown = args.words + unknown, []
    return args, unknown


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parser of each command."""
    (found,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(found.choices)


def unknown_command(word: str) -> str | None:
    """A sentence for a first word that is no command and no option."""
    names = [name for name, *_ in COMMANDS]
    if word in names or word.startswith("-"):
        return None
    near = _OTHERS_COMMANDS.get(word) or next(iter(get_close_matches(word, names, 1)), None)
    hint = "" if near is None else f"; perhaps `{near if ' ' in near else f'quarrel {near}'}` is meant"
    return f"there is no command {word!r}{hint} (see quarrel --help)"


_OTHERS_COMMANDS = {
    **dict.fromkeys(("run", "cli"), "chat"),
    "info": "show",
    **dict.fromkeys(("ls", "models"), "list"),
    "delete": "rm",
    "copy": "cp",
    "complete": "generate",
    **{name: f"python -m quarrel.{name}" for name in ("bench", "perplexity", "regress")},
    "help": "--help",
    "version": "--version",
}
"""Commands of other programs."""


def unknown_option(words: Sequence[str]) -> str | None:
    """A sentence for an option that only other programs have."""
    for word in words:
        if word == "--":
            break
        name = word.partition("=")[0]
        if name in OTHERS_OPTIONS:
            return f"{name!r} is not understood here; {OTHERS_OPTIONS[name]}"
    return None


def nearest(word: str, known: Iterable[str]) -> str:
    """ "; --temperature is near" for --temprature, and nothing where nothing is."""
    found = get_close_matches(word.partition("=")[0], list(known), 1)
    return f"; perhaps {found[0]} is meant" if found else ""
