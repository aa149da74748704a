"""Folders that MLX quantised: written by mlx itself, read as GGUF blocks, on every backend."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import quarrel
from quarrel.convert.folder import FolderFile
from quarrel.errors import GGUFError, ModelError, QuarrelError, UnsupportedModel
from quarrel.gguf import GGMLType
from tests.convert.folders import LLAMA, llama_shapes, weights, write_tokenizer
from tests.convert.test_references import folder_of, references

UP = "model.layers.0.mlp.up_proj"
SIZES = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 272, "head_dim": 32}
AFFINE = {"group_size": 64, "bits": 4}


def save(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, mx.array], quantization: Any) -> Path:
    """As `mlx_lm.convert` saves it: mx.quantize of every matrix; config.json names layers with settings of their own."""
    folder.mkdir(exist_ok=True)
    stored = {}
    for name, values in tensors.items():
        base = name.removesuffix(".weight")
        mine = quantization.get(base, quantization)
        if values.ndim < 2 or not mine or name.endswith(".bias"):
            stored[name] = values
            continue
        parts = mx.quantize(values, **mine if mine is not quantization else _common(quantization))
        stored |= {f"{base}.{kind}": part for kind, part in zip(("weight", "scales", "biases"), parts)}
    mx.save_safetensors(str(folder / "model.safetensors"), stored, metadata={"format": "mlx"})
    said = {**config, "quantization": quantization, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(said))
    write_tokenizer(folder, config["vocab_size"])
    return folder


def _common(quantization: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in quantization.items() if k in ("group_size", "bits", "mode")}


def shapes() -> dict[str, tuple[int, ...]]:
    wide = {64: SIZES["hidden_size"], 96: SIZES["intermediate_size"], 32: 64}
    return {name: tuple(wide.get(n, n) for n in shape) for name, shape in llama_shapes().items()}


def llama(folder: Path, quantization: Mapping[str, Any], **changes: Any) -> Path:
    tensors = {n: mx.array(weights(n, s)).astype(mx.bfloat16) for n, s in shapes().items()}
    return save(folder, {**LLAMA, **SIZES, **changes}, tensors, quantization)


def truth(folder: Path, base: str, quantization: Mapping[str, Any]) -> np.ndarray:
    """What MLX says that the codes mean, in float32."""
    stored = mx.load(str(folder / "model.safetensors"))
    assert isinstance(stored, dict)
    scales, biases = stored[f"{base}.scales"], stored.get(f"{base}.biases")
    if biases is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    made = mx.dequantize(stored[f"{base}.weight"], scales, biases, **quantization, dtype=mx.float32)
    return np.array(made)


@pytest.mark.parametrize(
    ("quantization", "type"),
    [
        *(({"group_size": g, "bits": 4}, GGMLType.Q4_1) for g in (32, 64, 128)),
        *(({"group_size": g, "bits": 8}, GGMLType.Q8_1) for g in (32, 64, 128)),
        ({"group_size": 64, "bits": 2}, GGMLType.Q4_1),
        ({"group_size": 64, "bits": 3}, GGMLType.Q4_1),
        ({"group_size": 64, "bits": 5}, GGMLType.Q5_1),
        ({"group_size": 32, "bits": 6}, GGMLType.Q8_1),
        ({"group_size": 32, "bits": 4, "mode": "mxfp4"}, GGMLType.MXFP4),
        ({"group_size": 16, "bits": 4, "mode": "nvfp4"}, GGMLType.NVFP4),
        ({"group_size": 32, "bits": 8, "mode": "mxfp8"}, GGMLType.BF16),
    ],
    ids=str,
)
def test_codes_mean_what_mlx_says(quantization: dict[str, Any], type: GGMLType, tmp_path: Path) -> None:
    folder = llama(tmp_path / "m", quantization)
    with FolderFile(folder) as file:
        for name, base in (("blk.0.ffn_up.weight", UP), ("token_embd.weight", "model.embed_tokens")):
            wanted = truth(folder, base, quantization)
            assert file.tensors[name].type is type
            if type is GGMLType.F16:
                wanted = wanted.astype(np.float16).astype(np.float32)
            np.testing.assert_allclose(file.array(name), wanted, rtol=3e-7, atol=1e-7)
        turned = truth(folder, "model.layers.1.self_attn.q_proj", quantization)
        turned = turned.reshape(4, 2, 16, 128).swapaxes(1, 2).reshape(128, 128)
        if type is not GGMLType.F16:
            np.testing.assert_allclose(file.array("blk.1.attn_q.weight"), turned, rtol=3e-7, atol=1e-7)
        np.testing.assert_allclose(file.values("blk.1.attn_q.weight", 7, 90), turned[7:90], rtol=3e-7, atol=1e-7)


def test_layers_with_settings_of_their_own(tmp_path: Path) -> None:
    mixed = {**AFFINE, UP: {"group_size": 32, "bits": 8}, "lm_head": False, "model.layers.1.mlp.up_proj": {"bits": 5}}
    folder = llama(tmp_path / "m", mixed)
    with FolderFile(folder) as file:
        types = {name: info.type for name, info in file.tensors.items()}
    assert types["blk.0.ffn_up.weight"] is GGMLType.Q8_1
    assert types["blk.1.ffn_up.weight"] is GGMLType.Q5_1
    assert types["blk.1.ffn_gate.weight"] is GGMLType.Q4_1
    assert types["output.weight"] is GGMLType.BF16


@pytest.mark.parametrize("case", ["qwen3moe", "gptoss", "mixtral"])
def test_stacks_of_experts(case: str, tmp_path: Path) -> None:
    """MLX stacks what others store one by one, or splits what they store together, under names of its own."""
    (tmp_path / "hf").mkdir()
    with FolderFile(folder_of(case, tmp_path / "hf")) as file:
        shape, kept = file.tensors["blk.0.ffn_down_exps.weight"].shape, file.array("blk.0.ffn_down_exps.weight").copy()
    config, stored = references()[case]["config"], references()[case]["stored"]
    others = {n: mx.array(weights(n, s)) for n, s in stored.items() if "layers.0" not in n or "experts" not in n}
    at = {"gptoss": "mlp.experts", "mixtral": "block_sparse_moe.switch_mlp"}.get(case, "mlp.switch_mlp")
    experts = {f"model.layers.0.{at}.down_proj.weight": mx.array(kept)}
    for part in ("gate", "up"):
        wide = mx.array(weights(part, (shape[0], shape[2], shape[1])))
        experts[f"model.layers.0.{at}.{part}_proj.weight"] = wide
        if case == "gptoss":
            experts[f"model.layers.0.{at}.{part}_proj.bias"] = wide[:, :, 0]
    if case == "gptoss":
        experts[f"model.layers.0.{at}.down_proj.bias"] = mx.array(kept[:, :, 0])
    quantization = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    plain = {n.removesuffix(".weight"): False for n in others}
    folder = save(tmp_path / "m", config, {**others, **experts}, {**quantization, **plain})
    with FolderFile(folder) as file:
        info = file.tensors["blk.0.ffn_down_exps.weight"]
        assert (info.type, info.shape) == (GGMLType.MXFP4, shape)
        wanted = truth(folder, f"model.layers.0.{at}.down_proj", quantization)
        assert np.array_equal(file.array(info.name), wanted)
        assert file.tensors["blk.0.ffn_gate_exps.weight"].type is GGMLType.MXFP4


def test_columns_in_another_order_become_floats(tmp_path: Path) -> None:
    """Qwen 3.5 orders the heads of a map's input: groups do not stay whole, if a head is smaller."""
    config, stored = references()["qwen35"]["config"], references()["qwen35"]["stored"]
    name = next(n for n in stored if n.endswith("linear_attn.out_proj.weight"))
    tensors = {n: mx.array(weights(n, s)) for n, s in stored.items()}
    plain = {n.removesuffix(".weight"): False for n in stored if n != name}
    (tmp_path / "hf").mkdir()
    folder_of("qwen35", tmp_path / "hf")
    folder = save(tmp_path / "m", config, tensors, {**AFFINE, **plain})
    block = next(i for i in range(9) if f"layers.{i}.linear_attn" in name)
    with FolderFile(tmp_path / "hf") as file, FolderFile(folder) as coded:
        exact, made = (f.array(f"blk.{block}.ssm_out.weight") for f in (file, coded))
        assert coded.tensors[f"blk.{block}.ssm_out.weight"].type is GGMLType.F16
    assert np.corrcoef(exact.reshape(-1), made.reshape(-1))[0, 1] > 0.99


