"""Tiny models for the command line, and no traces of whoever runs the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_model import CHATML, write_tiny_model


@pytest.fixture(scope="session", name="base")
def _base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that only continues texts."""
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "base.gguf"))


@pytest.fixture(scope="session", name="chatty")
def _chatty(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with a chat template."""
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "chatty.gguf", template=CHATML))


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test finds the models, or writes the history, of whoever runs it."""
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
