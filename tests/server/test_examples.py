"""The programs of `examples/` run as they stand, on the bundled model; what needs more than the test extra is skipped."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.conftest import Live

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROGRAMS = {
    "batch": '"prompt": "The king said", "text": "',
    "json_extraction": "'kind': '",
    "chat_with_tools": "weather({",
    "longbow_search": "  A king had three daughters.",
    "lora_by_request": "with the adapter: ",
    "speculative": "draft model: 4",
    "langchain_pipeline": "",
    "llamaindex_pipeline": "",
    "lm_evaluation": "'acc,none': ",
}
OF_THEIR_OWN = {"gradio_page", "torch_linear", "serving"}


def run(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "demo"])
    monkeypatch.syspath_prepend(str(EXAMPLES))
    try:
        return runpy.run_path(str(EXAMPLES / f"{name}.py"))
    except SystemExit as left:
        assert "pip install" in str(left)
        pytest.skip(str(left))


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_says_what_it_should(
    name: str, live: Live, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUARREL_URL", live.url)
    run(name, monkeypatch)
    said = capsys.readouterr().out
    assert said.strip()
    assert PROGRAMS[name] in said


def test_the_page_answers_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run("gradio_page", monkeypatch)
    parts = list(found["answer"]("Hello", [{"role": "user", "content": "Hi"}]))  # type: ignore[operator]
    assert len(parts) > 3
    assert parts[-1].startswith(parts[0])


def test_a_weight_in_a_module_of_pytorch() -> None:
    pytest.importorskip("triton", reason="needs Triton")
    # In a process of its own: Triton's interpreter is chosen before it loads.
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    command = [sys.executable, str(EXAMPLES / "torch_linear.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=250)
    assert done.returncode == 0, done.stderr
    assert "blk.0.ffn_gate.weight (1024, 256) in Q8_0" in done.stdout


def test_every_example_is_run_and_in_the_list() -> None:
    programs = {path.stem for path in EXAMPLES.glob("*.py")}
    assert programs == {*PROGRAMS, *OF_THEIR_OWN}
    page = (EXAMPLES / "README.md").read_text("utf-8")
    assert [name for name in programs - {"serving"} if f"| `{name}.py` |" not in page] == []