def test_norms_that_mlx_has_shifted_stay(tmp_path: Path) -> None:
    config, stored = references()["qwen35"]["config"], references()["qwen35"]["stored"]
    (tmp_path / "hf").mkdir()
    tensors: dict[str, mx.array] = {}
    for name, shape in stored.items():
        if name.startswith("mtp."):
            continue  # which MLX leaves out
        values = mx.array(weights(name, shape))
        turned = mx.moveaxis(values, 2, 1) if name.endswith("conv1d.weight") else values
        shifted = name.endswith("norm.weight") and "linear_attn" not in name
        tensors[name] = turned + 1 if shifted else turned
    folder = save(tmp_path / "m", config, tensors, {n.removesuffix(".weight"): False for n in tensors})
    with FolderFile(folder_of("qwen35", tmp_path / "hf")) as file, FolderFile(folder) as saved:
        for name in saved.tensors:
            np.testing.assert_allclose(saved.array(name), file.array(name), atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"quantization": None, "quantization_config": None}, ModelError, "has no quantization"),
        ({"quantization": [4]}, ModelError, "has no quantization"),
        (
            {"quantization": {**AFFINE, "bits": 7}},
            UnsupportedModel,
            "in 7 bits and groups of 64, wanted 1, 2, 3, 4, 5, 6, 8",
        ),
        ({"quantization": {**AFFINE, "bits": "4"}}, UnsupportedModel, "wanted 1, 2"),
        ({"quantization": {**AFFINE, "group_size": 48}}, UnsupportedModel, "wanted .* in groups of 32, 64, 128"),
        ({"quantization": {**AFFINE, "mode": "odd"}}, UnsupportedModel, "the quantization mode 'odd'"),
        ({"quantization": {**AFFINE, "mode": [1]}}, UnsupportedModel, "the quantization mode"),
        ({"quantization": {**AFFINE, "bits": 8}}, ModelError, "does not fit .* in 8 bits and groups of 64"),
        ({"quantization": {**AFFINE, "group_size": 32}}, ModelError, "does not fit"),
        ({"quantization": {"mode": "mxfp4"}}, ModelError, "does not fit"),
    ],
    ids=str,
)
def test_a_config_that_does_not_fit_is_refused(
    changes: dict[str, Any], error: type[QuarrelError], said: str, tmp_path: Path
) -> None:
    folder = llama(tmp_path / "m", AFFINE)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(error, match=said) as caught:
        quarrel.load(folder, backend="cpu")
    assert "\n" not in str(caught.value)


