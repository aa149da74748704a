"""Folders in safetensors: what becomes of number formats, shards and experts, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quarrel
from quarrel.cli import main
from quarrel.convert.config import Config
from quarrel.convert.floats import float32
from quarrel.convert.folder import FolderFile
from quarrel.convert.registry import CLASSES, architecture
from quarrel.convert.safetensors import INDEX
from quarrel.errors import ModelError, QuarrelError, RequestError, UnsupportedModel
from quarrel.gguf import GGMLType, GGUFFile, dequantize, quantize
from quarrel.gguf.requantize import requantize
from tests.convert.folders import (
    LLAMA,
    bfloat16,
    llama_folder,
    llama_shapes,
    weights,
    write_safetensors,
    write_tokenizer,
)
from tests.convert.test_references import folder_of, references
from tests.gguf.test_requantize import MODULE
from tests.sight import WHOLE

UP = "model.layers.0.mlp.up_proj.weight"


def rewritten(folder: Path, types: dict[str, str] | None = None, **changed: np.ndarray | None) -> Path:
    """The folder's weights with others in their place; None takes one away."""
    tensors = {name: weights(name, shape) for name, shape in llama_shapes().items()}
    given = {name.replace("__", "."): values for name, values in changed.items()}
    tensors = {**tensors, **{n: v for n, v in given.items() if v is not None}}
    kept = {n: v for n, v in tensors.items() if given.get(n, v) is not None}
    write_safetensors(folder / "model.safetensors", kept, types)
    return folder


def test_bfloat16_and_float16_stay_and_vectors_become_float32(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "m")
    exact = {name: weights(name, shape) for name, shape in llama_shapes().items()}
    for cast, dtype, type in ((bfloat16, "BF16", GGMLType.BF16), (np.float16, "F16", GGMLType.F16)):
        write_safetensors(folder / "model.safetensors", {n: cast(v) for n, v in exact.items()})  # type: ignore[operator]
        with FolderFile(folder) as file:
            assert file.tensors["blk.0.ffn_up.weight"].type is type
            assert file.tensors["blk.0.attn_norm.weight"].type is GGMLType.F32
            stored = float32(cast(exact[UP]), dtype)  # type: ignore[operator]
            assert np.array_equal(file.array("blk.0.ffn_up.weight"), stored)
            assert np.array_equal(file.raw("blk.0.ffn_up.weight"), quantize(stored, type))
            turned = stored = float32(cast(exact["model.layers.0.self_attn.q_proj.weight"]), dtype)  # type: ignore[operator]
            turned = stored.reshape(4, 2, 8, 64).swapaxes(1, 2).reshape(64, 64)
            assert np.array_equal(file.array("blk.0.attn_q.weight"), turned)
            assert np.array_equal(file.values("blk.0.attn_q.weight", 17, 50), turned[17:50])


def test_scales_of_8_bit_floats_by_block_by_row_and_in_all(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "m", quantization_config={"quant_method": "fp8", "weight_block_size": [40, 24]})
    codes = np.arange(96 * 64, dtype=np.uint32).reshape(96, 64).astype(np.uint8) & 0x7E
    plain = float32(codes, "F8_E4M3")
    assert plain[0, 0x38] == 1
    assert plain[0, 0x3C] == 1.5
    assert plain[0, 1] == 0
    assert float32(np.array([1, 0x7E, 0xFE], np.uint8), "F8_E4M3").tolist() == [2**-9, 448, -448]
    blocks = weights("scale", (3, 3))
    by_block = plain * np.repeat(np.repeat(blocks, 40, 0)[:96], 24, 1)[:, :64]
    by_row, whole = weights("rows", (96, 1)), np.float32(0.3)
    for name, scale, wanted in (
        (f"{UP}_scale_inv", blocks, by_block),
        (f"{UP}_scale", by_row, plain * by_row),
        (f"{UP}_scale", whole.reshape(1), plain * whole),
    ):
        rewritten(folder, {UP: "F8_E4M3"}, **{UP: codes, name: scale})
        with FolderFile(folder) as file:
            assert file.tensors["blk.0.ffn_up.weight"].type is GGMLType.BF16
            assert np.allclose(file.values("blk.0.ffn_up.weight", 30, 90), wanted[30:90], rtol=1e-6)
    query = "model.layers.0.self_attn.q_proj.weight"  # whose rows take another order
    rewritten(folder, {query: "F8_E4M3"}, **{query: codes[:64], f"{query}_scale_inv": blocks[:2]})
    dense = plain[:64] * np.repeat(np.repeat(blocks[:2], 40, 0)[:64], 24, 1)[:, :64]
    with FolderFile(folder) as file:
        turned = dense.reshape(4, 2, 8, 64).swapaxes(1, 2).reshape(64, 64)
        assert np.array_equal(file.values("blk.0.attn_q.weight", 5, 60), turned[5:60])
    rewritten(folder, {UP: "F8_E4M3"}, **{UP: codes, f"{UP}_scale_inv": weights("s", (2, 3))})
    with pytest.raises(ModelError, match="with scales"), FolderFile(folder) as file:
        file.array("blk.0.ffn_up.weight")


