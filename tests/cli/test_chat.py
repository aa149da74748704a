"""`quarrel chat`: at a keyboard and in a pipe."""

from __future__ import annotations

import builtins
import dataclasses
import json
import mimetypes
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from quarrel.cli import main
from quarrel.cli.conversation import Conversation
from quarrel.cli.editor import Lines
from quarrel.engine import Result, Timings, Usage
from quarrel.llm import LLM
from tests.cli.support import GREEDY, interrupt_after, typed
from tests.sight import EYES
from tests.slowly import step_slowly
from tools.eyes.pictures import Scene, drawn


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
    step_slowly(monkeypatch)
    keyboard(monkeypatch, "one", "two")
    assert main(["chat", chatty, "--temp", "0", "-n", "150", "--backend", "cpu"]) == 0
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
    assert main(["chat", chatty, "--temp", "0", "-n", "150", "--backend", "cpu"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert 4 <= len(first) < 150
    assert len(second) == 150
    assert [m["role"] for m in seen[1]] == ["user", "assistant", "user"]
    assert seen[1][1]["content"] == first, "what was said before Ctrl-C is part of the conversation"


def drawn_at_will(monkeypatch: pytest.MonkeyPatch, *answers: str) -> None:
    """Answers of the model, one after the other, whatever it was given."""
    rest = iter(answers)
    real = Conversation._one

    def answer(self: Conversation, messages: list[dict[str, object]], reader: Any) -> object:
        result, stopped = real(self, messages, reader)
        return dataclasses.replace(result, text=next(rest)), stopped

    monkeypatch.setattr(Conversation, "_one", answer)


def test_answers_again_and_questions_changed(chatty: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = asked(monkeypatch)
    drawn_at_will(monkeypatch, "A", "B", "C", "D", "E")
    saved = tmp_path / "talk.json"
    keyboard(monkeypatch, "/regen", "/edit", "one", "two", "/regen", "/edit other", "/edit " + "x" * 300, f"/save {saved}")
    assert main(["chat", chatty, *GREEDY, "--ctx", "256", "--seed", "3"]) == 0
    assert [[m["content"] for m in messages] for messages in seen] == [
        ["one"],
        ["one", "A", "two"],
        ["one", "A", "two"],
        ["one", "A", "other"],
        ["one", "A", "x" * 300],
    ]
    assert [m["content"] for m in json.loads(saved.read_text())] == ["one", "A", "other", "D"], "what failed is not kept"


def test_edit_alone_puts_the_question_on_the_line(chatty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, given = asked(monkeypatch), []
    read = Lines.read

    def remember(self: Lines, prompt: str, text: str = "") -> str:
        given.append(text)
        return read(self, prompt, text)

    monkeypatch.setattr(Lines, "read", remember)
    keyboard(monkeypatch, "one", "/edit", "changed")
    assert main(["chat", chatty, *GREEDY]) == 0
    assert given == ["", "", "one", ""]
    assert [[m["content"] for m in messages] for messages in seen] == [["one"], ["changed"]]


def test_sampling_is_set_on_the_way(
    chatty: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[dict[str, Any]] = []
    real: Callable[..., object] = LLM.chat

    def chat(self: LLM, messages: object, *args: object, **kwargs: object) -> object:
        seen.append(dict(kwargs))
        return real(self, messages, *args, **kwargs)

    monkeypatch.setattr(LLM, "chat", chat)
    keyboard(
        monkeypatch, "/set", "/set temp 0.5", "/set -n 3", "/set stop x", "/set stop y", "/set ignore_eos on", "one",
        "/set temperature", "/set max_tokens", "/set stop", "/set ignore-eos", "two", "/set warmth 3", "/set top_k many",
        "/set top_p 3", "/set ignore_eos perhaps", "/set logit_bias 3=1", "/set logit_bias 4=-1", "three",
    )  # fmt: skip
    assert main(["chat", chatty, *GREEDY]) == 0
    names = ("temperature", "max_tokens", "stop", "ignore_eos", "logit_bias")
    first, second, third = ({name: kwargs[name] for name in names if name in kwargs} for kwargs in seen)
    assert first == {"temperature": 0.5, "max_tokens": 3, "stop": ["x", "y"], "ignore_eos": True}
    assert second == {"temperature": 0.0, "max_tokens": 12}, "as the command line has them"
    assert third == {**second, "logit_bias": {3: 1.0, 4: -1.0}}
    said = capsys.readouterr().err
    for sentence in (
        "there is no option 'warmth', wanted one of max_tokens", "top_k is 'many', wanted a whole number",
        "is 3.0, wanted", "ignore_eos is 'perhaps', wanted on or off",
    ):  # fmt: skip
        assert sentence in said


def test_a_conversation_is_loaded_and_another_model_goes_on_with_it(
    chatty: str, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = asked(monkeypatch)
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    texts = {"talk": json.dumps(talk), "broken": "{", "other": '{"a": 1}', "role": '[{"role": "x", "content": ""}]'}
    texts["late"] = json.dumps([talk[1], talk[0]])
    texts |= {
        f"part{i}": json.dumps([{"role": "user", "content": [p]}]) for i, p in enumerate(({}, {"type": 5}, {"text": "a"}))
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    wrong = [f"/load {tmp_path}/{name}" for name in ("broken", "other", "role", "late", "none", "part0", "part1", "part2")]
    models = ["/model", "/model nowhere.gguf", f"/model {base}", f"/model {chatty}"]
    keyboard(monkeypatch, f"/load {tmp_path}/talk", *wrong, *models, "next")
    assert main(["chat", chatty, *GREEDY]) == 0
    assert [[m["content"] for m in messages] for messages in seen] == [["s", "q", "a", "next"]]
    said = capsys.readouterr().err
    for sentence in ("is no JSON", "holds no messages", "behind its beginning", "none: No such file", "wants the name",
                     "'nowhere.gguf' was found", "has no chat template"):  # fmt: skip
        assert sentence in said, sentence
    assert said.count("holds no messages") == 5, "a part without a type could be neither saved nor edited"
    assert said.count("tokens of context") == 2, "each model that talks says so"


def test_a_picture_goes_with_the_next_question(
    chatty: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.png").write_text("<svg/>")
    picture = tmp_path / "cat.png"
    picture.write_bytes(b"\x89PNG")
    seen = asked(monkeypatch)
    keyboard(monkeypatch, f"/image {picture}")
    assert main(["chat", chatty, *GREEDY]) == 0
    assert "this model has no eyes" in capsys.readouterr().err
    answer = Result("a cat", (), "stop", Usage(1, 1), Timings(0, 0, 0, 0, 0, 0), 1)

    def answered(self: Conversation, messages: list[dict[str, Any]], reader: object) -> tuple[Result, bool]:
        seen.append(list(messages))
        return answer, False

    monkeypatch.setattr(Conversation, "_one", answered)
    monkeypatch.setattr(LLM, "sees", True)
    keyboard(
        monkeypatch,
        "/image",
        f"/image {tmp_path / 'x.png'}",
        "/image /no.png",
        f"/image {picture}",
        "what is it?",
        "and now?",
    )
    assert main(["chat", chatty, *GREEDY]) == 0
    said = capsys.readouterr().err
    for sentence in ("/image wants a file", "no picture by its first bytes", "No such file", "goes with the next question"):
        assert sentence in said
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw=="}}
    assert seen[0][0]["content"] == [{"type": "text", "text": "what is it?"}, part]
    assert seen[1][-1]["content"] == "and now?"


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_a_model_with_eyes_is_shown_pictures_and_a_broken_one_is_left_behind(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mimetypes, "guess_type", lambda name: (None, None))  # as where a system lists no kinds
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    drawn(Scene("seven", "red", "white"), Random(5)).save(whole, form)
    broken.write_bytes(whole.read_bytes()[: len(whole.read_bytes()) // 3])
    model = str(EYES / "trained" / "model.gguf")
    keyboard(monkeypatch, f"/image {broken}", "What?", f"/image {whole}", "What do you see?")
    assert main(["chat", model, *GREEDY, "-n", "16"]) == 0
    out, said = capsys.readouterr()
    assert "A red seven on white." in out
    assert said.count("quarrel: an image is") == 1
    assert main(["chat", model, "-p", "What do you see?", "--image", str(whole), *GREEDY, "-n", "16"]) == 0
    assert "A red seven on white." in capsys.readouterr().out


@pytest.mark.parametrize(("policy", "done"), [("shift", "left out"), ("summary", "summed up")])
def test_a_long_conversation_goes_on(
    policy: str, done: str, chatty: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keyboard(monkeypatch, *("x" * 80 for _ in range(3)))
    assert main(["chat", chatty, *GREEDY, "--ctx", "256", "--overflow", policy]) == 0
    assert f"messages were {done}; /reset begins anew" in capsys.readouterr().err
    keyboard(monkeypatch, *("x" * 80 for _ in range(3)))
    assert main(["chat", chatty, *GREEDY, "--ctx", "256", "--overflow", "stop"]) == 0
    assert "/reset forgets the conversation" in capsys.readouterr().err