def test_scales_that_are_missing_or_too_large_are_refused(tmp_path: Path) -> None:
    folder = llama(tmp_path / "m", AFFINE)
    path = str(folder / "model.safetensors")
    stored = mx.load(path)
    assert isinstance(stored, dict)
    stored = {name: mx.array(np.array(a.view(mx.uint16))).view(a.dtype) if a.ndim else a for name, a in stored.items()}
    without = {name: a for name, a in stored.items() if name != f"{UP}.biases"}
    mx.save_safetensors(path, without)
    with pytest.raises(ModelError, match=f"there is no {UP}.biases: download the model whole"):
        FolderFile(folder)
    mx.save_safetensors(path, {**stored, f"{UP}.scales": stored[f"{UP}.scales"] * 1e9})
    with FolderFile(folder) as file, pytest.raises(GGUFError, match="a scale is .*, and blocks hold at most 65504"):
        file.raw("blk.0.ffn_up.weight")


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_a_model_runs_as_its_own_numbers_do(bits: int, tmp_path: Path) -> None:
    """The folder beside one of the same numbers in floats."""
    quantization = {"group_size": 64, "bits": bits}
    folder = llama(tmp_path / "m", quantization)
    floats = {}
    for name in shapes():
        base = name.removesuffix(".weight")
        plain = "norm" in name
        floats[name] = mx.array(weights(name, shapes()[name])) if plain else mx.array(truth(folder, base, quantization))
        if plain:
            floats[name] = floats[name].astype(mx.bfloat16).astype(mx.float32)
    dense = save(tmp_path / "dense", {**LLAMA, **SIZES}, floats, dict.fromkeys([n.removesuffix(".weight") for n in floats]))
    ids = [5, 9, 2, 17, 33, 8]
    logits = []
    for path in (folder, dense):
        with quarrel.load(path, backend="cpu", n_ctx=64, compute="float32") as llm:
            logits.append(llm.logits(ids))
    error = np.sqrt(np.mean((logits[0] - logits[1]) ** 2) / np.mean(logits[1] ** 2))
    assert error < 1e-5
