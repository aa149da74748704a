"""A request takes an adapter by a field, or by the model's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import quarrel
from quarrel.llm import LLM
from quarrel.server import Settings
from tests.llm.test_adapters import ONE, write_adapter
from tests.server.conftest import running
from tests.tiny_model import write_tiny_model


def test_an_adapter_by_its_field_or_by_the_models_name(tmp_path: Path) -> None:
    base, one = write_tiny_model(tmp_path / "tiny.gguf"), write_adapter(tmp_path / "one.gguf", ONE)

    def load(source: str) -> LLM:
        return quarrel.load(source, backend="cpu", threads=1, adapters={"one": one})

    with running(Settings(data_dir=tmp_path, models=(str(base),)), load) as live:

        def ask(**body: Any) -> Any:
            asked = {"prompt": "once", "max_tokens": 12, "temperature": 0, **body}
            return live.client.post("/v1/completions", json=asked)

        texts = [ask(**b).json()["choices"][0]["text"] for b in ({}, {"adapter": "one"}, {"model": "tiny:one"})]
        assert texts[0] != texts[1] == texts[2]
        assert "no adapter 'two', wanted one of one" in ask(model="tiny:two").text
        assert ask(model="other:one").status_code == 404
