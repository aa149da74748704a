"""A folder of models: what is no model there is one warning, and hinders nothing."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from quarrel.gguf import resolve
from quarrel.server import Rates, Settings
from tests.server.conftest import running


def test_bad_entries_are_one_warning_each_and_hinder_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (demo,) = resolve("demo").paths
    folder = tmp_path / "models"
    (folder / "folder.gguf").mkdir(parents=True)
    (folder / "dangling.gguf").symlink_to(tmp_path / "nothing")
    (folder / "loop.gguf").symlink_to(folder / "loop.gguf")
    (folder / "demo.gguf").write_bytes(b"not the one that is named")
    os.mkfifo(folder / "pipe.gguf")
    (folder / "good.gguf").symlink_to(demo)
    (folder / "._good.gguf").write_bytes(b"what a Mac leaves beside it")
    unnameable = os.fsencode(folder) + b"/\xff.gguf"
    with open(unnameable, "wb"):
        pass
    caplog.set_level(logging.WARNING, "quarrel.server")
    settings = Settings(models=("demo",), models_dir=folder, data_dir=tmp_path, rates=Rates(requests=0))
    with running(settings) as made:
        made.client.post("/api/models/demo")
        for path in ("/readyz", "/metrics", "/v1/models", "/api/models", "/api/metrics") * 2:
            assert made.client.get(path).status_code == 200, path
        assert [m["id"] for m in made.client.get("/v1/models").json()["data"]] == ["demo", "good"]
        answer = made.client.post("/v1/completions", json={"model": "good", "prompt": "a", "max_tokens": 1})
        assert answer.status_code == 200
        refused = made.client.post("/v1/completions", json={"model": "folder", "prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        (tmp_path / "nothing").symlink_to(demo)  # and what becomes one is offered
        assert "dangling" in [m["id"] for m in made.client.get("/v1/models").json()["data"]]
    told = [r.getMessage() for r in caplog.records if "is not offered" in r.getMessage()]
    reasons = {Path(m.split("'")[1]).name: m.split(": ", 1)[1] for m in told}
    assert len(told) == len(reasons) == 6
    assert reasons["folder.gguf"] == reasons["pipe.gguf"] == "it is no file"
    assert reasons["dangling.gguf"] == "No such file or directory"
    assert reasons["demo.gguf"] == "another model is called demo: rename it"
    assert reasons["\\udcff.gguf"] == "its name is not in UTF-8"
