"""The regression suite: the bundled model still answers as it did, and what changes is found."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from quarrel.quality.coherence import faults
from quarrel.quality.page import page
from quarrel.quality.selections import agreement
from quarrel.quality.suite import Allowed, compare, judge
from quarrel.regress import main
from tests.paths import need_cases

BASELINE = Path(__file__).with_name("demo-float32.json")
ENTRY: dict[str, Any] = json.loads(BASELINE.read_text("utf-8"))["entries"][0]


def changed(**values: Any) -> dict[str, Any]:
    return copy.deepcopy(ENTRY) | values


def test_the_bundled_model_answers_as_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, report = tmp_path / "now.json", tmp_path / "page.html"
    command = ["check", "-m", "demo", "--compute", "float32", "--against", str(BASELINE), "--max-memory", str(4 << 30)]
    assert main([*command, "--out", str(out), "--report", str(report)]) == 0, capsys.readouterr().err
    assert "demo: passed" in capsys.readouterr().out
    text = report.read_text("utf-8")
    assert text.count("<svg") == 4
    assert "Once upon a time" in text
    entry = json.loads(out.read_text())["entries"][0]
    assert entry["perplexity"]["value"] == pytest.approx(ENTRY["perplexity"]["value"], rel=1e-4)
    assert entry["tokens_per_second"] > 0
    assert 0 < entry["memory"]["process_peak"] < 4 << 30


@pytest.mark.parametrize("kind", ["experts", "hybrid"])
@pytest.mark.parametrize("compute", ["float32", "auto"])
def test_small_trained_models_answer_as_they_did(kind: str, compute: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Real weights in k-quants: experts of which two compute, and Mamba-2 beside attention."""
    model = str(BASELINE.parent / "models" / f"quarrel-{kind}-Q4_K_M.gguf")
    against = str(BASELINE.with_name(f"{kind}-float32.json"))
    limits = ["--threshold", "1e-3"] if compute == "auto" else []
    status = main(["check", "-m", model, "--compute", compute, "--against", against, *limits])
    said = capsys.readouterr()
    assert status == 0, said.err
    assert ("same experts" in said.out) == (kind == "experts")


def test_eight_bit_arithmetic_stays_close_and_coherent(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["check", "-m", "demo", "--against", str(BASELINE), "--threshold", "1e-3"])
    assert status == 0, capsys.readouterr().err


def test_a_hybrid_with_experts_chooses_the_same_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(need_cases("granitehybrid", "model-q4_k_m.gguf"))
    base = tmp_path / "base.json"
    assert main(["baseline", "-m", model, "--out", str(base)]) == 0
    entry = json.loads(base.read_text())["entries"][0]
    assert len(entry["expert_selections"]) == 3
    assert all(len(token) == 2 for layer in entry["expert_selections"] for token in layer)
    # It is a random model: incoherent, and so it fails, but for that reason alone.
    assert main(["check", "-m", model, "--against", str(base)]) == 1
    said = capsys.readouterr()
    assert "same experts 1" in said.out
    assert all("is continued with" in line for line in said.err.splitlines())


def test_what_cannot_be_read_or_written_is_told_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for line, said in (
        (["baseline", "--out", "nowhere/x.json"], "nowhere/x.json cannot be written: there is no folder nowhere"),
        (["check", "--against", str(BASELINE), "--report", "nowhere/x.html"], "there is no folder nowhere"),
        (["baseline", "--out", str(tmp_path / "x"), "--text", "none.txt"], "none.txt cannot be read: No such file"),
    ):
        assert main(line) == 1
        assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_nothing_is_wrong_with_the_baseline_itself() -> None:
    measures, wrong = compare(ENTRY, ENTRY, Allowed(speed=1.0))
    assert wrong == []
    assert measures["logits distance"] == 0.0


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (changed(perplexity={"value": ENTRY["perplexity"]["value"] * 1.06}), "perplexity is 1.06"),
        (changed(perplexity={"value": float("nan")}), "perplexity is nan"),
        (changed(tokens_per_second=ENTRY["tokens_per_second"] / 3), "tokens a second"),
        (changed(memory={"process_peak": 1 << 40}), "at its peak"),
        (changed(prompts=[p | {"tokens": [1]} for p in ENTRY["prompts"]]), "logits of 'The quick brown fox' are inf"),
        (changed(prompts=[p | {"logits": "AADAfw=="} for p in ENTRY["prompts"]]), "are inf"),
        (changed(continuations=[{"prompt": "x", "text": "aaaa", "faults": faults("aaaa")}]), "4 times in a row"),
    ],
)
def test_each_change_is_found(now: dict[str, Any], said: str) -> None:
    _, wrong = compare(now, ENTRY, Allowed(speed=0.5, memory=1 << 32))
    assert any(said in text for text in wrong), wrong


def test_other_experts_are_found() -> None:
    then = changed(expert_selections=[[[0, 1], [2, 3]]])
    measures, wrong = compare(changed(expert_selections=[[[0, 1], [2, 4]]]), then, Allowed())
    assert measures["same experts"] == 0.75
    assert "75.0 % of the experts" in wrong[0]
    assert agreement([], []) == 1.0


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Once upon a time, there was a king...", 0),
        ("no nooo", 0),
        ("noooo", 1),
        ("what?!?!?!", 1),
        ("king кинг", 1),
        ("a\x07b", 1),
        ("line\nline\ttab", 0),
        ("\ufffd", 1),
        ("日本語 and English", 0),
    ],
)
def test_coherence(text: str, count: int) -> None:
    assert len(faults(text)) == count


def test_the_page_escapes_what_models_write() -> None:
    bad = changed(continuations=[{"prompt": "<script>", "text": "</pre><b>", "faults": []}])
    text = page(judge([bad], [ENTRY], Allowed()), Allowed())
    assert "<script>" not in text
    assert "&lt;/pre&gt;" in text


def test_errors_are_sentences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "old.json").write_text("{}")
    assert main(["check", "--against", str(tmp_path / "old.json")]) == 1
    assert "is no baseline" in capsys.readouterr().err
    assert main(["baseline", "-m", "demo", "-m", "x/demo", "--out", str(tmp_path / "b")]) == 1
    assert "same file name" in capsys.readouterr().err
    judged = judge([changed(model="other")], [ENTRY], Allowed())
    assert "has no model other" in judged[0][2][0]


def test_ctrl_c_ends_it_without_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("quarrel.regress.load", load)
    assert main(["baseline", "--out", str(tmp_path / "x.json")]) == 130
