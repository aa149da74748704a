"""The bench measures what it says, in every form of output, and reports no speed of what computes wrongly."""

from __future__ import annotations

import csv
import io
import json
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quarrel.bench import rows as bench_rows
from quarrel.bench import session
from quarrel.bench.__main__ import main
from quarrel.bench.inputs import Layout
from quarrel.bench.kernel import time_linear
from quarrel.bench.plot import plot
from quarrel.bench.precompile import Job, jobs_for, precompile
from quarrel.bench.report import Figure, brief, earlier, statistics, table
from quarrel.bench.session import How, Session
from quarrel.bench.subject import Source, limits_for
from quarrel.bench.workload import Test as Work
from quarrel.bench.workload import matrix
from quarrel.cpu_backend.backend import CpuBackend
from quarrel.errors import QuarrelError, RequestError
from quarrel.gguf import GGUFFile
from quarrel.models import ModelSpec
from quarrel.ops import reference
from quarrel.ops.contract import Concrete, Op, rel_error
from quarrel.ops.linear import LINEAR, LINEAR_ADD, NORM_GATE_UP, NORM_LINEAR
from quarrel.ops.moe import EXPERT_DOWN, EXPERT_UP
from quarrel.ops.program import Node
from quarrel.ops.step import ComputeChoice, Limits
from quarrel.ops.traffic import Traffic
from tests.paths import need_cases
from tests.tiny_model import write_tiny_model
from tools.make_synthetic import build, load_shapes

QUIET = How(rounds=2, step_tokens=16, say=lambda text: None)
TESTS = [Work("prefill", 20), Work("decode", 3), Work("decode", 3, 8, 3)]


@pytest.fixture(name="tiny", scope="module")
def _tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("bench") / "tiny.gguf")


@pytest.fixture(name="backend", scope="module")
def _backend() -> Iterator[CpuBackend]:
    backend = CpuBackend(threads=1)
    yield backend
    backend.close()


