"""Phases: their work adds up to the model's, their times to the step's, and the GPU's load is read where something can."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace

import pytest

from quarrel.bench import gpu, phases
from quarrel.bench.__main__ import main
from quarrel.bench.gpu import ABSENT, GpuLoad, Watch, reader
from quarrel.bench.phases import phase_rows, text
from quarrel.bench.subject import Source
from quarrel.bench.work import work_of
from quarrel.bench.workload import Test as Work
from quarrel.gguf import GGUFFile
from quarrel.ops.profile import Part, Profiled
from quarrel.ops.step import StepOutputs
from quarrel.ops.traffic import Traffic
from tests.paths import need_cases
from tests.tiny_model import FFN, PIECES, WIDTH, write_tiny_model


@pytest.fixture(name="tiny", scope="module")
def _tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("phases") / "tiny.gguf")


def test_operations_are_counted_by_phase(tiny: Path) -> None:
    with GGUFFile.open(tiny) as file:
        work = work_of(Source.of(file, 64).program, "float32")
    assert work["attention"].flops(10) == 2 * 4 * WIDTH * WIDTH + 4 * WIDTH * 10
    assert work["ffn"].flops(10) == 2 * 3 * WIDTH * FFN
    assert work["head"].flops(10) == 2 * WIDTH * len(PIECES)
    assert work["norm"].flops(10) == work["embedding"].flops(10) == 0


@pytest.mark.parametrize("arch", ["granitehybrid", "mamba", "gptoss", "gemma3"])
def test_the_phases_read_what_the_step_reads(arch: str) -> None:
    with GGUFFile.open([next(need_cases(arch).glob("*.gguf"))]) as file:
        program = Source.of(file, 64).program
        work = work_of(program, "float16")
        assert sum(w.nbytes(3, 20) for w in work.values()) == pytest.approx(_whole(program))


def _whole(program: object) -> float:
    """A tied table is read as rows by the embedding and whole by the head, which the whole step counts once."""
    traffic = Traffic.of(program, "float16")  # type: ignore[arg-type]
    work = work_of(program, "float16")  # type: ignore[arg-type]
    return traffic.step(3, 20) + 3 * (sum(w.traffic.row for w in work.values()) - traffic.row)


def test_the_command_prints_a_table_with_bars_and_writes_both_files(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, picture = tmp_path / "phases.json", tmp_path / "phases.svg"
    line = f"-m {tiny} --backend cpu --threads 1 --phases -p 8 -n 2 -r 2 --no-check --out {out} --plot {picture}"
    assert main(line.split()) == 0
    printed = capsys.readouterr().out
    assert "| attention |" in printed
    assert "█" in printed
    found = json.loads(out.read_text("utf-8"))["phases"]
    assert [one["test"] for one in found] == ["pp8", "tg2"]
    for one in found:
        assert {row["phase"] for row in one["phases"]} == {"embedding", "attention", "ffn", "norm", "head", "sampling"}
        assert sum(row["share"] for row in one["phases"]) == pytest.approx(1)
        assert one["sum_us"] == pytest.approx(sum(kernel["us"] for kernel in one["kernels"]), rel=0.5)
        assert one["clock_us"] > 0
        assert not one["note"]
    assert all(row["bytes"] == 0 for row in found[0]["phases"])
    assert len(list(ET.fromstring(picture.read_text("utf-8")).iter("{http://www.w3.org/2000/svg}rect"))) == 1 + 2 * 6


@pytest.mark.parametrize("more", ["-o csv", "--op linear", "--engine", "--vs before.json"])
def test_what_does_not_go_with_phases_is_refused(more: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tmp_path / "before.json"
    before.write_text("[]")
    assert main([*["--phases", "--backend", "cpu"], *more.replace("before.json", str(before)).split()]) == 1
    assert "--phases times models, as markdown, json or jsonl" in capsys.readouterr().err


def test_the_work_of_a_fused_kernel_is_counted_where_its_time_is() -> None:
    with GGUFFile.open([need_cases("granitehybrid", "model-q4_0x.gguf")]) as file:
        work = work_of(Source.of(file, 64).program, "float16")
    parts = (Part("blk.0.attn", "mamba2_mix", "mamba2_step", "scan"), Part("blk.0.ffn", "route", "route_one", "routing"))
    steps = [[Profiled(StepOutputs(), parts, (3e-6, 1e-6)) for _ in range(4)]]
    (routing, scan), kernels = phase_rows(steps, Work("decode", 4), work)
    assert (scan.us, scan.share, routing.us) == (pytest.approx(3), pytest.approx(0.75), pytest.approx(1))
    assert scan.bytes == pytest.approx(work["scan"].nbytes(1, 2) + work["convolution"].nbytes(1, 2))
    assert scan.gb_s == pytest.approx(scan.bytes / 3e-6 / 1e9)
    assert [(k.kernel, k.us, k.launches) for k in kernels] == [
        ("mamba2_step", pytest.approx(3), 1),
        ("route_one", pytest.approx(1), 1),
    ]


def _absent(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_without_nvml_and_nvidia_smi_there_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _absent(monkeypatch, tmp_path)
    assert reader() is None
    with Watch(None) as watch:
        pass
    assert watch.load() is None
    found = phases.Phased("m", "triton", "d", "float16", "tg1", (), (), 0.0, 1.0, None, ABSENT, "no")
    assert text(found).endswith(f"There is {ABSENT}.")


def test_nvidia_smi_is_read_where_nvml_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\n[ "$2" = 3 ] && echo "87, 412.5"\n')
    program.chmod(0o755)
    _absent(monkeypatch, tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    read = reader()
    assert read is not None
    assert read() == (87.0, 412.5)


def test_nvml_is_read_while_something_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1234")
    watts = iter([200_000, 400_000])
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda name: name,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=50 if handle == "GPU-1234" else 0),
        nvmlDeviceGetPowerUsage=lambda handle: next(watts),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with Watch(gpu.reader(), interval=0.0) as watch:  # a driver that stops answering ends the readings
        assert watch._thread is not None
        watch._thread.join()
    assert watch.load() == GpuLoad(50.0, 300.0, 400.0, 2)
    found = phases.Phased("m", "triton", "d", "float16", "tg1", (), (), 0.0, 1.0, watch.load(), "", "no")
    assert text(found).endswith("The GPU was busy 50% of the time at 300 W (peak 400 W).")
