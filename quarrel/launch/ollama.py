"""Ollama's engine: which one is linked in, ours in its place, and the old one back again."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from quarrel import __version__
from quarrel.errors import ConfigError
from quarrel.launch.old import SUFFIX

NAME = "llama-server"
MARK = "# Quarrel in the place of Ollama's engine"
LIBRARIES = (
    Path("/usr/lib/ollama"),
    Path("/usr/local/lib/ollama"),
    Path("/opt/ollama/lib/ollama"),
    Path("/opt/homebrew/opt/ollama/libexec/lib/ollama"),
    Path("/Applications/Ollama.app/Contents/Resources"),
)
"""Where packages and the install script put them."""
_VERSION_SECONDS = 20.0


@dataclass(frozen=True)
class Linked:
    """What lies where Ollama looks for its engine."""

    folder: Path

    @property
    def engine(self) -> Path:
        return self.folder / NAME

    @property
    def old(self) -> Path:
        return self.folder / (NAME + SUFFIX)

    @property
    def ours(self) -> bool:
        """Whether that is Quarrel, of whichever version."""
        try:
            with self.engine.open("rb") as file:
                return MARK.encode() in file.read(512)
        except OSError:
            return False


def find_libraries(given: str | None) -> Linked:
    """The folder of the program `ollama`, as it looks for it itself; given: named by the user. Raises ConfigError."""
    if given is not None:
        folder = Path(given).expanduser()
        if not any((folder / name).exists() for name in (NAME, NAME + SUFFIX)):
            raise ConfigError(f"{folder} holds no {NAME}, wanted Ollama's folder of libraries, such as /usr/lib/ollama")
        return Linked(folder)
    candidates = _candidates()
    for folder in candidates:
        if (folder / NAME).exists() or (folder / (NAME + SUFFIX)).exists():
            return Linked(folder)
    looked = ", ".join(map(str, candidates))
    raise ConfigError(
        f"there is no {NAME} of Ollama's in {looked}: name its folder by --libraries, or install Ollama 0.33 or later"
    )


def _candidates() -> list[Path]:
    """Beside the program, then where packages put them."""
    found = []
    program = shutil.which("ollama")
    if program is not None:
        home = Path(os.path.realpath(program)).parent
        found += [home / ".." / "lib" / "ollama", home / "lib" / "ollama", home]
    return list(dict.fromkeys(Path(os.path.normpath(folder)) for folder in (*found, *LIBRARIES)))


def version_of(engine: Path) -> str:
    """What it says of itself; nothing where it says nothing."""
    try:
        found = subprocess.run([engine, "--version"], capture_output=True, text=True, timeout=_VERSION_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    match = re.search(r"version:\s*(.+)", found.stderr + found.stdout)
    return match[1].strip() if match else ""


def status(linked: Linked) -> list[str]:
    """Lines for a terminal."""
    lines = [f"folder    {linked.folder}"]
    if not linked.engine.exists():
        lines.append("engine    none: Ollama cannot run models; `quarrel ollama restore` puts the old one back")
    elif linked.ours:
        lines.append(f"engine    Quarrel ({version_of(linked.engine) or 'it does not start: link it in again'})")
    else:
        lines.append(f"engine    Ollama's own ({version_of(linked.engine) or 'of an unknown version'})")
    if linked.old.exists():
        lines.append(f"kept      {linked.old.name} ({version_of(linked.old) or 'of an unknown version'})")
    return lines


def use(linked: Linked) -> list[str]:
    """Puts ours in place; the old engine stays beside it. Raises ConfigError where that may not be written."""
    with _writing(linked.folder, "use"):
        if not linked.ours and linked.engine.exists():
            os.replace(linked.engine, linked.old)  # a newer one of Ollama's, where it was updated since
        beside = linked.folder / f".{NAME}.quarrel"
        beside.write_text(script(linked), "utf-8")
        beside.chmod(0o755)
        os.replace(beside, linked.engine)
    made = version_of(linked.engine)
    if not made:
        restore(linked)
        message = f"{linked.engine} does not start, so that the old one is back: may Ollama's user read {sys.prefix}?"
        raise ConfigError(message)
    return [f"{linked.engine} is now Quarrel ({made})", f"{linked.old.name} takes what it cannot load", _RESTART]


def restore(linked: Linked) -> list[str]:
    """Puts the old engine back. Raises ConfigError where there is none, or that may not be written."""
    if not linked.ours and linked.engine.exists():
        return [f"{linked.engine} is Ollama's own already"]
    if not linked.old.exists():
        raise ConfigError(f"{linked.old} is not there to be put back: install Ollama again, which brings its engine")
    with _writing(linked.folder, "restore"):
        os.replace(linked.old, linked.engine)
    return [f"{linked.engine} is Ollama's own again", _RESTART]


_RESTART = "models that run already keep their engine: `ollama stop MODEL`, or start Ollama again"
ACTIONS: dict[str, Callable[[Linked], Iterable[str]]] = {"status": status, "use": use, "restore": restore}


def script(linked: Linked) -> str:
    """Starts this Quarrel with Ollama's words. Its libraries are not for us, so that their path is only handed on."""
    package = Path(__file__).resolve().parents[2]
    there = any(part in ("site-packages", "dist-packages") for part in package.parts)
    lines = [
        "#!/bin/sh",
        f"{MARK} (version {__version__}); `quarrel ollama restore` puts the old one back.",
        f'libraries="${_PATH}"',
        f"unset {_PATH}",
        *([] if there else [f"export PYTHONPATH={shlex.quote(str(package))}"]),
        f"exec {shlex.quote(sys.executable)} -m quarrel.launch --old-engine {shlex.quote(str(linked.old))} \\",
        '  --old-library-path "$libraries" "$@"',
    ]
    return "\n".join(lines) + "\n"


_PATH = "DYLD_LIBRARY_PATH" if sys.platform == "darwin" else "LD_LIBRARY_PATH"


class _writing:
    """Says who may write there."""

    def __init__(self, folder: Path, action: str) -> None:
        self._folder, self._action = folder, action

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, PermissionError):
            with suppress(OSError):
                (self._folder / f".{NAME}.quarrel").unlink()
            quarrel = shutil.which("quarrel") or f"{sys.executable} -m quarrel"
            message = f"{self._folder} may not be written by this user: sudo {quarrel} ollama {self._action}"
            raise ConfigError(message) from error
        if isinstance(error, OSError):
            raise ConfigError(f"{self._folder}: {error.strerror or error}") from error
