"""Sound files with nonsensical hyperparameters: one sentence each, in milliseconds, before anything is computed."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace

import pytest

import quarrel
from quarrel.errors import ModelError, UnsupportedModel
from quarrel.gguf import GGUFFile, Metadata
from quarrel.gguf.file import TensorInfo
from quarrel.models import ARCHITECTURES, Tensors, assemble, read_spec
from quarrel.models.others import OTHERS
from tests.models.test_reference_logits import variants
from tests.paths import need_cases

HOSTILE = (0, -1, 3, 2**31, 2**63, 1e308, math.nan, math.inf, "8", True, [], [1, 2, 3])


def load(
    file: GGUFFile, values: Mapping[str, object], dropped: str = "", changed: Mapping[str, TensorInfo] | None = None
) -> None:
    """Builds the program of a file whose keys and tensors were tampered with."""
    held = {n: t for n, t in file.tensors.items() if n != dropped} | dict(changed or {})
    tensors = MappingProxyType(held)
    fake = SimpleNamespace(metadata=Metadata(values), tensors=tensors, raw=file.raw, array=file.array)  # type: ignore[arg-type]
    assemble(read_spec(fake), Tensors(fake))  # type: ignore[arg-type]


@pytest.fixture(name="file", params=dict.fromkeys(folder for folder, _ in variants()))
def _file(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    path = sorted(need_cases(request.param).glob("model-*.gguf"))[0]
    with GGUFFile.open(path) as file:
        yield file


def test_an_assembly_is_traced_in_milliseconds(file: GGUFFile) -> None:
    def seconds() -> float:
        start = time.thread_time()
        load(file, dict(file.metadata))
        return time.thread_time() - start

    assert min(seconds() for _ in range(4)) < 0.25


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


def layers_of(file: GGUFFile) -> list[str]:
    """Names of tensors, each kind of a layer's in the first and the last layer that has it. But for those not used:
    of blocks that predict tokens further ahead, and of the keys of layers that read those of another."""
    keys = dict(file.metadata)
    arch = keys["general.architecture"]
    first = keys[f"{arch}.block_count"] - keys.get(f"{arch}.nextn_predict_layers", 0)
    own = first - keys.get(f"{arch}.attention.shared_kv_layers", 0)
    kinds = {n: (int(n.split(".")[1]), n.split(".")[2]) for n in file.tensors if n.startswith("blk.")}
    unused = {n for n, (il, kind) in kinds.items() if il >= (own if kind in ("attn_k", "attn_v", "attn_k_norm") else first)}
    of_kind: dict[str, list[tuple[int, str]]] = {}
    for name in kinds.keys() - unused:
        of_kind.setdefault(name.split(".", 2)[2], []).append((kinds[name][0], name))
    ends = {end(layers)[1] for layers in of_kind.values() for end in (min, max)}
    return [n for n in file.tensors if n in ends or n not in kinds]


def test_a_missing_tensor_is_named_or_optional(file: GGUFFile) -> None:
    optional = ("rope_", "output.weight", ".bias", "attn_q_norm", "ffn_gate.weight", "ffn_gate_exps", "ffn_gate_shexp")
    for name in layers_of(file):
        try:
            load(file, dict(file.metadata), dropped=name)
        except ModelError as error:
            fused = any(part in name for part in ("rope_factors", "ffn_", "attn_qkv", "exps"))
            assert name in str(error) or fused, (name, error)
        else:
            assert any(part in name for part in optional), name


def _other_shapes(dims: tuple[int, ...]) -> set[tuple[int, ...]]:
    shapes = {
        dims[::-1],
        (dims[0] + 32, *dims[1:]),
        (*dims[:-1], dims[-1] + 1),
        (*dims[:-1], max(1, dims[-1] // 2)),
        (math.prod(dims),),
        (*dims, 2),
    }
    return shapes - {dims}


def test_a_tensor_of_another_shape_is_refused_by_name_and_keys(file: GGUFFile) -> None:
    """But for rows of the vocabulary, which no key need give, and vectors that converters write in two ways. Half of the
    shapes for a tensor, the others for the next one."""
    for i, name in enumerate(layers_of(file)):
        info = file.tensors[name]
        if name in ("token_types.weight", "output.weight") or name.startswith("rope_"):
            continue
        for dims in sorted(_other_shapes(info.dims))[i % 2 :: 2]:
            rows_only = name in ("token_embd.weight", "per_layer_token_embd.weight") and dims[:-1] == info.dims[:-1]
            if rows_only or (
                name.endswith((".ssm_a", ".ssm_d", "exp_probs_b.bias", "ffn_gate_inp_shexp.weight"))
                and math.prod(dims) == math.prod(info.dims)
            ):
                continue
            with pytest.raises(ModelError, match=r"the keys? .*[a-z]_[a-z]") as error:
                load(file, dict(file.metadata), changed={name: replace(info, dims=dims)})
            assert name in str(error.value), (dims, error.value)


SIZES = (
    "block_count", "embedding_length", "attention.key_length", "attention.head_count", "attention.head_count_kv",
    "expert_count", "expert_feed_forward_length", "ssm.inner_size", "ssm.state_size", "ssm.conv_kernel",
    "ssm.time_step_rank", "ssm.group_count",
)  # fmt: skip


def test_a_size_that_the_tensors_contradict_is_refused_by_name(file: GGUFFile) -> None:
    keys = dict(file.metadata)
    arch = keys["general.architecture"]
    recurrent = any(".ssm_" in name for name in file.tensors)
    for size in SIZES:
        value = keys.get(f"{arch}.{size}")
        # An encoder's heads share one matrix; keys of parts that a file does not have say nothing.
        if not isinstance(value, int) or not value or (not recurrent and size.startswith("ssm.")):
            continue
        if arch in ("bert", "nomic-bert", "modern-bert") and size == "attention.head_count":
            continue
        with pytest.raises(ModelError) as error:
            load(file, keys | {f"{arch}.{size}": value + 1})
        said = ("ssm sizes", "wanted", size.removeprefix("attention."))
        assert any(part in str(error.value) for part in said), (size, error.value)


def test_a_tensor_without_a_place_is_refused(file: GGUFFile) -> None:
    some = next(t for n, t in file.tensors.items() if n.startswith("blk.0."))
    for name, said in (("blk.0.attn_further.weight", "no place"), ("blk.999.attn_norm.weight", "block_count")):
        with pytest.raises(ModelError, match=f"{name} .*{said}"):
            load(file, dict(file.metadata), changed={name: replace(some, name=name)})


def test_experts_in_tensors_of_their_own_are_refused() -> None:
    with GGUFFile.open(need_cases("mixtral", "model-q4_0x.gguf")) as file:
        some = file.tensors["blk.0.attn_q.weight"]
        stacks = [n for n in file.tensors if "_exps" in n]
        apart = {n.replace("_exps", ".0"): replace(some, name=n.replace("_exps", ".0")) for n in stacks}
        with pytest.raises(UnsupportedModel, match=r"blk\.0\.ffn_up\.0\.weight .* before 2024 .*ffn_up_exps"):
            load(file, dict(file.metadata), changed=apart)


def test_a_vocabulary_beyond_the_embeddings_is_refused() -> None:
    with GGUFFile.open(need_cases("mixtral", "model-q4_0x.gguf")) as file:
        with pytest.raises(ModelError, match=r"token_embd\.weight has 384 rows, but the key llama\.vocab_size is 385"):
            load(file, dict(file.metadata) | {"llama.vocab_size": 385})


@pytest.mark.parametrize(
    ("key", "value", "said"), [("expert_gating_func", 9, "1 .softmax"), ("attention.key_length_mla", None, "attn_kv_b")]
)
def test_a_router_or_an_attention_that_is_unknown_is_refused(key: str, value: object, said: str) -> None:
    with GGUFFile.open(need_cases("deepseek2", "model-q4_0x.gguf")) as file:
        keys = dict(file.metadata) | {f"deepseek2.{key}": value}
        with pytest.raises(UnsupportedModel, match=f"{key} is .*{said}"):
            load(file, {k: v for k, v in keys.items() if v is not None})


def test_an_unknown_architecture_lists_what_runs(file: GGUFFile) -> None:
    with pytest.raises(UnsupportedModel, match="'clippy'; this version runs .*llama"):
        load(file, dict(file.metadata) | {"general.architecture": "clippy"})


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"general.architecture": "whisper"}, "'whisper', a model that writes down speech; Quarrel runs"),
        ({"general.architecture": "flux"}, "'flux', a model that makes images; Quarrel runs"),
        ({"general.architecture": "clip"}, "'clip', a model that encodes images or sound for a language model"),
        ({"general.type": "adapter"}, "no model but an adapter: give it with --lora"),
        ({"general.type": 7}, "'general.type' is 7"),
    ],
)
def test_what_is_no_model_of_text_is_refused_by_name(keys: dict[str, object], said: str) -> None:
    assert not set(OTHERS) & set(ARCHITECTURES)
    with GGUFFile.open(need_cases("mixtral") / "model-q4_0x.gguf") as file:
        with pytest.raises(ModelError, match=said):
            load(file, dict(file.metadata) | keys)


def test_a_part_that_sees_is_not_missed_for_its_vocabulary() -> None:
    with pytest.raises(UnsupportedModel, match="for a language model|part of a model"):
        quarrel.load(need_cases("qwen3vl", "mmproj-f16.gguf"), backend="cpu")


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
