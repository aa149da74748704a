"""Weights of other types: which, how good, and what an interrupted run leaves."""

from __future__ import annotations

import importlib
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from quarrel.cli import main
from quarrel.cli.commands import TYPES
from quarrel.errors import GGUFError, RequestError
from quarrel.gguf import GGMLType, GGUFFile, GGUFWriter, quantize
from quarrel.gguf.lock import locked
from quarrel.gguf.mixes import MIXES, types_of
from quarrel.gguf.requantize import requantize
from tests.paths import CASE_SETS, need_cases

MODULE = importlib.import_module("quarrel.gguf.requantize")


def small(path: Path, scale: float = 1.0, seed: int = 0) -> Path:
    """A file of one layer in float32, as if it were the first of several."""
    writer, rng = GGUFWriter(), np.random.default_rng(seed)
    writer.add("general.architecture", "llama")
    writer.add("general.file_type", 0)
    writer.add("split.count", 1)
    writer.add("llama.block_count", 1)
    writer.add("tokenizer.ggml.tokens", ["a", "b"])
    for name in ("token_embd", "blk.0.attn_q", "blk.0.ffn_down", "blk.0.ffn_gate_inp", "output"):
        writer.add_tensor(f"{name}.weight", (rng.standard_normal((6, 512)) * scale).astype(np.float32))
    writer.add_tensor("output_norm.weight", np.ones(512, np.float32))
    writer.write(path)
    return path


def test_types_are_those_that_llama_cpp_chose() -> None:
    need_cases()
    pairs = [(p.with_name("model-q4_0x.gguf"), p) for s in CASE_SETS for p in sorted(s.glob("*/model-q4_k_m.gguf"))]
    for exact, theirs in pairs:
        if exact.exists():
            with GGUFFile.open(exact) as source, GGUFFile.open(theirs) as wanted:
                assert types_of(source, "q4_k_m") == {n: t.type for n, t in wanted.tensors.items()}, theirs


def test_values_are_as_near_as_those_of_llama_cpp(tmp_path: Path) -> None:
    with (
        GGUFFile.open(need_cases("llama32", "model-q4_0x.gguf")) as exact,
        GGUFFile.open(need_cases("llama32", "model-q4_k_m.gguf")) as theirs,
    ):
        requantize(exact, tmp_path / "ours.gguf", "Q4_K_M", again=True)
        with GGUFFile.open(tmp_path / "ours.gguf") as ours:
            for kind in (GGMLType.Q4_K, GGMLType.Q6_K):
                names = [name for name, info in ours.tensors.items() if info.type is kind]
                mine, other = (sum(((f.array(n) - exact.array(n)) ** 2).sum() for n in names) for f in (ours, theirs))
                assert 0 < mine <= 1.005 * other, kind


def test_another_reader_sees_keys_and_blocks(tmp_path: Path) -> None:
    with GGUFFile.open(small(tmp_path / "in.gguf")) as source:
        size = requantize(source, tmp_path / "out.gguf", "q5_k_s")
        assert size == (tmp_path / "out.gguf").stat().st_size
        other = gguf.GGUFReader(tmp_path / "out.gguf")
        found = {t.name: t for t in other.tensors}
        assert {n: t.tensor_type.name for n, t in found.items()} == {
            "token_embd.weight": "Q5_K",
            "blk.0.attn_q.weight": "Q5_K",
            "blk.0.ffn_down.weight": "Q5_K",
            "blk.0.ffn_gate_inp.weight": "F32",
            "output.weight": "Q6_K",
            "output_norm.weight": "F32",
        }
        made = quantize(source.array("blk.0.attn_q.weight"), GGMLType.Q5_K)
        assert np.array_equal(found["blk.0.attn_q.weight"].data.reshape(made.shape), made)
    keys = {k: f.contents() for k, f in other.fields.items() if not k.startswith("GGUF.")}
    assert keys == {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "tokenizer.ggml.tokens": ["a", "b"],
        "general.quantization_version": 2,
        "general.file_type": 16,
    }
    assert not list(tmp_path.glob("*.part*"))


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "PIECE", 1024)
    made: list[str] = []
    piece = MODULE._piece
    monkeypatch.setattr(MODULE, "_piece", lambda file, info, *rest: (made.append(info.name), piece(file, info, *rest))[1])
    target = tmp_path / "out.gguf"

    def stop(done: int, total: int) -> None:
        assert 0 < done <= total
        if done > total / 2:
            raise KeyboardInterrupt

    with GGUFFile.open(small(tmp_path / "in.gguf")) as source:
        requantize(source, tmp_path / "whole.gguf", "q8_0")
        pieces = len(made)
        with pytest.raises(KeyboardInterrupt):
            requantize(source, target, "q8_0", progress=stop)
        assert not target.exists()
        made.clear()
        requantize(source, target, "q8_0")
        assert 0 < len(made) < pieces
        assert target.read_bytes() == (tmp_path / "whole.gguf").read_bytes()
        target.unlink()
        with pytest.raises(KeyboardInterrupt):
            requantize(source, target, "q8_0", progress=stop)
    made.clear()
    with GGUFFile.open(small(tmp_path / "other.gguf", seed=1)) as other:
        requantize(other, target, "q8_0")
    assert len(made) == pieces, "another model's pieces were taken for this one's"
    assert not list(tmp_path.glob("*.part*"))


