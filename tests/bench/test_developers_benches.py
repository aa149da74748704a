"""The developers' benches in bench/: each can be imported, says what it does, and has its line in bench/README.md."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path
from subprocess import Popen
from typing import Any

import httpx
import numpy as np
import pytest

from quarrel.server import Settings
from tests.paths import need_cases

ROOT = Path(__file__).resolve().parents[2]
if all(importlib.util.find_spec(name) for name in ("torch", "triton")):
    # Triton is imported as the tests of its backend do it: with its interpreter where there is no GPU.
    importlib.import_module("tests.triton_backend.conftest")
SCRIPTS = sorted(p.relative_to(ROOT / "bench") for p in (ROOT / "bench").glob("*/*.py"))
TABLE = (ROOT / "bench" / "README.md").read_text("utf-8")


def test_the_readme_has_a_line_for_each_script() -> None:
    assert sorted(re.findall(r"^\| `([\w/]+\.py)`", TABLE, re.MULTILINE)) == [str(path) for path in SCRIPTS]


@pytest.mark.parametrize("path", SCRIPTS, ids=str)
def test_a_script_can_be_imported_and_says_how_to_run_it(path: Path) -> None:
    name = f"bench.{'.'.join(path.with_suffix('').parts)}"
    for needed in ("torch", "triton", "pyarrow", "mlx"):
        pytest.importorskip(needed)
    module = importlib.import_module(name)
    assert callable(module.main)
    assert f"python -m {name} " in (module.__doc__ or "") + "\n" or f"python -m {name}\n" in (module.__doc__ or "")
    assert f"`python -m {name}" in TABLE


def test_each_result_is_listed_with_the_command_that_made_it() -> None:
    folder = ROOT / "bench" / "results"
    listed = re.findall(r"^\| `([\w.-]+\.jsonl?)`", (folder / "README.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(p.name for p in folder.iterdir() if p.name != "README.md")


def test_models_and_tests_are_chosen_by_name() -> None:
    from bench.steps.gpu_bars import chosen

    assert [t.name for m in chosen("mistral-7b:Q8_0", "tg128") for t in m.tests] == ["tg128"]
    with pytest.raises(SystemExit, match="no model is called 'mistral'"):
        chosen("mistral", "")


def test_large_models_take_turns_on_a_small_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kernels for a file of two layers; then the whole, here of three, is written, measured and deleted."""
    gpu_bars: Any = importlib.import_module("bench.steps.gpu_bars")
    written: list[tuple[str, int | None]] = []
    synthetic = gpu_bars.synthetic

    def noted(name: str, folder: Path, layers: int | None) -> Path:
        written.append((name, layers))
        return synthetic(name, folder, layers)

    monkeypatch.setattr(gpu_bars, "synthetic", noted)
    monkeypatch.setattr(gpu_bars, "MODELS", (gpu_bars.Model("smollm2-135m:F16", (gpu_bars.Test("decode", 2),)),))
    options = ["--backend", "cpu", "--rounds", "1", "--layers", "3", "--cut", "smollm2-135m:F16=2", "--jobs", "1"]
    options += ["--folder", str(tmp_path / "models"), "--out", str(tmp_path / "out.jsonl"), "--seconds", "600"]
    monkeypatch.setattr("sys.argv", ["gpu_bars", *options])
    assert gpu_bars.main() == 0
    assert written == [("smollm2-135m:F16", 2), ("smollm2-135m:F16", 3)]
    assert list((tmp_path / "models").iterdir()) == []
    assert json.loads((tmp_path / "out.jsonl").read_text())["test"] == "tg2"
    with pytest.raises(SystemExit, match="--cut has 'glm', wanted a model and its layers"):
        gpu_bars.cuts("glm")


def test_the_soaks_models_can_read_what_it_says_about_a_tool(tmp_path: Path) -> None:
    """800 letters, each a token of theirs: with 512 of context every such request was refused."""
    from bench.check import soak
    from tests.server.conftest import load, running

    settings = Settings(models=(str(soak.random_model(tmp_path / "a.gguf", 0)),), data_dir=tmp_path)
    with running(settings, load) as live:

        async def asked() -> str:
            with Popen(["true"], text=True) as process:
                async with httpx.AsyncClient(base_url=live.url, timeout=60) as client:
                    return await soak.tool(soak.Server("here", live.url, process, ("a",), (), (), "", client))

        assert asyncio.run(asked()) in ("length", "tool_calls")


def test_vectors_are_compared_with_plain_loops_that_give_the_same_values() -> None:
    from bench.ops.cpu_vectors import measure, rows, subjects
    from quarrel.cpu_backend.runtime import features

    found = rows(features.levels()[:1], 0.01)
    assert [row["kernel"] for row in found] == ["softmax", "swiglu", "float16 to float32", "float32 to float16"]
    assert all(row["gain"] == pytest.approx(row["plain_ns"] / row["vector_ns"], rel=0.1) for row in found)
    wrong = replace(subjects()[0], want=subjects()[0].want * 2)
    with pytest.raises(SystemExit, match="is wrong: nothing is timed"):
        measure(wrong, features.level(), 16, 0.01)


