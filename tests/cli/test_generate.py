"""`quarrel generate`: what goes to standard output, what to standard error, and what Ctrl-C leaves."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from quarrel.cli import main
from quarrel.cli.terminal import progress
from tests.cli.support import GREEDY, interrupt_after, typed
from tests.tiny_model import CHATML


def test_text_goes_to_stdout_and_speeds_to_stderr(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", base, "once", *GREEDY]) == 0
    streams = capsys.readouterr()
    assert len(streams.out) == 13
    assert streams.out.endswith("\n")
    assert "12 tokens at " in streams.err
    assert main(["generate", base, "once", *GREEDY, "--quiet"]) == 0
    assert capsys.readouterr() == (streams.out, "")


def test_streamed_whole_and_json_are_the_same_text(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["generate", base, "once", *GREEDY, "--seed", "5", "-q"]
    assert main(line) == 0
    text = capsys.readouterr().out[:-1]
    assert main([*line, "--no-stream"]) == 0
    assert capsys.readouterr().out[:-1] == text
    assert main([*line, "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["text"] == text
    assert (whole["finish_reason"], whole["seed"], whole["usage"]["completion_tokens"]) == ("length", 5, 12)
    assert len(whole["token_ids"]) == 12
    assert main([*line, "--json", "--stream"]) == 0
    *chunks, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert "".join(chunk["text"] for chunk in chunks) == last["result"]["text"] == text
    assert [chunk["token_id"] for chunk in chunks] == whole["token_ids"]


def test_samples_are_printed_one_after_the_other(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["generate", base, "once", "-n", "6", "--temp", "2", "--samples", "3", "--seed", "1", "-q"]
    assert main(line) == 0
    printed = capsys.readouterr().out
    assert main([*line, "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert printed.splitlines()[::2] == [r["text"] for r in (whole, *whole["alternatives"])]


def test_echo_stop_and_logprobs(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", base, "once", *GREEDY, "-q", "--echo"]) == 0
    text = capsys.readouterr().out.removeprefix("once").rstrip("\n")
    stop = text[4:6]
    assert main(["generate", base, "once", *GREEDY, "-q", "--json", "--stop", stop, "--logprobs", "2"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["text"] == text[: text.index(stop)]
    assert (whole["finish_reason"], whole["stopped_by"]) == ("stop", stop)
    assert [entry["token_id"] for entry in whole["logprobs"]] == whole["token_ids"]
    assert all(len(entry["top"]) == 2 for entry in whole["logprobs"])


def test_the_prompt_from_a_pipe_and_from_a_file_is_the_same(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = []
    for arguments in ((base, "once"), (base,), (base, "-f", str(tmp_path / "prompt.txt"))):
        (tmp_path / "prompt.txt").write_text("once")
        typed(monkeypatch, "once\n")
        assert main(["generate", *arguments, *GREEDY, "-q"]) == 0
        outputs.append(capsys.readouterr().out)
    assert len(set(outputs)) == 1


def test_chat_option_uses_the_template_and_a_file_may_replace_it(
    chatty: str, base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.jinja").write_text(CHATML)
    sizes = []
    for arguments in (
        [chatty, "hi"],
        [chatty, "hi", "--chat"],
        [base, "hi", "--chat-template", str(tmp_path / "own.jinja")],
        [base, "hi", "--chat-template", "chatml"],
        [chatty, "hi", "--system", "be kind"],
    ):
        assert main(["generate", *arguments, *GREEDY, "--json"]) == 0
        sizes.append(json.loads(capsys.readouterr().out)["usage"]["prompt_tokens"])
    raw, own, by_file, by_name, with_system = sizes
    assert raw < own == by_file == by_name < with_system


def test_bytes_that_are_no_text_do_not_crash(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", base, "caf\udce9", *GREEDY, "-q"]) == 0
    assert len(capsys.readouterr().out) == 13


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_ctrl_c_prints_what_was_generated_and_is_status_130(
    options: tuple[str, ...], base: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", base, "once", *GREEDY, "-q"]) == 0
    text = capsys.readouterr().out
    interrupt_after(monkeypatch, 3)
    assert main(["generate", base, "once", "--temp", "0", "-n", "400", "--backend", "cpu", *options]) == 130
    streams = capsys.readouterr()
    if options:
        whole = json.loads(streams.out)
        assert whole["finish_reason"] == "cancelled"
        assert whole["text"].startswith(text[:3])
    else:
        assert streams.out.startswith(text[:3])
        assert streams.out.endswith("\n")
        assert "cancelled" in streams.err


def test_a_bar_is_drawn_at_a_terminal_only() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, pipe = Terminal(), io.StringIO()
    with progress("loading", terminal) as bar:
        assert bar is not None
        bar(512 << 10, 1 << 20)
        bar(1 << 20, 1 << 20)
    assert "loading" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r"), "the line is wiped for the text that follows"
    with progress("loading", pipe) as bar:
        assert bar is None
    assert pipe.getvalue() == ""
