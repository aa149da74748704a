"""What a command line says about a request: structures, a draft model, adapters, a longer context."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import quarrel
from quarrel.cli import main
from quarrel.cli.flags import UsageError, adapters_of
from quarrel.cli.parser import make_parser
from tests.cli.support import GREEDY
from tests.llm.test_adapters import ONE, write_adapter
from tests.tiny_model import N_CTX, write_tiny_model


def run(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    assert main(list(arguments)) == status
    streams = capsys.readouterr()
    return streams.err if status else streams.out.removesuffix("\n")


def test_a_text_keeps_to_a_structure(base: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    schema = {"enum": ["abc", "de"]}
    for name, text in (("schema.json", json.dumps(schema)), ("words.lark", 'start: ("ab" | "cd")~3')):
        (tmp_path / name).write_text(text)
    line = ("generate", base, "once", *GREEDY, "-q")
    assert re.fullmatch("[a-c]{4}", run(capsys, *line, "--regex", "[a-c]{4}"))
    assert len(run(capsys, *line, "--grammar", str(tmp_path / "words.lark"))) == 6
    for given in (str(tmp_path / "schema.json"), json.dumps(schema)):
        assert json.loads(run(capsys, *line, "--json-schema", given)) in schema["enum"]
    assert "given together" in run(capsys, *line, "--regex", "a", "--grammar", "x", status=2)
    assert "no such file" in run(capsys, *line, "--grammar", str(tmp_path / "none"), status=1).lower()


def test_guessing_changes_no_text(base: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    small = write_tiny_model(tmp_path / "small.gguf", seed=1)
    line = ("generate", base, "once upon once upon", "--backend", "cpu", "-n", "30", "--seed", "3", "-q")
    text = run(capsys, *line)
    assert run(capsys, *line, "--draft", str(small), "--draft-max", "3", "--lookup", "4") == text
    assert "--draft-max is 99" in run(capsys, *line, "--draft-max", "99", status=1)
    assert "after the 1e-05 seconds" in run(capsys, *line, "--timeout", "0.00001", status=1)
    assert "another vocabulary" in run(capsys, *line, "--draft", "demo", status=1)


def test_an_adapter_writes(base: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "one.gguf", ONE)
    with quarrel.load(base, backend="cpu", adapters={"one": path}) as llm:
        wanted = [llm.generate("once", temperature=0, max_tokens=12, adapter=a).text for a in ("one", None)]
    line = ("generate", base, "once", *GREEDY, "-q")
    assert [run(capsys, *line, "--lora", str(path)), run(capsys, *line)] == wanted
    assert wanted[0] != wanted[1]
    args = make_parser().parse_args(["serve", "--lora", f"x={path}", "--lora", str(path)])
    assert adapters_of(args) == {"x": str(path), "one": str(path)}
    with pytest.raises(UsageError, match="two adapters are called 'one'"):
        adapters_of(make_parser().parse_args(["serve", "--lora", str(path), "--lora", f"one={path}"]))


def test_a_longer_context(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = ("explain", base, "--backend", "cpu", "--rope-scaling", "linear", "--rope-scale", "2", "-c", str(2 * N_CTX))
    assert f"{2 * N_CTX} tokens; up to" in run(capsys, *line)
    assert "wanted a number from 1" in run(capsys, *line[:-3], "0.1", status=1)
