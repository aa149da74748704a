"""Folders of every architecture give the keys and tensors that llama.cpp's own converter gives."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quarrel.convert.folder import FolderFile
from quarrel.convert.registry import CLASSES
from quarrel.gguf import GGUFWriter
from quarrel.llm.whole import check_whole
from quarrel.models import ARCHITECTURES, read_spec
from tests.convert.folders import fingerprint, weights, write_safetensors, write_tokenizer

REFERENCES = Path(__file__).with_name("references.json.gz")
MORE = ("vocab_size", "attention.key_length", "attention.value_length")
"""Keys that ours have and theirs may not, saying what is so without them."""
OTHERS = {
    "granite4micro": {"ssm.", "rope.scaling.finetuned", "attention.head_count_kv"},  # it has no such layers
    "modern_bert": {"classifier.pooling_type"},  # it has no classifier
    "gemma3n": {"feed_forward_length"},  # one number for all layers, where transformers makes a list of it
    "gemma2": {"rope.freq_base"},  # 10000, which is what no key means
}


def _floats(value: object) -> bool:
    return isinstance(value, float) or (isinstance(value, list) and isinstance(value[0], float))


@cache
def references() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress(REFERENCES.read_bytes()))
    return found


def folder_of(case: str, folder: Path) -> Path:
    wanted = references()[case]
    config = wanted["config"]
    write_safetensors(
        folder / "model.safetensors", {name: weights(name, shape) for name, shape in wanted["stored"].items()}
    )
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, config.get("vocab_size") or config["text_config"]["vocab_size"])
    return folder


@pytest.mark.parametrize("case", sorted(references()))
def test_a_folder_gives_what_llama_cpp_makes_of_it(case: str, tmp_path: Path) -> None:
    wanted = references()[case]
    with FolderFile(folder_of(case, tmp_path)) as file:
        assert file.metadata["general.architecture"] == wanted["architecture"]
        assert {n: list(t.shape) for n, t in file.tensors.items()} == {
            n: shape for n, (shape, _) in wanted["tensors"].items()
        }
        for name, (_, number) in wanted["tensors"].items():
            assert fingerprint(file.array(name)) == pytest.approx(number, rel=1e-5, abs=1e-6), name
        start, apart = f"{wanted['architecture']}.", OTHERS.get(case, set())
        ours = {k: file.metadata[k] for k in file.metadata if k.startswith(start)}
        for key in {*ours, *wanted["keys"]}:
            if not key.removeprefix(start).startswith(tuple(apart)) and not (
                key.endswith(MORE) and key not in wanted["keys"]
            ):
                mine, theirs = ours.get(key), wanted["keys"].get(key)
                assert mine == (pytest.approx(theirs, rel=1e-6) if _floats(theirs) else theirs), key
        read_spec(file)
        check_whole(file)


def test_every_architecture_that_runs_is_among_them() -> None:
    # Folders of Qwen2.5-VL are held by logits around an image (tests/eyes).
    assert set(ARCHITECTURES) - {"qwen2vl"} == {wanted["architecture"] for wanted in references().values()}
    assert {wanted["config"]["architectures"][0] for wanted in references().values()} <= set(CLASSES)


def test_keys_have_the_types_that_llama_cpp_reads(tmp_path: Path) -> None:
    with FolderFile(folder_of("gemma4_moe", tmp_path)) as file:
        writer = GGUFWriter()
        for key in file.metadata:
            writer.add(key, file.metadata[key], file.metadata.kind(key))
        for key in file.metadata:
            value = file.metadata[key]
            assert isinstance(value, float) == key.endswith(("freq_base", "freq_base_swa", "epsilon", "softcapping")), key
