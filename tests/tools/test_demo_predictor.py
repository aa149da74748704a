"""A block that predicts a further token is trained beside the bundled model, whose text stays as it is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

DEMO = Path(__file__).resolve().parents[2] / "quarrel" / "demo" / "quarrel-demo-11M-Q8_0.gguf"


def test_a_block_is_trained_written_and_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for needed in ("torch", "sentencepiece"):
        pytest.importorskip(needed)
    from bench.engine import own_block
    from tools import demo_predictor

    monkeypatch.setattr(demo_predictor, "WINDOW", 16)
    monkeypatch.setattr(demo_predictor, "HELD", 1)
    tokens, file, out = tmp_path / "tokens.npy", tmp_path / "mtp.gguf", tmp_path / "out.jsonl"
    np.save(tokens, np.tile(np.arange(300, 340, dtype=np.uint16), 40))
    monkeypatch.setattr("sys.argv", ["demo_predictor", str(DEMO), str(tokens), str(file), "--seconds", "2"])
    demo_predictor.main()
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["steps"] > 0
    assert 0 <= said["alike"] <= 1
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a king who had three sons. " * 8, "utf-8")
    options = ["--out", str(out), "--prompts", "1", "--tokens", "8", "--rounds", "1"]
    monkeypatch.setattr("sys.argv", ["own_block", str(file), str(text), *options])
    assert own_block.main() == 0  # it compares the texts with and without the block
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert [row["block"] for row in rows] == ["its own", "drawn at random"]
    assert all(row["guessed"] > 0 for row in rows)
    with pytest.raises(SystemExit, match="has no block that predicts a further token"):
        own_block.redrawn(DEMO, tmp_path / "none.gguf")
