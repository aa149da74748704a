"""`quarrel chat`: at a keyboard and in a pipe."""

from __future__ import annotations

import builtins
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quarrel.cli import main
from quarrel.llm import LLM
from tests.cli.support import GREEDY, SLOW, draw_slowly, interrupt_after, typed


def keyboard(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    """A person at a terminal who types these lines, then Ctrl-D."""
    typed(monkeypatch, "")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    rest: Iterator[str | type[BaseException]] = iter(lines)

    def read(prompt: str = "") -> str:
        got = next(rest, EOFError)
        if isinstance(got, str):
            return got
        raise got

    monkeypatch.setattr(builtins, "input", read)


def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, str]]]:
    """The messages of every request that follows."""
    seen: list[list[dict[str, str]]] = []
    real: Callable[..., object] = LLM.chat

    def chat(self: LLM, messages: list[dict[str, str]], *args: object, **kwargs: object) -> object:
        seen.append(list(messages))
        return real(self, messages, *args, **kwargs)

    monkeypatch.setattr(LLM, "chat", chat)
    return seen


def test_lines_of_a_pipe_are_a_conversation(
    chatty: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = asked(monkeypatch)
    typed(monkeypatch, "hello\n\nand then\n")
    assert main(["chat", chatty, *GREEDY, "--json", "--system", "be brief"]) == 0
    answers = [json.loads(line)["content"] for line in capsys.readouterr().out.splitlines()]
    assert [[m["content"] for m in messages] for messages in seen] == [
        ["be brief", "hello"],
        ["be brief", "hello", answers[0], "and then"],
    ]


def test_one_question_by_option(chatty: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "-m", chatty, *GREEDY, "-p", "hello"]) == 0
    streams = capsys.readouterr()
    assert len(streams.out) == 13
    assert "12 tokens" in streams.err


def test_a_conversation_at_the_keyboard(
    chatty: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = asked(monkeypatch)
    saved = [tmp_path / "talk.json", tmp_path / "talk.md"]
    keyboard(
        monkeypatch,
        "/help",
        "/nonsense",
        "/system be kind",
        "one",
        '"""two',
        'lines"""',
        KeyboardInterrupt,
        f"/save {saved[0]}",
        f"/save {saved[1]}",
        f"/save {tmp_path}/no/such/folder",
        "/reset",
        "/system",
        "",
        "three",
        "/exit",
        "never asked",
    )
    assert main(["chat", chatty, *GREEDY]) == 0
    said = capsys.readouterr().err
    assert [[m["content"] for m in messages if m["role"] != "assistant"] for messages in seen] == [
        ["be kind", "one"],
        ["be kind", "one", "two\nlines"],
        ["three"],
    ]
    for part in ("/reset", "'/nonsense' is no command", "Ctrl-D or /exit", "No such file", "(forgotten)", "12 tokens"):
        assert part in said
    kept = json.loads(saved[0].read_text())
    assert [m["role"] for m in kept] == ["system", "user", "assistant", "user", "assistant"]
    assert "**user**\n\ntwo\nlines\n" in saved[1].read_text()


def test_a_conversation_that_outgrows_its_context_goes_on_after_reset(
    chatty: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = asked(monkeypatch)
    keyboard(monkeypatch, "x" * 300, "short", "/reset", "short")
    assert main(["chat", chatty, *GREEDY, "--ctx", "256"]) == 0
    assert "/reset forgets" in capsys.readouterr().err
    assert [len(messages) for messages in seen] == [1, 1, 1], "a question that was refused is not kept"


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_before_the_first_token_ends_only_the_answer(
    presses: int, chatty: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real: Callable[..., object] = LLM.chat
    asked: list[list[str]] = []

    def chat(self: LLM, messages: list[dict[str, str]], *args: object, **kwargs: object) -> object:
        asked.append([m["content"] for m in messages])
        for _ in range(presses if len(asked) == 1 else 0):  # while the template and the tokenizer load
            signal.raise_signal(signal.SIGINT)
        return real(self, messages, *args, **kwargs)

    monkeypatch.setattr(LLM, "chat", chat)
    draw_slowly(monkeypatch)
    keyboard(monkeypatch, "one", "two")
    assert main(["chat", chatty, "--temp", "0", "-n", "150", "--backend", "cpu", *SLOW]) == 0
    *stopped, answer = capsys.readouterr().out.splitlines()
    said = "".join(stopped)
    assert len(said) < 150 == len(answer)
    assert asked == [["one"], ["one", said, "two"] if said else ["two"]], "a question without any answer is not kept"


def test_ctrl_c_ends_an_answer_and_not_the_conversation(
    chatty: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = asked(monkeypatch)
    keyboard(monkeypatch, "one", "two")
    interrupt_after(monkeypatch, 4)
    assert main(["chat", chatty, "--temp", "0", "-n", "150", "--backend", "cpu", *SLOW]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert 4 <= len(first) < 150
    assert len(second) == 150
    assert [m["role"] for m in seen[1]] == ["user", "assistant", "user"]
    assert seen[1][1]["content"] == first, "what was said before Ctrl-C is part of the conversation"
