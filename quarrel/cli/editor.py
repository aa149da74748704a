"""How a person types a message: with prompt_toolkit where it is there, else with the terminal's own means."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from quarrel.cli.prompt import as_unicode

PROMPT, MORE = ">>> ", "... "
FENCE = '"""'
REMEMBERED = 1000


class Editor(Protocol):
    """Reads lines. Raises EOFError after Ctrl-D and KeyboardInterrupt after Ctrl-C."""

    def read(self, prompt: str, text: str = "") -> str:
        """What is typed; `text` stands there already, to be changed."""


def read_message(editor: Editor, text: str = "") -> str:
    """One message: what is sent at once, or several lines between two fences."""
    first = editor.read(PROMPT, text)
    if not first.startswith(FENCE):
        return as_unicode(first.strip())
    lines = [first.removeprefix(FENCE)]
    while not lines[-1].endswith(FENCE):
        lines.append(editor.read(MORE))
    lines[-1] = lines[-1].removesuffix(FENCE)
    return as_unicode("\n".join(lines).strip())


@contextmanager
def editor(plain: bool, commands: Sequence[str]) -> Iterator[Editor]:
    """The best there is. commands: words that begin with a slash, to be completed."""
    if not plain and sys.stdout.isatty():
        try:
            yield Toolkit(commands, _own_file("chat_messages"))
            return
        except ImportError:
            pass
    with _line_editing() as readline:
        yield Lines(readline)


class Lines:
    """Python's `input`, with arrow keys and a history where it has readline."""

    def __init__(self, readline: ModuleType | None) -> None:
        self._readline = readline

    def read(self, prompt: str, text: str = "") -> str:
        if text and self._readline is not None:
            self._readline.set_startup_hook(lambda: self._readline and self._readline.insert_text(text))
        try:
            # input() writes its prompt to standard output, which may be a file that answers go to.
            if sys.stdout.isatty():
                return input(prompt)
            sys.stderr.write(prompt)
            sys.stderr.flush()
            return input()
        finally:
            if text and self._readline is not None:
                self._readline.set_startup_hook(None)


class Toolkit:
    """prompt_toolkit: several lines (Alt-Enter begins another one, as a paste may), a history, completion of commands."""

    def __init__(self, commands: Sequence[str], history: Path | None, **streams: Any) -> None:
        """history: a file; None remembers nothing behind the end. streams: `input` and `output` for a test."""
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import FileHistory, InMemoryHistory
        from prompt_toolkit.key_binding import KeyBindings

        keys: Any = KeyBindings()

        keys.add("enter")(lambda event: event.current_buffer.validate_and_handle())
        keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))

        self._session: Any = PromptSession(
            history=InMemoryHistory() if history is None else FileHistory(str(history)),
            completer=_completer(commands),
            complete_while_typing=True,
            key_bindings=keys,
            multiline=True,
            prompt_continuation=MORE,
            enable_open_in_editor=True,
            reserve_space_for_menu=4,
            **streams,
        )

    def read(self, prompt: str, text: str = "") -> str:
        found: str = self._session.prompt(prompt, default=text)
        return found


def _completer(commands: Sequence[str]) -> Any:
    from prompt_toolkit.completion import Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    class Commands(Completer):  # type: ignore[misc]
        """A command as the first word, and a path behind those that take one."""

        def get_completions(self, document: Any, event: Any) -> Iterator[Any]:
            text = document.text_before_cursor
            if not text.startswith("/"):
                return
            command, space, rest = text.partition(" ")
            if not space:
                for name in commands:
                    if name.startswith(command):
                        yield Completion(name, -len(command))
            elif command in ("/save", "/load", "/image", "/model"):
                yield from PathCompleter(expanduser=True).get_completions(Document(rest), event)

    return Commands()


@contextmanager
def _line_editing() -> Iterator[ModuleType | None]:
    """Arrow keys and a history that lasts, where Python has readline."""
    try:
        import readline
    except ImportError:
        yield None
        return
    path = _own_file("chat_history")
    if path is None:
        yield readline
        return
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    try:
        yield readline
    finally:
        with contextlib.suppress(OSError):
            readline.set_history_length(REMEMBERED)
            readline.write_history_file(path)


def _own_file(name: str) -> Path | None:
    """A file that only the user may read; None where it cannot be written, which is no error."""
    base = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    path = base / "quarrel" / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(0o600)
        path.chmod(0o600)
        path.open("ab").close()
    except (OSError, RuntimeError):
        return None
    return path