def test_mxfp4_stays_as_it_is(tmp_path: Path) -> None:
    folder = folder_of("gptoss", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    values = weights("codes", (config["num_local_experts"], 2 * config["intermediate_size"], config["hidden_size"]))
    blocks = quantize(values, GGMLType.MXFP4)
    pairs = blocks.reshape(*blocks.shape[:2], -1, 17)
    low, high = pairs[..., 1:] & 15, pairs[..., 1:] >> 4
    order = np.concatenate([low, high], -1)
    stored = order[..., 0::2] | order[..., 1::2] << 4
    shapes = references()["gptoss"]["stored"]
    name = next(n for n in shapes if n.endswith("layers.0.mlp.experts.gate_up_proj"))
    tensors = {n: weights(n, s) for n, s in shapes.items() if n != name}
    tensors |= {f"{name}_blocks": stored, f"{name}_scales": np.ascontiguousarray(pairs[..., 0])}
    write_safetensors(folder / "model.safetensors", tensors)
    with FolderFile(folder) as file:
        for start, part in enumerate(("gate", "up")):
            info = file.tensors[f"blk.0.ffn_{part}_exps.weight"]
            assert info.type is GGMLType.MXFP4
            wanted = dequantize(blocks, GGMLType.MXFP4)[:, start::2]
            assert np.array_equal(file.array(info.name), wanted)
        requantize(file, tmp_path / "out.gguf", "q8_0")
    with GGUFFile.open(tmp_path / "out.gguf") as made:
        assert made.tensors["blk.0.ffn_up_exps.weight"].type is GGMLType.MXFP4


def test_shards_and_what_is_missing_among_them(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "m")
    whole = FolderFile(folder).array("blk.1.ffn_down.weight")
    tensors = {name: weights(name, shape) for name, shape in llama_shapes().items()}
    places = {name: f"model-0000{1 + ('layers.1.' in name)}-of-00002.safetensors" for name in tensors}
    for file_name in set(places.values()):
        write_safetensors(folder / file_name, {n: v for n, v in tensors.items() if places[n] == file_name})
    (folder / "model.safetensors").unlink()
    index = folder / INDEX
    index.write_text(json.dumps({"weight_map": places}))
    with FolderFile(folder) as file:
        assert np.array_equal(file.array("blk.1.ffn_down.weight"), whole)
    for wrong, said in (
        ({**places, UP: "../elsewhere.safetensors"}, "wanted a safetensors file of the same folder"),
        ({**places, UP: "/etc/passwd"}, "wanted a safetensors file of the same folder"),
        ({**places, UP: "model-00003-of-00002.safetensors"}, "lacks model-00003-of-00002.safetensors"),
        ({**places, "model.more": places[UP]}, "which has no such tensor"),
        ({**places, UP: "model-00002-of-00002.safetensors"}, "which has no such tensor"),
        ({}, "has no weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": wrong}))
        with pytest.raises(ModelError, match=said):
            FolderFile(folder)