@pytest.fixture(autouse=True)
def _bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a gigabyte a dozen times is no part of these tests."""
    monkeypatch.setattr(session, "read_bandwidth", lambda backend, rounds: (1e10, [1e10] * rounds))
    monkeypatch.setattr("quarrel.bench.kernel.read_bandwidth", lambda backend, rounds: (1e10, [1e10] * rounds))


class WrongOp(CpuBackend):
    """Its products are a tenth too large where ops run alone."""

    def run_op(
        self, op: Op, spec: object, inputs: Sequence[Concrete], compute: ComputeChoice = "auto"
    ) -> tuple[Concrete, ...]:
        results = super().run_op(op, spec, inputs, compute)
        return tuple(r * 1.1 for r in results) if "linear" in op.name else results  # type: ignore[operator]


class WrongStep(CpuBackend):
    """Its ops are right, and its compiled steps take every token for the first of the vocabulary."""

    def compile(self, *args: Any, **more: Any) -> Any:
        step = super().compile(*args, **more)
        run = type(step).__call__

        class Forgetful(type(step)):  # type: ignore[misc]
            def __call__(self, inputs: Any, want: Any) -> Any:
                return run(self, replace(inputs, ids=np.zeros_like(inputs.ids)), want)

        step.__class__ = Forgetful
        return step


def test_a_figure_for_every_test_with_its_bytes_and_its_check(tiny: Path, backend: CpuBackend) -> None:
    figures = list(Session(backend, QUIET).model(str(tiny), TESTS))
    assert [f.test for f in figures] == ["pp20", "tg3", "tg3 x3 @ d8"]
    assert all(f.speed > 0 and len(f.samples) == 2 and f.low <= f.speed <= f.high for f in figures)
    assert all("ops" in f.checked for f in figures)
    assert figures[0].share == 0
    for f in figures[1:]:
        assert f.share == pytest.approx(f.bytes_per_step * f.speed / f.batch / 1e10)


@pytest.mark.parametrize("wrong", [WrongOp, WrongStep])
def test_no_speed_of_what_computes_wrongly(wrong: type[CpuBackend]) -> None:
    backend = wrong(threads=1)
    with pytest.raises(QuarrelError, match="no speed is reported|away from its reference"):
        list(Session(backend, QUIET).model("demo", TESTS))
    spoilt = list(Session(backend, replace(QUIET, keep_going=True)).model("demo", TESTS[1:2]))
    assert spoilt[0].checked.startswith("FAILED")
    backend.close()


@pytest.mark.parametrize("op", [LINEAR, LINEAR_ADD, NORM_LINEAR, NORM_GATE_UP, EXPERT_UP, EXPERT_DOWN], ids=repr)
def test_some_rows_of_a_map_are_the_same_rows_of_the_whole(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_rows, "ELEMENTS", 1)
    monkeypatch.setattr(bench_rows, "LEAST", 5)
    for case in op.cases():
        assert op.make is not None
        inputs = op.make(case, np.random.default_rng(1))
        whole = reference.run_op(op, case.spec, inputs)
        node, given, got = bench_rows.some_rows(Node(op, case.spec, (), ()), inputs, whole)
        for one, other in zip(reference.run_op(op, node.spec, given), got, strict=True):
            assert np.asarray(one).shape[-1] <= 5
            assert rel_error(np.asarray(one), np.asarray(other)) < 1e-6


def test_the_check_covers_one_layer_of_each_kind(tmp_path: Path) -> None:
    path = tmp_path / "hybrid.gguf"
    shape = load_shapes()["granite-4-h-tiny"]
    build(shape, "Q4_K_M", name="x", layers=7, vocab=None, seed=0)[0].write(path)
    with GGUFFile.open(path) as file:
        source = Source.of(file, 128)
        cut, layers = source.cut()
        kinds = {(source.spec.layers[i], _types(file, i)) for i in range(7)}  # type: ignore[union-attr]
        assert len(layers) == len(kinds) < 7
        assert {(source.spec.layers[i], _types(file, i)) for i in layers} == kinds  # type: ignore[union-attr]
        assert cut.cut()[0] is cut
        names = {i.name for n in cut.program.nodes for i in n.inputs if hasattr(i, "rows")}
        assert {n.split(".")[1] for n in names if n.startswith("blk.")} == {str(i) for i in range(len(layers))}
        traffic = Traffic.of(source.program, "float16")
        assert traffic.weights == sum(t.nbytes for t in file.tensors.values())
        experts = sum(t.nbytes for n, t in file.tensors.items() if "_exps." in n)
        assert traffic.step(1, 0) == pytest.approx(traffic.weights - experts * (1 - 6 / 64) + traffic.state)
        assert traffic.step(10_000, 0) == pytest.approx(traffic.weights + 10_000 * traffic.state)


@pytest.mark.parametrize("name", ["gemma4_e/model-q4_k_m.gguf", "gemma3n/model-q4_0x.gguf"])
def test_a_cut_model_keeps_whose_keys_are_read_and_what_is_of_each_layer(name: str) -> None:
    with GGUFFile.open(need_cases(*name.split("/"))) as file:
        source = Source.of(file, 128)
        cut, layers = source.cut()
        assert isinstance(source.spec, ModelSpec)
        assert isinstance(cut.spec, ModelSpec)
        mixers = [source.spec.layers[i].mixer for i in layers]
        reads = [None if m is None or m.reads is None else layers.index(m.reads) for m in mixers]
        assert [m and m.reads for m in (layer.mixer for layer in cut.spec.layers)] == reads
        assert any(reads)
        each = source.spec.per_layer
        whole, some = (
            s.tensors.file.array("per_layer_token_embd.weight").reshape(s.spec.n_vocab, -1, each)  # type: ignore[union-attr]
            for s in (source, cut)
        )
        assert np.array_equal(some, whole[:, layers])
        assert cut.program.nodes


def _types(file: GGUFFile, layer: int) -> tuple[tuple[str, object], ...]:
    found = ((n.split(".", 2)[2], t.type) for n, t in file.tensors.items() if n.startswith(f"blk.{layer}."))
    return tuple(sorted(found))


def test_bytes_of_an_untied_model_leave_the_embedding_out(tiny: Path) -> None:
    with GGUFFile.open(tiny) as file:
        traffic = Traffic.of(Source.of(file, 64).program, "float32")
        embedding = file.tensors["token_embd.weight"]
        rest = sum(t.nbytes for t in file.tensors.values()) - embedding.nbytes
        assert traffic.step(2, 10) == rest + 2 * (32 * 4 + 2 * 4 * 10 * 32)


def test_an_expert_model_is_measured(backend: CpuBackend) -> None:
    path = need_cases("granitehybrid", "model-q4_k_m.gguf")
    (figure,) = Session(backend, QUIET).model(str(path), [Work("decode", 2, 4, 2)])
    assert figure.architecture == "granitehybrid"


def test_an_encoder_reads_whole_texts(backend: CpuBackend) -> None:
    path = need_cases("bert", "model-q4_0x.gguf")
    (figure,) = Session(backend, QUIET).model(str(path), [Work("prefill", 24), Work("decode", 4)])
    assert figure.test == "pp24"
    assert figure.step_tokens >= 24


def test_prompts_are_cut_into_full_steps() -> None:
    layout = Layout(Limits(10, 3, 4, 12, 8), 100)
    steps = list(layout.prefill(2, 7, 3))
    assert [len(s.ids) for s in steps] == [10, 10, 1]
    assert [list(s.kv_len) for s in steps] == [[9, 5], [9, 8], [9]]
    ids = np.concatenate([s.ids for s in steps])
    assert np.array_equal(ids, np.concatenate([layout.ids(2, 7, s) for s in range(3)]))
    slots = np.concatenate([s.slots for s in steps])
    assert len(set(slots.tolist())) == 21
    for step in steps:
        step.check(layout.limits, 100)


def test_limits_leave_room_for_every_test() -> None:
    limits = limits_for([Work("decode", 10, 1000), Work("decode", 4, 100, 16)], 512, False)
    assert limits.max_seqs == 16
    assert limits.max_blocks_per_seq * 32 >= 1010
    assert limits.n_blocks >= 16 * 4
    Layout(limits, 50).decode(1009, 1, False).check(limits, 50)
    Layout(limits, 50).decode(103, 16, True).check(limits, 50)


def test_the_matrix_has_prompts_and_tokens_at_each_depth_then_batches() -> None:
    names = [t.name for t in matrix([8, 0], [4], [0, 9], [2], 5, True)]
    assert names == ["pp8", "tg4", "pp8 @ d9", "tg4 @ d9", "tg4 x2 @ d5", "engine4 x2 @ d5"]


def test_statistics_are_medians() -> None:
    found = statistics(10, [1.0, 2.0, 5.0])
    assert (found["speed"], found["spread"], found["low"], found["high"]) == (5.0, 3.0, 2.0, 10.0)


def test_the_command_writes_every_form(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, svg = tmp_path / "out.json", tmp_path / "plot.svg"
    common = ["-m", str(tiny), "--backend", "cpu", "--threads", "1", "-p", "8", "-n", "2", "-b", "2", "-r", "1"]
    common += ["--prompt-length", "4"]
    assert main([*common, "--out", str(out), "--plot", str(svg), "-o", "json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole == json.loads(out.read_text())
    assert whole["machine"]["versions"]["numpy"] == np.__version__
    calls = whole["explain"]["tiny on cpu"]["calls"]
    assert any(call["op"] == "attention" for call in calls)
    assert len([*ET.fromstring(svg.read_text()).iter("{http://www.w3.org/2000/svg}circle")]) == 3
    assert main([*common, "--vs", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 3
    assert lines[0].rstrip(" |").endswith("ratio")
    assert main([*common, "-o", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["test"] for row in rows] == ["pp8", "tg2", "tg2 x2 @ d4"]
    assert main([*common, "-o", "jsonl", "--no-check"]) == 0
    assert {json.loads(text)["checked"] for text in capsys.readouterr().out.splitlines()} == {"no"}


def test_the_engine_is_measured_end_to_end(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["-m", str(tiny), "--backend", "cpu", "-p", "0", "-n", "4", "--engine", "--prompt-length", "6", "-r", "1"]
    assert main([*command, "-o", "jsonl"]) == 0
    figures = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert [f["test"] for f in figures] == ["tg4", "engine4 @ d6"]


def test_errors_are_sentences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", str(tmp_path / "none.gguf"), "--backend", "cpu"]) == 1
    assert "none.gguf" in capsys.readouterr().err
    assert main(["-p", "0", "-n", "0", "--backend", "cpu"]) == 1
    assert "nothing to measure" in capsys.readouterr().err
    (tmp_path / "old.json").write_text("[1]")
    with pytest.raises(RequestError, match="holds no figures"):
        earlier(tmp_path / "old.json")
    with pytest.raises(RequestError, match="none.json cannot be read: No such file"):
        earlier(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("-p 513 -n 0", "pp513 takes 513 tokens and the context of demo holds 512"),
        ("-p 0 -n 3 -d 510,511", "tg3 @ d510 takes 513 tokens and the context of demo holds 512"),
        ("-p 500 -n 0 -d 20 --jobs 2", "pp500 @ d20 takes 520 tokens and the context of demo holds 512"),
    ],
)
def test_what_no_context_holds_is_told_before_anything_is_measured(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--backend", "cpu", "-m", "demo", *line.split()]) == 1
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith(f"quarrel.bench: {said}: ask for shorter prompts")
    assert streams.err.count("\n") == 1


def test_what_does_not_fit_the_context_is_skipped_and_the_rest_measured(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--backend cpu -m demo -p 8 -n 2 -d 0,505 -r 1 --no-check --step-tokens 64 -o jsonl"
    assert main(line.split()) == 0
    streams = capsys.readouterr()
    assert [json.loads(text)["test"] for text in streams.out.splitlines()] == ["pp8", "tg2", "tg2 @ d505"]
    assert "pp8 @ d505 takes 513 tokens and the context of demo holds 512: skipped\n" in streams.err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("-p many", "'many' is no whole number"),
        ("-p -5", "-5 is below 0"),
        ("-b 0", "0 is below 1"),
        ("--op linear --rows 0", "0 is below 1"),
        ("--op linear --shape 4096", "'' is no whole number"),
        ("--out nowhere/figures.json", "there is no folder 'nowhere'"),
        ("--plot nowhere/speed.svg", "there is no folder 'nowhere'"),
    ],
)
def test_a_wrong_command_line_is_told_before_anything_is_measured(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(line.split())
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


def test_ratios_are_against_the_same_test(tiny: Path, backend: CpuBackend) -> None:
    figures = list(Session(backend, QUIET).model(str(tiny), TESTS[:2]))
    before = {figures[0].key: figures[0].speed / 2}
    lines = table(figures, before).splitlines()
    assert lines[2].rstrip(" |").endswith("2.000")
    assert lines[3].rstrip(" |").endswith("new")


def test_one_kernel_alone(backend: CpuBackend) -> None:
    figure = time_linear(backend, "q4_k", 256, 512, 3, replace(QUIET, rounds=1))
    assert (figure.model, figure.test) == ("linear Q4_K 256x512", "3 rows")
    assert figure.bytes_per_step == 512 * 144
    with pytest.raises(RequestError, match="no multiple of 256"):
        time_linear(backend, "q4_k", 100, 8, 1, QUIET)
    with pytest.raises(RequestError, match="no block format"):
        time_linear(backend, "q9", 256, 8, 1, QUIET)
    with pytest.raises(QuarrelError, match="no speed is reported"):
        time_linear(WrongOp(threads=1), "q8_0", 256, 64, 1, QUIET)


def test_a_plot_of_nothing_says_so() -> None:
    assert plot([]).count("not measured") == 2


def test_the_tests_are_shared_out_and_a_failure_leaves_the_measurement_to_tell(
    tiny: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    jobs = jobs_for(str(tiny), "cpu", "auto", 16, TESTS, True, 3)
    shared = sorted((t if isinstance(t, str) else t.name) for job in jobs for t in job.mine)
    assert shared == ["ops", "pp20", "steps", "tg3", "tg3 x3 @ d8"]
    assert precompile([*jobs[:2], Job("none.gguf", "cpu", "auto", 16, tuple(TESTS), ("ops",))], 2) > 0
    said = capfd.readouterr().out
    assert "warm-up of none.gguf" in said
    assert said.count("warm-up") == 1


def test_a_deadline_ends_the_session(tiny: Path, backend: CpuBackend) -> None:
    figures: list[Figure] = list(Session(backend, replace(QUIET, deadline=0.0)).model(str(tiny), TESTS))
    assert figures == []


def test_what_was_read_from_a_cache_is_no_share_of_the_bandwidth() -> None:
    figure = Figure(
        *(
            "demo",
            "llama",
            1,
            "cpu",
            "cpu",
            "int8",
            "tg16",
            "decode",
            16,
            0,
            1,
            900.0,
            1.0,
            890.0,
            910.0,
            (900.0,),
            0.1,
            0.1,
        ),
        *(512, 11_000_000, 9.0, 1.1, "no", "0.1.0"),
    )
    assert brief(figure) == "demo: tg16 900.0 ± 1.0 tokens/s, above 9 GB/s: cached"
    assert brief(replace(figure, share=0.5)).endswith("50.0% of 9 GB/s")
