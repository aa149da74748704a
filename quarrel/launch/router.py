"""`quarrel llama-server` of several models: those of a folder and of a preset file, loaded when a request names them."""

from __future__ import annotations

import configparser
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from quarrel.errors import ConfigError
from quarrel.launch.arguments import SWITCHES, Arguments, parse
from quarrel.launch.early import Early
from quarrel.launch.main import (
    _listening,
    _load,
    hosts_of,
    load_options,
    port_of,
    settings_of,
    source_of,
    template_of,
    tools_of,
)
from quarrel.llm import LLM, Model
from quarrel.server import serve
from quarrel.server.listening import bound
from quarrel.server.llama.app import build

MODELS_MAX = 4
"""That are loaded at once, as llama-server has it."""


def route(args: Arguments, words: Sequence[str]) -> int:
    """Until a signal; status 0."""
    offer = Presets(args, words)
    names = offer.read()
    first, *others = (bound(host, port_of(args)) for host in hosts_of(args))
    most = args.number("models_max")
    more = {"models_max": MODELS_MAX if most is None else max(most, 0), "autoload": "no_autoload" not in args.switches}
    early = Early(first)
    early.start()
    template, seqs = template_of(args), load_options(args).max_seqs
    settings = settings_of(args, first, template, names, seqs, router=True, **more)
    with tools_of(args) as tools:
        server = build(settings, None, offer.load, offer.read, tools)
        early.loaded()
        _listening(first)
        serve(server, settings, preload=False, before=early, beside=others)
    return 0


class Presets:
    """What the folder and the preset file hold, by name: each as the arguments that it is loaded with."""

    def __init__(self, args: Arguments, words: Sequence[str]) -> None:
        self._args, self._words = args, [*words]
        self._found: Mapping[str, Arguments] = {}

    def read(self) -> tuple[str, ...]:
        """The names, read anew. Raises ConfigError for a file that is none."""
        folder, preset = self._args.text("models_dir"), self._args.text("models_preset")
        found = {name: self._with(more) for name, more in ([] if folder is None else _in_folder(Path(folder)))}
        if preset is not None:
            found |= {name: self._with(more) for name, more in _in_file(Path(preset))}
        self._found = found
        return tuple(found)

    def arguments(self, name: str) -> Arguments:
        """With which the model of that name is loaded."""
        return self._found[name]

    def load(self, source: str) -> Model:
        """The model of that name."""
        args = self._found[source]
        model = source_of(args)
        if model is None:
            raise ConfigError(f"the preset {source} names no model: wanted `model = FILE` or `hf-repo = OWNER/NAME`")
        made: LLM = _load(args, model, load_options(args))
        return made

    def _with(self, more: Sequence[str]) -> Arguments:
        return parse([*self._words, *more], os.environ)


def _in_folder(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Files, the first ones of split models, and folders of one model with what it sees by."""
    if not folder.is_dir():
        raise ConfigError(f"--models-dir {folder}: there is no such folder")
    for path in sorted(folder.iterdir()):
        files = sorted(path.glob("*.gguf")) if path.is_dir() else [path] if path.suffix == ".gguf" else []
        eyes = [file for file in files if file.name.startswith("mmproj")]
        models = [file for file in files if file not in eyes]
        if models:
            name = path.name.removesuffix(".gguf")
            yield name, ["--model", str(models[0]), *(["--mmproj", str(eyes[0])] if eyes else [])]


def _in_file(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Sections of `option = value`; those of `[*]` hold for all."""
    reader = configparser.ConfigParser(
        default_section="*", interpolation=None, delimiters=("=",), comment_prefixes=("#", ";")
    )
    reader.optionxform = str  # type: ignore[assignment,method-assign]
    try:
        reader.read_string(_headed(path.read_text("utf-8")))
    except (OSError, UnicodeDecodeError, configparser.Error) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise ConfigError(f"--models-preset {path}: {reason}") from error
    for name in reader.sections():
        words: list[str] = []
        for option, value in reader[name].items():
            words += _words(option, value.strip())
        yield name, words


def _headed(text: str) -> str:
    """What stands before the first section, such as a version, belongs to none."""
    return text[text.find("[") :] if "[" in text else ""


def _words(option: str, value: str) -> list[str]:
    flag = option if option.startswith(("-", "LLAMA_ARG_")) else f"--{option}"
    if flag in SWITCHES:
        return [flag] if value.lower() not in ("", "0", "off", "false") else []
    return [flag, value]
