"""Flags of the command line and what they set: options of `load`, fields of a request; and the way back, for errors."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any

from quarrel.cli.samplers import SAMPLERS
from quarrel.env import memory_of
from quarrel.errors import ConfigError
from quarrel.llm.options import ADDRESS, FILE_NAME, LAYERS, MEMORY, NUMBER, SWITCH, Kind, LoadOptions, OneOf, Whole

_LOAD_FLAGS = {"n_ctx": ("-c", "--ctx"), "threads": ("-t", "--threads"), "gpu_layers": ("-ngl", "--gpu-layers")}
"""Where the flag of an option is not its name with dashes."""
_FLAG_OF = {
    **{sampler.field: next(f for f in sampler.flags.split() if f.startswith("--")) for sampler in SAMPLERS},
    **{name: flags[-1] for name, flags in _LOAD_FLAGS.items()},
    "max_seqs": "--parallel",
    "adapters": "--lora",
    "service.speculate": "--lookup",
    "service.draft": "--draft-max",
    "service.total_seconds": "--timeout",
    "k": "-k",
}
"""The same for every field that an error may name."""


class UsageError(Exception):
    """A command line that says two things or too little; the process ends with status 2."""


def add_load_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for every option of `load` that has a line of help."""
    group = parser.add_argument_group("loading")
    for option in fields(LoadOptions):
        if option.metadata["help"]:
            flags = _LOAD_FLAGS.get(option.name, (f"--{option.name.replace('_', '-')}",))
            common = {"dest": option.name, "default": option.default, "help": option.metadata["help"]}
            group.add_argument(*flags, **common, **_argument_of(option.metadata["kind"]))
    hidden(group, "--ctx-size", "--n-ctx", "--num-ctx", "-kv-cache-size", type=int, dest="n_ctx")
    hidden(group, "--n-gpu-layers", type=_layers, dest="gpu_layers")
    hidden(group, "--n-cpu-moe", type=int, dest="experts_on_cpu")


def hidden(parser: Any, *flags: str, **options: Any) -> None:
    """Flags that users know from other programs; they work and are not listed."""
    parser.add_argument(*flags, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **options)


def load_options(args: argparse.Namespace, **more: Any) -> LoadOptions:
    """The options of `load` that the command line sets, and more of them."""
    given = {option.name: getattr(args, option.name) for option in fields(LoadOptions) if hasattr(args, option.name)}
    return LoadOptions(**{**given, "adapters": adapters_of(args) or None, **more})


def adapters_of(args: argparse.Namespace) -> dict[str, str]:
    """The adapters to load, by name: NAME=FILE, or FILE, which is called like its file."""
    adapters: dict[str, str] = {}
    for given in getattr(args, "lora", None) or ():
        name, equals, path = given.partition("=")
        if not equals or Path(given).is_file():
            name, path = Path(given).name.removesuffix(".gguf"), given
        if name in adapters:
            raise UsageError(f"two adapters are called {name!r}; name them, as in --lora NAME=FILE")
        adapters[name] = path
    return adapters


def in_flags(error: Exception, flags: Collection[str]) -> str:
    """The sentence of an error or a warning, with the fields that it names as flags: `n_ctx=9` is `--ctx 9`.

    flags: those of the command. Nobody types None: the sentence leaves it out.
    """
    sentence, names = str(error), getattr(error, "fields", ())
    for field in names:
        name = field.rpartition(".")[2]
        flag = _FLAG_OF.get(field, f"--{name.replace('_', '-')}")
        if flag in flags and flag != "--image":  # a sentence speaks of pictures, not of the flag
            sentence = _with_flag(sentence, name, flag)
    return sentence.removesuffix(", or None").removesuffix(" or None") if names else sentence


def _with_flag(sentence: str, name: str, flag: str) -> str:
    head, *rest = sentence.split(f"{name}=")
    # The field: not a word that contains it, nor a flag, nor a command of its name.
    head = re.sub(rf"(?<![-])(?<!quarrel )\b{name}\b", flag, head, count=1)
    for part in rest:  # 'yarn' loses its quotes
        quoted = part.split("'", 2) if part.startswith("'") else ["", "", part]
        head += f"{flag} {quoted[1]}{quoted[2]}"
    return head


def _argument_of(kind: Kind) -> dict[str, Any]:
    """How argparse reads an option of this kind."""
    if isinstance(kind, OneOf):
        return {"choices": kind.words}
    if isinstance(kind, Whole):
        return {"type": _bytes, "metavar": "BYTES"} if kind.unit == " of bytes" else {"type": int, "metavar": "N"}
    arguments: dict[Kind, dict[str, Any]] = {
        SWITCH: {"action": "store_true"},
        MEMORY: {"type": _amount, "metavar": "BYTES|SHARE"},
        NUMBER: {"type": float, "metavar": "X"},
        FILE_NAME: {"metavar": "FILE"},
        LAYERS: {"type": _layers, "metavar": "N|auto"},
        ADDRESS: {"metavar": "ADDRESS"},
    }
    return arguments[kind]


def _amount(text: str) -> int | float:
    try:
        return memory_of(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _layers(text: str) -> int | str | None:
    """llama.cpp's words: `all` is the default here."""
    if text in ("auto", "all", "-1"):
        return None if text == "all" else "auto"
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of layers, wanted auto, all or a whole number")
    return int(text)


def _bytes(text: str) -> int:
    count = 0 if text == "0" else _amount(text)
    if isinstance(count, float):
        raise argparse.ArgumentTypeError(f"{text} is a share, wanted bytes such as 512MiB")
    return count