@pytest.mark.parametrize("name", ["F16", "Q8_0"])
@pytest.mark.parametrize("rows", [1, 9])
def test_products_that_are_timed_are_right(name: str, rows: int) -> None:
    from bench.ops.cpu_products import least, ours
    from quarrel.gguf import GGMLType
    from quarrel.gguf.quantize import quantize

    rng = np.random.default_rng(0)
    values, x = (rng.standard_normal((n, 320)).astype(np.float32) for n in (20, rows))
    run = ours(name, quantize(values, GGMLType[name]).view(np.uint8), x)
    assert np.abs(run() - x @ values.T).max() < 0.05 * np.abs(x @ values.T).max()
    assert least([run], 0.001)[0] > 0


def test_the_tuner_lists_what_is_in_force_first_and_changes_it_only_for_a_gain() -> None:
    pytest.importorskip("triton")
    from bench.tune import tune

    for map in tune.MODELS["mistral-7b"]:
        for width in (8, 16, 32):
            found, table = tune.candidates(map, width), tune.tuned.table(9)
            assert len(set(found)) == len(found) > 1
            for family in tune.FAMILIES:
                if width in (measured := getattr(table, family).get(map.name, {})):
                    assert found[0] == (family, measured[width])
            with tune.in_force(map, width, found[-1]):
                assert getattr(table, found[-1][0])[map.name][width] == found[-1][1]
            assert tune.candidates(map, width) == found
    small = tune.Map("one", ("Q4_K",), (64,), 512)
    kept = {"tiles": {small.name: {"32": [1]}}}
    assert tune.choose(kept, small, 32, {None: 10.0, ("rows", (2,)): 9.9}) is None
    assert tune.choose(kept, small, 32, {None: 10.0, ("rows", (2,)): 9.0}) == ("rows", (2,))
    assert kept == {"tiles": {small.name: {}}, "rows": {small.name: {"32": [2]}}, "us": {small.name: {"32": 9.0}}}
    assert json.loads(tune.dumps(kept))["us"] == {small.name: {"32": 9.0}}


@pytest.mark.parametrize("kind", ["one", "gated", "three"])
def test_the_tuner_compiles_and_runs_each_kind_of_map(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from bench.tune import tune
    from quarrel.triton_backend.runtime.launch import INTERPRETED

    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")

    ns = {"one": (64,), "gated": (64, 64), "three": (64, 32, 32)}[kind]
    small = tune.Map(kind, ("Q4_K",) * len(ns), ns, 256)  # type: ignore[arg-type]
    fault = tune.tried((small, 8, ("rows", (16, 1, 1, 0))))
    assert fault == ""


def test_values_are_rounded_as_torch_rounds_them_and_a_model_is_as_far_off_as_that() -> None:
    torch = pytest.importorskip("torch")
    rounded = importlib.import_module("bench.check.rounded")
    x = np.concatenate([np.random.default_rng(0).standard_normal(999), [0.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8]]).astype(
        np.float32
    )
    for compute in ("float16", "bfloat16"):
        assert np.array_equal(rounded.rounded(x, compute), torch.tensor(x).to(getattr(torch, compute)).float().numpy())
    need_cases("llama32")
    errors = {compute: rounded.errors("llama32/q4_0x", compute)["error"] for compute in ("float16", "bfloat16")}
    assert 4 < errors["bfloat16"] / errors["float16"] < 16
    assert errors["float16"] < 3e-3


def test_models_that_are_compared_at_the_same_time_have_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = importlib.import_module("bench.steps.peers_cpu")
    monkeypatch.setattr(peers, "allowed_cores", lambda: list(range(12)))
    monkeypatch.setattr(peers, "siblings", lambda cpu: f"{cpu % 6},{cpu % 6 + 6}")
    assert peers.cores(2, 3) == ["0,1", "2,3", "4,5"]
    assert peers.cores(3, 1) == ["0,1,2,3,4,5,6,7,8,9,10,11"]
    with pytest.raises(SystemExit, match="need 8 cores, and there are 6"):
        peers.cores(2, 4)


def test_the_table_beside_llama_cpp_names_models_that_can_be_made() -> None:
    from tools.make_synthetic import QUANTS, load_shapes

    shapes = load_shapes()
    for name in importlib.import_module("bench.steps.peers_cpu").TABLE:
        shape, quant, *layers = name.partition("@")[0].split(":")
        assert quant in QUANTS
        assert all(int(count) <= len(shapes[shape].layers) for count in layers)
        for depth in filter(None, name.partition("@")[2].split(",")):
            assert int(depth) < shapes[shape].keys["context_length"], name
