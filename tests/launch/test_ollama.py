"""Ollama's engine is found, replaced, asked for its version, and put back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from quarrel.cli import main
from quarrel.launch import ollama
from quarrel.launch.ollama import find_libraries, script, version_of

OLD = """#!/bin/sh
if [ "$1" = --version ]; then echo "version: 11434 (abc123)" >&2; exit; fi
echo "old engine: $@ ($LD_LIBRARY_PATH)"
"""


@pytest.fixture
def libraries(tmp_path: Path) -> Path:
    """As an installed Ollama has them."""
    folder = tmp_path / "lib" / "ollama"
    folder.mkdir(parents=True)
    (folder / "llama-server").write_text(OLD)
    (folder / "llama-server").chmod(0o755)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ollama").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "ollama").chmod(0o755)
    return folder


def said(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert main(["ollama", *words]) == status
    found = capsys.readouterr()
    return found.out if status == 0 else found.err


def test_ours_is_linked_in_and_the_old_one_put_back(libraries: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--libraries", str(libraries))
    assert "engine    Ollama's own (11434 (abc123))" in said(capsys, "status", *where)
    assert "is now Quarrel" in said(capsys, "use", *where)
    shown = said(capsys, "status", *where)
    assert "engine    Quarrel (quarrel 0" in shown
    assert "kept      llama-server.ollama (11434 (abc123))" in shown
    # A second time keeps what was kept.
    said(capsys, "use", *where)
    assert version_of(libraries / "llama-server.ollama") == "11434 (abc123)"
    environment = {"LD_LIBRARY_PATH": "/theirs", "PATH": "/usr/bin:/bin"}
    engine = [str(libraries / "llama-server"), "--list-devices", "--offline"]
    handed = subprocess.run(engine, capture_output=True, text=True, env=environment, timeout=120)
    assert handed.stdout == "old engine: --list-devices --offline (/theirs)\n"
    assert "Ollama's own again" in said(capsys, "restore", *where)
    assert sorted(p.name for p in libraries.iterdir()) == ["llama-server"]
    assert (libraries / "llama-server").read_text() == OLD
    assert "already" in said(capsys, "restore", *where)


def test_an_update_of_ollama_is_kept_in_place_of_the_older_one(libraries: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--libraries", str(libraries))
    said(capsys, "use", *where)
    (libraries / "llama-server").write_text(OLD.replace("11434", "20000"))
    assert "Ollama's own (20000 (abc123))" in said(capsys, "status", *where)
    said(capsys, "use", *where)
    assert version_of(libraries / "llama-server.ollama") == "20000 (abc123)"


def test_the_folder_is_found_by_the_program(libraries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(libraries.parents[1] / "bin"))
    assert find_libraries(None).folder == libraries


def test_what_cannot_be_done_is_one_sentence(
    libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "holds no llama-server" in said(capsys, "status", "--libraries", str(tmp_path), status=1)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(ollama, "LIBRARIES", ())
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "--libraries" in said(capsys, "status", status=1)
    (libraries / "llama-server").unlink()
    (libraries / "llama-server.ollama").write_text(OLD)
    assert "engine    none" in said(capsys, "status", "--libraries", str(libraries))


def test_an_engine_that_does_not_start_leaves_the_old_one(
    libraries: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert "does not start" in said(capsys, "use", "--libraries", str(libraries), status=1)
    assert (libraries / "llama-server").read_text() == OLD


def test_the_link_survives_odd_paths(libraries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = libraries.with_name("it's a $folder")
    libraries.rename(odd)
    monkeypatch.setattr(sys, "executable", "/opt/a b/python")
    text = script(ollama.Linked(odd))
    assert "exec '/opt/a b/python' -m quarrel.launch" in text
    subprocess.run(["sh", "-n"], input=text, text=True, check=True)
