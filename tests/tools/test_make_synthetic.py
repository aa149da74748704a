"""The synthetic models have the types, shapes and keys of real ones, and the same bytes for the same seed."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quarrel.bench.subject import Source
from quarrel.gguf import GGMLType, GGUFFile
from quarrel.ops.contract import WeightRef
from quarrel.tokenizer import load_tokenizer
from tests.paths import need_cases
from tools import make_synthetic
from tools.make_synthetic import QUANTS, build, load_shapes, tensor_type

SHAPES = load_shapes()
MIXED = [
    "mistral",
    "mixtral",
    "smollm2",
    "llama32",
    "granite4micro",
    "granitehybrid",
    "nemotron",
    "nemotron_h_moe",
    "qwen3moe",
]


def write(tmp_path: Path, name: str, quant: str, layers: int, seed: int = 0, vocab: Path | None = None) -> Path:
    writer, _ = build(SHAPES[name], quant, name=name, layers=layers, vocab=vocab, seed=seed)
    path = tmp_path / f"{name}-{quant}-{layers}-{seed}.gguf"
    writer.write(path)
    return path


@pytest.mark.parametrize("case", MIXED)
def test_types_are_those_of_llama_quantize(case: str) -> None:
    with GGUFFile.open(need_cases(case, "model-q4_k_m.gguf")) as file:
        arch = file.metadata.str("general.architecture")
        n_layers = file.metadata.int(f"{arch}.block_count")
        experts = file.metadata.int(f"{arch}.expert_count", 0)
        attn_v = sorted(int(name.split(".")[1]) for name in file.tensors if ".attn_v.weight" in name)
        checked = 0
        for name, info in file.tensors.items():
            if info.type is GGMLType.F32:
                continue
            layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
            place = (attn_v.index(layer), len(attn_v)) if ".attn_v." in name else (layer, n_layers)
            wanted = tensor_type("Q4_K_M", name, info.dims[0], place, experts, "output.weight" not in file.tensors)
            assert info.type is wanted, name
            checked += 1
        assert checked > 10


@pytest.mark.parametrize("quant", QUANTS)
def test_every_quant_opens_and_holds_sane_weights(tmp_path: Path, quant: str) -> None:
    shape = SHAPES["smollm2-135m"]
    small = replace(shape, vocab={**shape.vocab, "size": 2048})  # 28 million values of an embedding are no better a sample
    path = tmp_path / "model.gguf"
    build(small, quant, name="small", layers=1, vocab=None, seed=0)[0].write(path)
    with GGUFFile.open(path) as file:
        assert file.metadata.int("llama.block_count") == 1
        assert file.metadata.int("general.file_type") == QUANTS[quant][1]
        for name, std in [("token_embd.weight", 0.02), ("blk.0.attn_q.weight", 0.02), ("blk.0.ffn_down.weight", 0.005)]:
            values = file.array(name)
            assert np.isfinite(values).all()
            assert values.std() == pytest.approx(std, rel=0.05)
            assert abs(values.mean()) < std / 50
        rows = file.raw("blk.0.attn_q.weight")
        assert len({row.tobytes() for row in rows}) == len(rows)


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_agrees_with_its_own_keys(name: str) -> None:
    shape = SHAPES[name]
    _, plan = build(shape, "Q4_K_M", name=name, layers=len(shape.layers), vocab=None, seed=0)
    tensors = {tensor.name: tensor for tensor in plan.tensors}
    assert len(tensors) == len(plan.tensors)
    keys = make_synthetic.model_keys(shape, plan.layers, plan.vocab)
    width = keys["embedding_length"]
    assert tensors["token_embd.weight"].shape == (shape.vocab["size"], width)
    for i, parts in enumerate(plan.layers):
        names = {tensor.split(".")[2] for tensor in tensors if tensor.startswith(f"blk.{i}.")}
        attends = "attn_output" in names
        assert (attends, "ssm_in" in names) == (any(c in parts for c in "awl"), "m" in parts or "s" in parts)
        assert ("ssm_beta" in names, "shortconv" in names) == ("g" in parts, "c" in parts)
        assert (bool({"ffn_up_exps", "ffn_gate_up_exps"} & names), "ffn_up" in names) == ("e" in parts, "d" in parts)
    assert make_synthetic.report(plan).startswith(f"{len(tensors)} tensors")


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_runs_and_its_vocabulary_loads(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    small = replace(shape, vocab={**shape.vocab, "size": max(map(int, shape.vocab["special"])) + 1 + 1024})
    layers = 2 if len(set(shape.layers)) == 1 else 1 + max(shape.layers.index(word) for word in set(shape.layers))
    if shape.experts:
        small = replace(small, experts=min(8, shape.experts), experts_used=2)
    writer, plan = build(small, "Q4_K_M", name=name, layers=layers, vocab=None, seed=0)
    path = tmp_path / "model.gguf"
    header, starts = writer.layout()
    with path.open("wb") as stream:  # no matrices: names, shapes and keys are what counts here
        stream.write(header)
        stream.truncate(starts[plan.tensors[-1].name] + plan.tensors[-1].nbytes)
        for tensor in plan.tensors:
            if tensor.nbytes < 1 << 12:
                stream.seek(starts[tensor.name])
                stream.write(tensor.piece(0, 0))
    with GGUFFile.open(path) as file:
        source = Source.of(file, 64)
        nodes = source.program.nodes
        refs = {i.name for node in nodes for i in node.inputs if isinstance(i, WeightRef)}
        used = {name.partition("[")[0].partition("*")[0] for name in refs}  # parts, and what is scaled
        numbers = {t.name for t in plan.tensors if t.name.endswith("layer_output_scale.weight")}  # part of the program
        assert {t.name for t in plan.tensors} - used - numbers <= {"rope_freqs.weight"}
        load_tokenizer(file.metadata)


def test_released_parameter_counts() -> None:
    billions = {"smollm2-135m": 0.1345, "tinyllama-1.1b": 1.1, "mistral-7b": 7.248, "llama-8b": 8.03, "mixtral-8x7b": 46.7}
    billions |= {"nemotron-mini-4b": 4.19, "qwen2.5-7b": 7.62, "qwen3-8b": 8.19, "qwen3-30b-a3b": 30.5, "phi-3-mini": 3.82}
    billions |= {
        "gemma-2-2b": 2.61,
        "mamba-2.8b": 2.77,
        "mamba2-2.7b": 2.70,
        "minilm": 0.02257,
        "nomic-embed-text-v1.5": 0.1367,
    }
    billions |= {"gpt-oss-20b": 20.9, "nemotron-3-nano-30b-a3b": 31.6, "granite-4-h-tiny": 6.94, "granite-4-micro": 3.4}
    billions |= {"glm-4.7-flash": 29.9, "gemma-4-26b-a4b": 25.2, "gemma-4-e4b": 7.46}
    billions |= {"qwen3.6-35b-a3b": 34.7, "qwen3.5-9b": 8.95, "lfm2-8b-a1b": 8.34}
    for name, wanted in billions.items():
        plan = build(SHAPES[name], "Q8_0", name=name, layers=len(SHAPES[name].layers), vocab=None, seed=0)[1]
        assert sum(np.prod(t.shape, dtype=np.int64) for t in plan.tensors) / 1e9 == pytest.approx(wanted, rel=0.005)


def test_the_seed_decides_the_bytes_and_the_layer_count_does_not(tmp_path: Path) -> None:
    def digests(path: Path) -> dict[str, str]:
        with GGUFFile.open(path) as file:
            return {name: hashlib.sha256(file.raw(name).tobytes()).hexdigest() for name in file.tensors}

    one = digests(write(tmp_path, "smollm2-135m", "Q4_0", 1, seed=1))
    two = digests(write(tmp_path, "smollm2-135m", "Q4_0", 2, seed=1))
    other = digests(write(tmp_path, "smollm2-135m", "Q4_0", 1, seed=2))
    assert one == {name: two[name] for name in one}
    assert all((one[name] == other[name]) == ("norm" in name) for name in one)


def test_large_tensors_come_in_small_pieces() -> None:
    _, plan = build(SHAPES["gpt-oss-20b"], "F16", name="gpt-oss-20b", layers=1, vocab=None, seed=0)
    embedding = next(tensor for tensor in plan.tensors if tensor.name == "token_embd.weight")
    assert 0 < embedding.piece(0, 0).nbytes <= make_synthetic.PIECE_BYTES
    assert embedding.piece_bytes % make_synthetic.unit(embedding.type) == 0
    assert embedding.n_pieces > 1


def test_several_processes_write_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_synthetic, "PIECE_BYTES", 100_000)
    writer, plan = build(SHAPES["smollm2-135m"], "Q4_K_M", name="x", layers=1, vocab=None, seed=3)
    writer.write(tmp_path / "one.gguf")
    size = make_synthetic.write(writer, plan, 3, tmp_path / "many.gguf", jobs=3)
    assert (tmp_path / "many.gguf").stat().st_size == size
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "many.gguf").read_bytes()


def test_a_borrowed_vocabulary_is_copied_whole(tmp_path: Path) -> None:
    vocab = need_cases("tinyllama", "model-q4_0x.gguf")
    path = write(tmp_path, "smollm2-135m", "Q4_0", 1, vocab=vocab)
    with GGUFFile.open(vocab) as source, GGUFFile.open(path) as copy:
        keys = [key for key in source.metadata if key.startswith("tokenizer.")]
        assert keys
        assert {key: source.metadata[key] for key in keys} == {key: copy.metadata[key] for key in keys}
        assert {key: source.metadata.kind(key) for key in keys} == {key: copy.metadata.kind(key) for key in keys}
        assert copy.tensors["token_embd.weight"].shape[0] == 32000


def test_dry_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model.gguf"
    monkeypatch.setattr(sys, "argv", ["make_synthetic.py", "smollm2-135m", "Q8_0", str(out), "--layers", "2", "--dry"])
    make_synthetic.main()
    assert "read per decoded token" in capsys.readouterr().out
    assert not out.exists()