def test_what_is_refused(tmp_path: Path) -> None:
    path = small(tmp_path / "in.gguf")
    with GGUFFile.open(path) as source:
        with pytest.raises(RequestError, match="'q9' is|type is 'q9', wanted one of f32"):
            requantize(source, tmp_path / "out.gguf", "q9")
        with pytest.raises(RequestError, match="is there already"):
            requantize(source, path, "q8_0")
        requantize(source, tmp_path / "q4.gguf", "q4_0")
    with GGUFFile.open(tmp_path / "q4.gguf") as lossy:
        with pytest.raises(RequestError, match="is Q4_0 already"):
            requantize(lossy, tmp_path / "out.gguf", "q8_0")
    with GGUFFile.open(small(tmp_path / "large.gguf", 1e6)) as large:
        with pytest.raises(GGUFError, match=r"the tensor token_embd\.weight: Q8_0 holds values up to 65504"):
            requantize(large, tmp_path / "out.gguf", "q8_0")


def test_the_command_says_what_it_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = str(small(tmp_path / "in.gguf")), str(tmp_path / "out.gguf")
    assert main(["quantize", source, target, "Q8_0", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["bytes"] == Path(target).stat().st_size
    assert 8.5 < said["bits_per_weight"] < 40
    assert main(["quantize", source, target, "Q8_0"]) == 1
    assert "is there already" in capsys.readouterr().err
    again = str(tmp_path / "again.gguf")
    assert main(["quantize", target, again, "q4_0"]) == 0
    capsys.readouterr()
    assert main(["quantize", again, str(tmp_path / "more.gguf"), "q8_0"]) == 1
    assert "F32 or Q8_0, or say --again\n" in capsys.readouterr().err
    assert main(["quantize", source, str(tmp_path / "none.gguf"), "q9"]) == 1
    assert "the type is 'q9', wanted one of f32" in capsys.readouterr().err
    assert main(["quantize", source, str(tmp_path / "none.gguf"), "iq2_xs"]) == 1
    assert "make one with `quarrel imatrix` and give it to `quarrel quantize` with --imatrix," in capsys.readouterr().err
    assert set(re.split(", | or |; with --imatrix ", TYPES)) == set(MIXES)


def test_one_process_at_a_time_writes_a_file(tmp_path: Path) -> None:
    target, note = tmp_path / "out.gguf", tmp_path / "out.gguf.part.json"
    with GGUFFile.open(small(tmp_path / "in.gguf")) as source:
        with note.open("a+") as other:
            assert locked(other.fileno())
            with pytest.raises(RequestError, match=r"another process is writing .*out\.gguf\.part: wait for it"):
                requantize(source, target, "q8_0")
            assert not (tmp_path / "out.gguf.part").exists()
        requantize(source, target, "q8_0")
    assert not list(tmp_path.glob("*.part*"))


def test_a_disk_that_is_too_small_is_said_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10000, 9999, 1))
    with GGUFFile.open(small(tmp_path / "in.gguf")) as source:
        with pytest.raises(RequestError, match=r"will have \d+ bytes, \d+ of which are there, and its disk has 1 free"):
            requantize(source, tmp_path / "out.gguf", "q8_0")
        with pytest.raises(RequestError, match="there is no folder"):
            requantize(source, tmp_path / "none" / "out.gguf", "q8_0")


def test_a_disk_that_fills_up_keeps_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(MODULE, "PIECE", 512)
    target, part = tmp_path / "out.gguf", tmp_path / "out.gguf.part"
    with GGUFFile.open(small(tmp_path / "in.gguf")) as source:
        size = requantize(source, tmp_path / "whole.gguf", "q8_0")
        old = resource.getrlimit(resource.RLIMIT_FSIZE)
        for share in (3, 2):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size // share, old[1]))
            try:
                with pytest.raises(RequestError, match="make room and run it again: it goes on there") as caught:
                    requantize(source, target, "q8_0")
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, old)
            assert f"ends at {size // share} of {size} bytes" in str(caught.value)
            assert part.stat().st_size == size // share
            assert not target.exists()
        requantize(source, target, "q8_0")
    assert target.read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    assert not list(tmp_path.glob("*.part*"))


KILLED = """
import importlib, sys, time
from pathlib import Path
from quarrel.gguf import GGUFFile
module = importlib.import_module("quarrel.gguf.requantize")
module.PIECE, module.MOST_THREADS = 512, 2
with GGUFFile.open(Path(sys.argv[1])) as source:
    module.requantize(source, Path(sys.argv[2]), "q8_0", progress=lambda done, total: time.sleep(0.02))
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="wants kill -9")
def test_a_run_that_was_killed_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    path, target = small(tmp_path / "in.gguf"), tmp_path / "out.gguf"
    part, rng = tmp_path / "out.gguf.part", random.Random(0)
    with GGUFFile.open(path) as source:
        size = requantize(source, tmp_path / "whole.gguf", "q8_0")
        begun = 0
        for _ in range(3):
            process = subprocess.Popen([sys.executable, "-c", KILLED, str(path), str(target)])
            wanted = begun + rng.randint(1, (size - begun) // 2)
            while process.poll() is None and (not part.exists() or part.stat().st_size < wanted):
                time.sleep(0.001)
            process.kill()
            assert process.wait() == -signal.SIGKILL
            assert part.stat().st_size >= begun, "it began anew"
            begun = part.stat().st_size
        assert not target.exists()
        requantize(source, target, "q8_0")
    assert target.read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_float16_refuses_what_it_cannot_hold(tmp_path: Path) -> None:
    with GGUFFile.open(small(tmp_path / "large.gguf", 1e6)) as large:
        with pytest.raises(GGUFError, match=r"the tensor token_embd\.weight: F16 holds values up to 65504"):
            requantize(large, tmp_path / "out.gguf", "f16")
        requantize(large, tmp_path / "out.gguf", "bf16")
