"""The command line in a process of its own: pipes, signals and terminals."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from quarrel.__main__ import start
from tests.cli.support import ROOT, spawn


def test_module_version_and_help() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "quarrel", "--version"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.startswith("quarrel 0.")
    process = spawn("generate", "--help")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"--temperature" in out


def test_help_and_version_load_no_numpy() -> None:
    code = "import sys; from quarrel.cli import main; main([sys.argv[1]]); sys.exit('numpy' in sys.modules)"
    for word in ("--help", "--version"):
        assert (
            subprocess.run([sys.executable, "-c", code, word], capture_output=True, cwd=ROOT, check=False).returncode == 0
        )


def test_a_first_word_imports_nothing_that_it_does_not_need() -> None:
    code = """
import sys
from quarrel.cli import main
main(["generate", "demo", "Once upon", "--max-tokens", "1", "--quiet", "--backend", "cpu"])
late = ("asyncio", "jinja2", "subprocess", "tokenizers", "tomllib", "quarrel.llm.images", "quarrel.parallel")
late += ("quarrel.gguf.download", "quarrel.gguf.ollama", "quarrel.gguf.requantize", "quarrel.tokenizer.renderer")
print()
print([name for name in late if name in sys.modules])
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert found.stdout.split("\n")[-2] == "[]", found.stdout


def test_a_closed_pipe_ends_quietly(base: str) -> None:
    # Log probabilities make more than the 64 KB that a pipe holds, so the program still writes when it is closed.
    lines = ("--json", "--stream", "--logprobs", "20")
    process = spawn("generate", base, "once", "--ignore-eos", "-n", "400", "-q", *lines, "--backend", "cpu")
    assert process.stdout is not None
    assert process.stdout.read(3)
    process.stdout.close()
    assert process.stderr is not None
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 141
    assert said == b""


def test_ctrl_c_in_a_process_keeps_the_text(base: str) -> None:
    # A line of JSON a token, so that the signal falls into the middle of a text; with log probabilities the pipe is full
    # before the text ends.
    lines = ("--json", "--stream", "--logprobs", "20", "--dry-multiplier", "1")
    process = spawn("generate", base, "once", "-n", "-1", *lines, "--backend", "cpu")
    assert process.stdout is not None
    assert process.stderr is not None
    first = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    with process.stdout, process.stderr:
        out, err = process.stdout.read(), process.stderr.read()
    assert process.wait(60) == 130
    *chunks, last = map(json.loads, (first + out).splitlines())
    assert last["result"]["finish_reason"] == "cancelled"
    assert "".join(chunk["text"] for chunk in chunks) == last["result"]["text"]
    assert b"Traceback" not in err


@pytest.mark.parametrize(("closed", "heard"), [(">&-", "stderr"), ("2>&-", "stdout"), ("<&-", "stdout")])
def test_a_closed_descriptor_is_no_error(base: str, closed: str, heard: str) -> None:
    command = shlex.join([sys.executable, "-m", "quarrel", "generate", base, "once", "-n", "4", "--backend", "cpu"])
    done = subprocess.run(["sh", "-c", f"{command} {closed}"], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    assert getattr(done, heard)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full is Linux's")
def test_a_full_disk_is_one_sentence() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "quarrel", "inspect", "demo", "--json"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == "quarrel: No space left on device where the output goes: make some, and run it again\n"


def test_a_terminal_without_unicode_does_not_crash(base: str) -> None:
    process = spawn("tokenize", base, "über", PYTHONIOENCODING="ascii:strict", PYTHONUTF8="0", LC_ALL="C")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert b"?" in out or b"\\u" in out


def test_a_mistake_in_a_process_has_no_traceback() -> None:
    process = spawn("generate", "-m", "nowhere.gguf", "x")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert out == b""
    assert err.startswith(b"quarrel: no model 'nowhere.gguf'")
    assert err.count(b"\n") == 1


def test_ctrl_c_while_it_is_imported_has_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "quarrel.cli", Interrupted("quarrel.cli"))
    assert start() == 130
    assert capsys.readouterr() == ("", "\n")