def _header(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def changed(data: bytes) -> bytes:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + size :]

    return changed


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data[:-1], "it is cut short"),
        (lambda data: data[:200], "it is no safetensors file, or cut short"),
        (lambda data: data[:4], "it is no safetensors file, or cut short"),
        (lambda data: b"", "is empty"),
        (lambda data: b"\xff" * 8 + data[8:], "its header claims"),
        (lambda data: data[:8] + b"[" + data[9:], "is no JSON object"),
        (_header(lambda h: h[UP].update(dtype="F4")), "has type 'F4', wanted one of"),
        (_header(lambda h: h[UP].update(shape=[96, -64])), "which is none"),
        (_header(lambda h: h[UP].update(shape=[96, 65])), r"but F32 \[96, 65\] has 24960 bytes"),
        (_header(lambda h: h[UP].update(data_offsets=[4, 1 << 50])), "has 24576 bytes"),
        (_header(lambda h: h[UP].pop("dtype")), "has no dtype, shape and data_offsets"),
        (_header(lambda h: h[UP].update(data_offsets=h["model.norm.weight"]["data_offsets"])), "has 24576 bytes"),
        (_header(lambda h: h.update({"x": h[UP]})), "overlap"),
    ],
)
def test_an_unsound_file_is_refused(change: Callable[[bytes], bytes], said: str, tmp_path: Path) -> None:
    path = llama_folder(tmp_path / "m") / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ModelError, match=said):
        FolderFile(path.parent)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"architectures": ["WhisperForConditionalGeneration"]},
            "is 'WhisperForConditionalGeneration', a model that writes down speech; Quarrel runs language models",
        ),
        ({"architectures": ["OddForCausalLM"]}, "is 'OddForCausalLM'; this version converts"),
        ({"architectures": None}, "config.json has no architectures, which names the model's class"),
        ({"architectures": []}, "config.json has no architectures, which names the model's class"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised already, by gptq, and would lose more"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised already, by awq"),
        ({"quantization_config": [1]}, "wanted an object"),
        ({"num_attention_heads": 5}, "does not fit the sizes that config.json tells"),
        ({"num_attention_heads": "four"}, "has num_attention_heads four, wanted an integer"),
        ({"num_attention_heads": 0}, "does not fit the sizes"),
        ({"hidden_size": None}, "has no hidden_size, and the model cannot be converted without it"),
        ({"rope_scaling": {"rope_type": "magic", "factor": 2}}, "stretched by 'magic'"),
        ({"rope_scaling": [2]}, "has rope_parameters"),
        ({"num_hidden_layers": 1}, "has no place in this architecture"),
        ({"num_hidden_layers": 3}, "block_count"),
        ({"num_hidden_layers": -1}, "has num_hidden_layers -1, wanted 1 to 4096"),
        ({"num_hidden_layers": 10**9}, "has num_hidden_layers 1000000000, wanted 1 to 4096"),
        ({"head_dim": 10**12, "rope_scaling": {"rope_type": "llama3"}}, "has head_dim 1000000000000, wanted up to 65536"),
        ({"vocab_size": "x"}, ""),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "m", **changes)
    if not said:
        FolderFile(folder).close()  # the embedding tells
        return
    with pytest.raises(QuarrelError, match=said) as caught:
        quarrel.load(folder, backend="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "does"),
    [
        ("Wav2Vec2ForCTC", "writes down speech"),
        ("VitsModel", "speaks or makes music"),
        ("CsmForConditionalGeneration", "speaks or makes music"),
        ("SiglipModel", "sees"),
        ("FluxTransformer2DModel", "makes images or videos"),
        ("T5ForConditionalGeneration", "reads a text into an encoder before it writes another"),
        ("LLaDAModelLM", "writes all words of a text at once, by diffusion"),
        ("Chronos2Model", "continues rows of numbers"),
    ],
)
def test_models_that_are_none_of_text_are_refused_by_name(
    name: str, does: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = llama_folder(tmp_path / "m", architectures=[name])
    said = f"is '{name}', a model that {does}; Quarrel runs language models and encoders of text: choose one of those"
    with pytest.raises(UnsupportedModel, match=said):
        quarrel.load(folder, backend="cpu")
    assert main(["convert", str(folder), "-o", str(tmp_path / "x.gguf")]) == 1
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert not (tmp_path / "x.gguf").exists()


def test_no_class_that_is_converted_is_taken_for_another_kind() -> None:
    for name in CLASSES:
        assert architecture(Config({"architectures": [name], "layer_types": ["attention"], "num_hidden_layers": 1,
            "hybrid_override_pattern": "M*-"}, Path("config.json")))  # fmt: skip


def test_folders_without_what_they_need_are_refused(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="may run code when it is read"):
        FolderFile(folder)
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")
    (folder / "tokenizer.json").write_text('{"model": {"type": "Rune"}}')
    with pytest.raises(ModelError, match="'Rune', wanted BPE, Unigram or WordPiece"):
        FolderFile(folder)
    for broken in ("{", "[]", '{"model": 3}', '{"model": {"type": "BPE", "vocab": {"a": "b"}, "merges": []}}'):
        (folder / "tokenizer.json").write_text(broken)
        with pytest.raises(ModelError, match="tokenizer"):
            FolderFile(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="neither tokenizer.json nor tokenizer.model"):
        FolderFile(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="is no JSON"):
        FolderFile(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({UP: None}, r"the tensor blk\.0\.ffn_up\.weight is missing"),
        ({UP: weights("x", (64, 96))}, r"ffn_up\.weight is \[64, 96\], but the keys .* ask for \[96, 64\]"),
        ({"model.norm.weight": None}, r"output_norm\.weight is missing"),
        ({"lm_head.weight": None}, r"tie_word_embeddings is false, but there is no lm_head\.weight"),
        ({"lm_head.weight": weights("x", (270, 64))}, r"output\.weight is \[270, 64\]"),
    ],
)
def test_a_folder_that_lacks_a_part_is_not_converted(
    changes: dict[str, np.ndarray | None], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = rewritten(llama_folder(tmp_path / "m"), None, **changes)
    assert main(["convert", str(folder), "-o", str(tmp_path / "x.gguf")]) == 1
    err = capsys.readouterr().err
    assert re.search(said, err)
    assert err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]


