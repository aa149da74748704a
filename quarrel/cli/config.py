"""Defaults of options from a TOML file: for every command, for one command, and for one model.

    model = "mistral:7b"           # where none is named
    temperature = 0.7              # for every command that has the option

    [serve]                        # for one command
    port = 9000

    [models."mistral:7b"]          # for a model, by the name that is typed or that of its file
    system = "Be brief."

They are read as if they stood in front of what is typed, which so comes first.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from quarrel.errors import ConfigError

MAX_FILE = 1 << 20
Table = Mapping[str, Any]
_OWN = ("model", "models")


def config_path(given: str | None) -> Path | None:
    """The file: the one that is named, or the user's own where it exists."""
    if given is not None:
        return Path(os.path.expanduser(given))
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    path = Path(base) / "quarrel" / "config.toml"
    return path if path.is_file() else None


class Config:
    """A file's defaults. Raises ConfigError for what no command understands, and OSError."""

    def __init__(self, path: Path, commands: Mapping[str, argparse.ArgumentParser]) -> None:
        import tomllib  # only here: few have such a file

        with path.open("rb") as file:
            data = file.read(MAX_FILE + 1)
        if len(data) > MAX_FILE:
            raise ConfigError(f"{path} is larger than {MAX_FILE >> 20} MiB, which no configuration is")
        try:
            self._table: Table = tomllib.loads(data.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is no TOML: {error}") from None
        self.path, self._commands = path, commands
        self._check()

    @property
    def model(self) -> str | None:
        """What runs where no model is named."""
        found: str | None = self._table.get("model")
        return found

    def words(self, command: str, model: str) -> list[str]:
        """The options for a command with a model, as they would be typed, those of the model last."""
        plain = {name: value for name, value in self._table.items() if not isinstance(value, Mapping)}
        given: dict[str, Any] = {}
        for table in (plain, self._table.get(command, {}), *self._of_model(model)):
            given |= {name.replace("_", "-"): value for name, value in table.items() if name not in _OWN}
        actions = self._commands[command]._option_string_actions
        known = {name: value for name, value in given.items() if f"--{name}" in actions}
        return [word for name, value in known.items() for word in _typed(name, value, actions)]

    def _of_model(self, model: str) -> Iterator[Table]:
        names = (model, Path(model).name, Path(model).name.removesuffix(".gguf"))
        for name, table in self._table.get("models", {}).items():
            if name in names:
                yield table

    def _check(self) -> None:
        flags = {flag for parser in self._commands.values() for flag in parser._option_string_actions}
        for name, value in self._table.items():
            if name == "model":
                if not isinstance(value, str) or not value:
                    raise ConfigError(f"{self.path}: model is {value!r}, wanted the name of a model in quotes")
            elif name == "models":
                for model, table in value.items() if isinstance(value, Mapping) else [("", None)]:
                    if not isinstance(table, Mapping):
                        raise ConfigError(f'{self.path}: models holds {model!r}, wanted tables such as [models."{model}"]')
                    self._check_options(table, flags, f'[models."{model}"]')
            elif isinstance(value, Mapping):
                if name not in self._commands:
                    raise ConfigError(f"{self.path}: there is no command {name!r}{_near(name, self._commands)}")
                self._check_options(value, self._commands[name]._option_string_actions, f"[{name}]")
            else:
                self._check_options({name: value}, flags, "the file")

    def _check_options(self, table: Table, flags: Collection[str], where: str) -> None:
        for name, value in table.items():
            flag = f"--{name.replace('_', '-')}"
            if flag not in flags or flag in ("--config", "--help"):
                known = [known.removeprefix("--") for known in flags if known.startswith("--")]
                raise ConfigError(f"{self.path}: {where} has {name!r}, which is no option{_near(name, known)}")
            values = value if isinstance(value, list) else [value]
            if not all(isinstance(one, str | int | float) for one in values):
                raise ConfigError(f"{self.path}: {name} in {where} is {value!r}, wanted a text, a number, true or false")


def _typed(name: str, value: Any, actions: Mapping[str, argparse.Action]) -> list[str]:
    flag, action = f"--{name}", actions[f"--{name}"]
    if isinstance(value, bool):
        if isinstance(action, argparse.BooleanOptionalAction):
            return [flag if value else f"--no-{name}"]
        if action.nargs == 0:
            return [flag] if value else []
    return [f"{flag}={one}" for one in (value if isinstance(value, list) else [value])]


def _near(name: str, known: Collection[str]) -> str:
    found = get_close_matches(name.replace("_", "-"), list(known), 1)
    return f"; perhaps {found[0]!r} is meant" if found else ""
