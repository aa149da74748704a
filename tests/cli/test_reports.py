"""inspect, explain, tokenize, doctor and pull: what they print for people and for programs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from quarrel.cli import explain, main
from quarrel.cli.models import document
from quarrel.cli.terminal import amount
from quarrel.llm import load
from tests.gguf.hub_server import Hub, serve


def test_inspect_shows_keys_tensors_and_totals(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", base]) == 0
    text = capsys.readouterr().out
    for part in (
        "13 tensors",
        "29.1 K parameters",
        "32.00 bits per weight",
        "llama.block_count",
        "string[288]",
        "288 x 32",
    ):
        assert part in text
    assert "\x1b" not in text, "a file must not drive the terminal"
    assert main(["inspect", base, "--tensors", "blk.*.attn_?.weight"]) == 0
    assert capsys.readouterr().out.count("attn_") == 3
    assert main(["inspect", base, "--keys", "head_count"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["1 of 14 keys", "  llama.attention.head_count  uint32  2"]


def test_inspect_as_json(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", base, "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["metadata"]["tokenizer.ggml.tokens"]["length"] == 288
    assert len(whole["metadata"]["tokenizer.ggml.tokens"]["value"]) < 20
    assert sum(t["bytes"] for t in whole["tensors"]) == whole["bytes"]
    assert main(["inspect", base, "--json", "--full", "--keys", "tokens", "--tensors", "norm"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert len(whole["metadata"]["tokenizer.ggml.tokens"]["value"]) == 288
    assert [t["shape"] for t in whole["tensors"]] == [[32]] * 3


def test_explain_says_what_the_host_holds(base: str) -> None:
    with load(base, backend="cpu", n_ctx=64) as llm:
        told = llm.explain()
    assert not any("host memory" in text for text in explain._memory(told))
    told = replace(told, plan=replace(told.plan, host=3 << 30, host_layers=4))
    assert f"  in host memory: the experts of 4 layers, {amount(3 << 30)}, in the file's own pages" in explain._memory(told)
    assert not any("used most" in text for text in explain._memory(told))
    told = replace(told, plan=replace(told.plan, resident=1 << 30))
    assert f"  on the device too: those of them used most, {amount(1 << 30)} of the weights" in explain._memory(told)


def test_explain_says_what_the_host_computes_and_how_fast_at_most(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", base, "--backend", "cpu", "-ngl", "0", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["host_layers"]
    assert facts["layers"] == facts["of"] == 1
    assert facts["most_tokens_per_second"] == pytest.approx(facts["bytes_per_second"] / facts["read"])
    assert facts["memory"]["cache"] == facts["plan"]["cache"] > 0
    assert main(["explain", base, "--backend", "cpu", "-ngl", "0"]) == 0
    text = capsys.readouterr().out
    assert f"host: 1 of 1 layers, computed by {facts['device']}" in text
    assert f"a token reads {amount(facts['read'])} there: at most " in text
    assert "on the host: " in text
    assert main(["explain", base, "--backend", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["host_layers"] is None


def test_explain_groups_calls_and_counts_them_all(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", base, "--backend", "cpu"]) == 0
    text = capsys.readouterr().out
    assert main(["explain", base, "--backend", "cpu", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["n_ctx"] == 512
    assert whole["backend"] == "cpu"
    assert f"{len(whole['choices'])} calls a step" in text
    plan = whole["memory"]
    assert f"  {amount(plan['weights'] + plan['cache'] + plan['activations'])}\n" in text
    table = text.partition(" calls a step")[2].splitlines()[2:]
    assert sum(int(row.split()[0]) for row in table if row.split()[0].isdigit()) == len(whole["choices"])
    for choice in whole["choices"]:
        assert choice["op"] in text
        assert choice["implementation"] in text


@pytest.mark.parametrize(
    ("paths", "want"),
    [
        (["output"], "output"),
        (["blk.0.attn", "blk.1.attn", "blk.3.attn"], "blk.0-1,3.attn"),
        (["blk.2.attn", "blk.2.ffn", "output"], "blk.2.attn blk.2.ffn output"),
    ],
)
def test_paths_are_told_in_short(paths: list[str], want: str) -> None:
    assert explain.where(paths) == want


def test_tokenize_there_and_back(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokenize", base, "hé you", "--ids"]) == 0
    ids = capsys.readouterr().out.split()
    assert ids[0] == "1"
    assert main(["tokenize", base, "--decode", "-p", ",".join(ids)]) == 0
    assert capsys.readouterr().out == "hé you\n"
    assert main(["tokenize", base, "--decode", "--special", "-p", " ".join(ids)]) == 0
    assert capsys.readouterr().out == "<s> hé you\n"
    assert main(["tokenize", base, "hé you", "--no-special", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert [str(id) for id in whole["ids"]] == ids[1:]
    assert whole["count"] == len(ids) - 1
    assert main(["tokenize", base, "<s>a"]) == 0
    assert '"<s>"' in capsys.readouterr().out.splitlines()[0]


def test_doctor_says_that_this_machine_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for part in ("backends", "cpu", "threads", "memory", "Python", "compiled kernels", "Ollama", "Hugging Face"):
        assert part in text
    assert main(["doctor", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["usable"] is True
    assert {"group": "backends", "what": "cpu", "state": "ready"}.items() <= whole["findings"][0].items()


def test_doctor_lists_the_models_that_it_finds(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    manifests = tmp_path / "ollama" / "manifests"
    for name in ("registry.ollama.ai/library/mistral/latest", "hf.co/me/mine/q4"):
        (manifests / name).parent.mkdir(parents=True)
        (manifests / name).write_text("{}")
    snapshot = tmp_path / "hub" / "models--you--yours" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "yours-Q4_0.gguf").symlink_to(base)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "hf.co/me/mine:q4, mistral:latest" in text
    assert "hf://you/yours" in text


def test_doctor_names_a_variable_that_is_malformed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUARREL_COMPUTE", "float99")
    main(["doctor"])
    text = capsys.readouterr().out
    assert "QUARREL_COMPUTE is 'float99'" in text
    assert "!!" in text


def test_doctor_names_a_variable_that_is_misspelt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUARREL_THREAD", "2")
    monkeypatch.setenv("QUARREL_CASES", "elsewhere")
    assert main(["doctor"]) == 0
    assert "QUARREL_THREAD  is not read by anything -> QUARREL_THREADS may be meant" in capsys.readouterr().out


def test_doctor_survives_a_backend_that_fails_to_load(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(name: str) -> object:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr("quarrel.doctor.backend", broken)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "libcuda.so.1" in text
    assert "No backend can run a model here" in text


def test_results_are_plain_json(base: str) -> None:
    from quarrel import load

    with load(base, backend="cpu") as llm:
        whole = document(llm, llm.generate("a", max_tokens=2))
    assert json.loads(json.dumps(whole)) == whole


def test_pull_prints_where_the_model_lies(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("huggingface_hub")
    with serve(Hub({"m-Q4_0.gguf": b"four" * 100, "m-Q8_0.gguf": b"eight" * 100})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert main(["pull", "hf://owner/repo:Q8_0"]) == 0
        (path,) = capsys.readouterr().out.splitlines()
        assert Path(path).read_bytes() == b"eight" * 100
        assert main(["pull", "owner/repo:Q8_0", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"name": "owner/repo:Q8_0", "files": [path], "bytes": 500}
        assert main(["pull", "owner/repo:Q2_K"]) == 1
        assert "Q2_K" in capsys.readouterr().err