def test_an_output_may_be_the_embedding(tmp_path: Path) -> None:
    for said in (True, None):
        folder = rewritten(llama_folder(tmp_path / "m", tie_word_embeddings=said), None, **{"lm_head.weight": None})
        with FolderFile(folder) as file:
            assert "output.weight" not in file.tensors


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_pointer_in_the_place_of_a_file_is_said(name: str, tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "m")
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n")
    with pytest.raises(ModelError, match=rf"{re.escape(name)}:? is a pointer of Git LFS and not the file"):
        FolderFile(folder)


GROWN = """
import re, sys, threading, time
from pathlib import Path
from quarrel.convert.folder import FolderFile
from quarrel.gguf.requantize import requantize

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10

with FolderFile(Path(sys.argv[1])) as file:
    before, most, done = anonymous(), [0], threading.Event()

    def watch():
        while not done.wait(0.002):
            most[0] = max(most[0], anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        requantize(file, Path(sys.argv[2]), sys.argv[3])
    finally:
        done.set()
        thread.join()
print(most[0] - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="wants Linux's counts of memory")
def test_a_tensor_is_not_held_whole(tmp_path: Path) -> None:
    ff, k = 16384, 2048  # 134 MB in float32, and twice that while it was looked up
    sizes = {"hidden_size": k, "intermediate_size": ff, "num_hidden_layers": 1, "num_attention_heads": 16}
    folder = llama_folder(tmp_path / "m", **sizes, num_key_value_heads=4, tie_word_embeddings=True)
    stored = {"model.embed_tokens.weight": ("BF16", (272, k), 2), UP: ("F8_E4M3", (ff, k), 1)}
    stored |= {f"{UP}_scale": ("F32", (ff, 1), 4)}
    header, at = {}, 0
    for name, (kind, shape, each) in stored.items():
        end = at + each * shape[0] * shape[1]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + at)  # a hole, whose pages are zeros
    line = [sys.executable, "-c", GROWN, str(folder), str(tmp_path / "out.gguf"), "bf16"]
    grown = int(subprocess.run(line, capture_output=True, check=True, text=True).stdout)
    assert grown < 150, f"{grown} MiB"


def test_tensors_that_no_model_has_are_refused(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "m")
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.0\.mlp\.magic\.weight has no place"):
        FolderFile(rewritten(folder, **{"model.layers.0.mlp.magic.weight": weights("m", (64, 64))}))
    with pytest.raises(UnsupportedModel, match="has type I64, which holds no weights"):
        FolderFile(rewritten(folder, **{UP: np.zeros((96, 64), np.int64)}))
    with pytest.raises(ModelError, match="which holds nothing"):
        FolderFile(rewritten(folder, **{UP: np.zeros((96, 0), np.float32)}))
    with pytest.raises(ModelError, match="no token embedding"):
        FolderFile(rewritten(folder, **{"model.embed_tokens.weight": None}))
    rewritten(folder, **{"model.vision_tower.layers.0.norm.weight": weights("m", (8,))})
    FolderFile(folder).close()  # what sees is left out


def test_experts_must_be_all_there(tmp_path: Path) -> None:
    folder, stored = folder_of("mixtral", tmp_path), references()["mixtral"]["stored"]
    lost = next(n for n in stored if "layers.1." in n and "experts.2." in n)
    write_safetensors(folder / "model.safetensors", {n: weights(n, s) for n, s in stored.items() if n != lost})
    with pytest.raises(ModelError, match=r"there are the experts \[0, 1, 3\]"):
        FolderFile(folder)
    shapes = {n: [s[0], s[1] // 2] if n == lost else s for n, s in stored.items()}
    write_safetensors(folder / "model.safetensors", {n: weights(n, s) for n, s in shapes.items()})
    with pytest.raises(ModelError, match="differ in shape or type"):
        FolderFile(folder)


def test_experts_may_lie_as_transformers_5_saves_them(tmp_path: Path) -> None:
    published = WHOLE / "qwen3vlmoe"
    for file in published.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    data = (published / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    facts = {name: row for name, row in json.loads(data[8:start]).items() if name != "__metadata__"}
    spans = {name: slice(start + row["data_offsets"][0], start + row["data_offsets"][1]) for name, row in facts.items()}
    form = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
    held = {n: np.frombuffer(data[spans[n]], form[row["dtype"]]).reshape(row["shape"]) for n, row in facts.items()}
    assert any(".experts." in name for name in held)
    others = {n: np.ascontiguousarray(a.swapaxes(1, 2)) if ".experts." in n else a for n, a in held.items()}
    write_safetensors(tmp_path / "model.safetensors", others, {name: row["dtype"] for name, row in facts.items()})
    with FolderFile(published) as wanted, FolderFile(tmp_path) as found:
        assert all(np.array_equal(found.array(name), wanted.array(name)) for name in wanted.tensors)


def test_a_folder_loads_and_says_what_its_file_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = llama_folder(tmp_path / "m")
    target = str(tmp_path / "m.gguf")
    assert main(["convert", str(folder), "-o", target, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["type"] == "f32"
    texts = []
    for name, options in ((folder, {}), (target, {}), (folder, {"quantize": "q8_0"})):
        with quarrel.load(name, backend="cpu", compute="float32", n_ctx=64, threads=1, **options) as model:
            texts.append(model.generate("abc", max_tokens=8, temperature=0, ignore_eos=True).text)
    assert texts[0] == texts[1]
    assert texts[0]
    with FolderFile(folder, "q8_0") as file:
        info = file.tensors["blk.0.ffn_up.weight"]
        assert info.type is GGMLType.Q8_0
        assert np.array_equal(file.raw(info.name), quantize(weights(UP, (96, 64)), GGMLType.Q8_0))
    assert main(["inspect", str(folder)]) == 0
    assert "blk.0.attn_q.weight" in capsys.readouterr().out
    for given, said in ((folder, "wanted one of"), (target, "is for models in safetensors")):
        with pytest.raises(RequestError, match=said):
            quarrel.load(given, backend="cpu", quantize="q9" if given is folder else "q8_0")
    assert main(["convert", target, "-o", str(tmp_path / "x.gguf")]) == 1
    assert "is no folder" in capsys.readouterr().err


def test_a_conversion_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "PIECE", 512)
    folder, target = llama_folder(tmp_path / "m"), tmp_path / "out.gguf"

    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with FolderFile(folder) as file:
        requantize(file, tmp_path / "whole.gguf", "f16")
        with pytest.raises(KeyboardInterrupt):
            requantize(file, target, "f16", progress=stop)
        assert not target.exists()
        requantize(file, target, "f16")
    assert target.read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_the_vocabulary_is_as_long_as_the_embedding(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "m", vocab_size=LLAMA["vocab_size"])
    write_tokenizer(folder, 200)
    with FolderFile(folder) as file:
        assert file.metadata.length("tokenizer.ggml.tokens") == 272
        assert file.metadata.strs("tokenizer.ggml.tokens")[-1] == "[PAD271]"
