"""Sound files with nonsensical hyperparameters: one sentence each, in milliseconds, before anything is computed."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace

import pytest

from quarrel.errors import ModelError, UnsupportedModel
from quarrel.gguf import GGUFFile, Metadata
from quarrel.models import Tensors, assemble, read_spec
from tests.models.test_reference_logits import ARCHITECTURES
from tests.paths import need_cases

HOSTILE = (0, -1, 3, 2**31, 2**63, 1e308, math.nan, math.inf, "8", True, [], [1, 2, 3])


def load(file: GGUFFile, values: Mapping[str, object], dropped: str = "") -> None:
    """Builds the program of a file whose keys and tensors were tampered with."""
    tensors = MappingProxyType({n: t for n, t in file.tensors.items() if n != dropped})
    fake = SimpleNamespace(metadata=Metadata(values), tensors=tensors, raw=file.raw, array=file.array)  # type: ignore[arg-type]
    assemble(read_spec(fake), Tensors(fake))  # type: ignore[arg-type]


@pytest.fixture(name="file", params=ARCHITECTURES)
def _file(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    path = sorted(need_cases(request.param).glob("model-*.gguf"))[0]
    with GGUFFile.open(path) as file:
        yield file


def test_an_assembly_is_traced_in_milliseconds(file: GGUFFile) -> None:
    load(file, dict(file.metadata))
    start = time.perf_counter()
    for _ in range(3):
        load(file, dict(file.metadata))
    assert (time.perf_counter() - start) / 3 < 0.25


def test_no_hyperparameter_value_crashes(file: GGUFFile) -> None:
    keys = dict(file.metadata)
    arch = keys["general.architecture"]
    refused = 0
    for key in [k for k in keys if k.startswith(f"{arch}.")]:
        for value in HOSTILE:
            try:
                load(file, keys | {key: value})
            except ModelError as error:
                refused += 1
                assert "\n" not in str(error)
    assert refused > 40


def test_a_missing_key_is_named(file: GGUFFile) -> None:
    keys = dict(file.metadata)
    for key in ("general.architecture", f"{keys['general.architecture']}.block_count"):
        with pytest.raises(ModelError, match=key):
            load(file, {k: v for k, v in keys.items() if k != key})


def test_a_missing_tensor_is_named_or_optional(file: GGUFFile) -> None:
    optional = ("rope_", "output.weight", ".bias", "attn_q_norm", "ffn_gate.weight", "ffn_gate_exps", "ffn_gate_shexp")
    for name in file.tensors:
        try:
            load(file, dict(file.metadata), dropped=name)
        except ModelError as error:
            fused = any(part in name for part in ("rope_factors", "ffn_", "attn_qkv", "exps"))
            assert name in str(error) or fused, (name, error)
        else:
            assert any(part in name for part in optional), name


def test_an_unknown_architecture_lists_what_runs(file: GGUFFile) -> None:
    with pytest.raises(UnsupportedModel, match="'clippy'; this version runs .*llama"):
        load(file, dict(file.metadata) | {"general.architecture": "clippy"})


def test_unknown_rope_scaling_is_refused_rather_than_ignored() -> None:
    with GGUFFile.open(need_cases("qwen3_yarn") / "model-q4_0x.gguf") as file:
        with pytest.raises(UnsupportedModel, match="rope.scaling.type is 'ntk'"):
            load(file, dict(file.metadata) | {"qwen3.rope.scaling.type": "ntk"})


@pytest.mark.parametrize(
    ("key", "value", "error", "said"),
    [
        ("attention.causal", True, UnsupportedModel, "bidirectional"),
        ("attention.head_count", 256, ModelError, "does not divide into 256 heads"),
    ],
)
def test_an_encoder_that_is_none_is_refused(key: str, value: object, error: type[ModelError], said: str) -> None:
    with GGUFFile.open(need_cases("bert", "model-q4_0x.gguf")) as file:
        assert file.metadata.int("bert.embedding_length") == 256
        with pytest.raises(error, match=said):
            load(file, dict(file.metadata) | {f"bert.{key}": value})
