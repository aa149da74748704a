"""How answers look while they come, and how messages are typed, in a terminal with prompt_toolkit and rich."""

from __future__ import annotations

import io
import stat
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

from quarrel.cli import display
from quarrel.cli.display import Markdown, Plain, display_of, with_progress
from quarrel.cli.editor import Toolkit, _completer, read_message
from quarrel.cli.slash import COMMANDS
from quarrel.engine import Chunk, Stream


def stream_of(chunks: Iterable[Chunk], prompt_tokens: int = 7) -> Stream:
    class Told(Iterator[Chunk]):
        def __init__(self) -> None:
            self._rest, self.prompt_tokens = iter(chunks), prompt_tokens

        def __next__(self) -> Chunk:
            return next(self._rest)

    return cast("Stream", Told())


def shown(text: str, size: int = 3, width: int = 60) -> str:
    """What a terminal gets of a text that comes in pieces."""
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=12, color_system=None)
    pieces = [Chunk(text[i : i + size]) for i in range(0, len(text), size)]
    Markdown(console).show(stream_of(pieces))
    return cast("io.StringIO", console.file).getvalue()


def lasting(text: str) -> str:
    """What stays on the screen: Live has taken away what it drew, in front of its last line of erasures."""
    return text.rpartition("\x1b[2K")[2]


def test_markdown_is_drawn_once_a_block_is_complete() -> None:
    text = "# Head\n\nSome **bold** words.\n\n```python\nprint(1)\n\nprint(2)\n```\n\n1. one\n2. two\n\nlast"
    drawn = shown(text)
    for raw in ("**bold** words.\n\n", "```"):
        assert raw not in lasting(drawn)
    assert drawn.count("Some bold words.") == 1, "each block is printed once"
    assert drawn.index("Some bold words.") < drawn.index("print(2)") < drawn.index(" 2 two") < drawn.rindex("last")


def test_a_code_block_that_is_not_closed_stays_whole() -> None:
    code = "```\n" + "\n\n".join(f"line {i}" for i in range(40))
    drawn = shown(code, size=11)
    assert [i for i in range(40) if f"line {i} " not in lasting(drawn)] == []


def test_a_model_cannot_drive_the_terminal_nor_hide_an_address() -> None:
    drawn = shown("a \x1b[31mred\x07 [click](http://evil.example/x) \u2028 end\n\nmore [/] [bold]x[/bold]")
    assert "\x1b[31m" not in drawn
    assert "\x07" not in drawn
    assert "http://evil.example/x" in drawn
    assert "[bold]x[/bold]" in drawn, "rich's own markup is none of an answer's"


def test_markdown_is_for_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(display_of(False), Plain), "standard output is no terminal here"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(display_of(False), Markdown)
    assert isinstance(display_of(True), Plain)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert isinstance(display_of(False), Plain), "without rich"


class Screen(io.StringIO):
    """A terminal; `wrote` is set by the first thing on it."""

    def __init__(self) -> None:
        super().__init__()
        self.wrote = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        found = super().write(text)
        self.wrote.set()
        return found


def test_a_prompt_that_takes_long_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(display, "PATIENCE", 0.0)

    def chunks() -> Iterator[Chunk]:
        assert screen.wrote.wait(60)
        yield Chunk("", read=4096)
        yield Chunk("", read=8192)
        yield Chunk("Hello")

    assert [chunk.text for chunk in with_progress(stream_of(chunks(), 12000))] == ["Hello"]
    lines = [part.removeprefix("\x1b[K") for part in screen.getvalue().split("\r")]
    assert lines == ["", *(f"reading the prompt: {n} of 12,000 tokens" for n in ("0", "4,096", "8,192")), ""]


def test_a_quick_prompt_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(display, "PATIENCE", 300.0)
    assert len(list(with_progress(stream_of([Chunk("", read=1), Chunk("a")])))) == 1
    assert screen.getvalue() == ""


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("hello\r", "hello"),
        ("one\x1b\rtwo\r", "one\ntwo"),
        ("\x1b[200~pasted\nlines\x1b[201~\r", "pasted\nlines"),
        ('"""\rx\ry"""\r', "x\ny"),
        ("before\r", "before"),
    ],
)
def test_a_message_may_have_several_lines(keys: str, message: str, tmp_path: Path) -> None:
    with create_pipe_input() as pipe:
        pipe.send_text(keys)
        keyboard = Toolkit(COMMANDS, tmp_path / "history", input=pipe, output=DummyOutput())
        assert read_message(keyboard) == message


def test_the_last_question_can_be_changed_and_messages_are_remembered(tmp_path: Path) -> None:
    with create_pipe_input() as pipe:
        keyboard = Toolkit(COMMANDS, tmp_path / "history", input=pipe, output=DummyOutput())
        pipe.send_text("!\r")
        assert keyboard.read(">>> ", "Why") == "Why!"
    with create_pipe_input() as pipe:
        keyboard = Toolkit(COMMANDS, tmp_path / "history", input=pipe, output=DummyOutput())
        pipe.send_text("\x1b[A\r")
        assert keyboard.read(">>> ") == "Why!"


def test_the_history_is_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    from quarrel.cli.editor import _own_file

    path = _own_file("chat_messages")
    assert path is not None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    assert _own_file("chat_messages") is None


def completions(text: str) -> list[str]:
    found: Any = _completer(COMMANDS).get_completions(Document(text), None)
    return [text[: len(text) + c.start_position] + c.text for c in found]


def test_commands_and_paths_are_completed(tmp_path: Path) -> None:
    (tmp_path / "talk.json").touch()
    assert completions("/re") == ["/regen", "/reset"]
    assert completions("re") == []
    assert completions(f"/load {tmp_path}/ta") == [f"/load {tmp_path}/talk.json"]
    assert completions(f"/system {tmp_path}/ta") == []
