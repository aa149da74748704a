"""What sees, converted: names, shapes, keys and values are those of the files that llama.cpp's own converter made."""

from __future__ import annotations

import json
import re
from pathlib import Path

import gguf
import numpy as np
import pytest

from quarrel.cli import main
from quarrel.convert.folder import FolderFile
from quarrel.errors import QuarrelError
from quarrel.gguf import GGMLType, GGUFFile
from tests.convert.folders import llama_folder, weights, write_safetensors
from tests.paths import need_cases
from tests.sight import EYES, KINDS, WHOLE

QWEN = {
    r"v\.blk\.(\d+)\.ln(\d)": r"model.visual.blocks.\1.norm\2",
    r"v\.blk\.(\d+)\.attn_qkv": r"model.visual.blocks.\1.attn.qkv",
    r"v\.blk\.(\d+)\.attn_out": r"model.visual.blocks.\1.attn.proj",
    r"v\.blk\.(\d+)\.ffn_up": r"model.visual.blocks.\1.mlp.linear_fc1",
    r"v\.blk\.(\d+)\.ffn_down": r"model.visual.blocks.\1.mlp.linear_fc2",
    r"v\.deepstack\.(\d+)\.fc(\d)": r"model.visual.deepstack_merger_list.\1.linear_fc\2",
    r"v\.deepstack\.(\d+)\.norm": r"model.visual.deepstack_merger_list.\1.norm",
    r"v\.post_ln": "model.visual.merger.norm",
    r"mm\.0": "model.visual.merger.linear_fc1",
    r"mm\.2": "model.visual.merger.linear_fc2",
    r"v\.position_embd": "model.visual.pos_embed",
    r"v\.patch_embd": "model.visual.patch_embed.proj",
}
_LAYERS = r"vision_tower.vision_model.encoder.layers.\1."
GEMMA = {
    r"v\.blk\.(\d+)\.ln(\d)": rf"{_LAYERS}layer_norm\2",
    r"v\.blk\.(\d+)\.attn_([qkv])": rf"{_LAYERS}self_attn.\2_proj",
    r"v\.blk\.(\d+)\.attn_out": rf"{_LAYERS}self_attn.out_proj",
    r"v\.blk\.(\d+)\.ffn_up": rf"{_LAYERS}mlp.fc1",
    r"v\.blk\.(\d+)\.ffn_down": rf"{_LAYERS}mlp.fc2",
    r"v\.patch_embd": "vision_tower.vision_model.embeddings.patch_embedding",
    r"v\.position_embd": "vision_tower.vision_model.embeddings.position_embedding",
    r"v\.post_ln": "vision_tower.vision_model.post_layernorm",
    r"mm\.input_projection\.weight": "multi_modal_projector.mm_input_projection_weight",
    r"mm\.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
}


def _theirs(name: str, names: dict[str, str]) -> str:
    for pattern, other in names.items():
        if found := re.match(rf"{pattern}(?=\.|$)", name):
            return found.expand(other) + name[found.end() :]
    raise AssertionError(name)


def folder_of(case: str, folder: Path) -> Path:
    """The folder that a case's file was made of."""
    config = json.loads(need_cases(case, "meta.json").read_text())["config"]
    (folder / "config.json").write_text(json.dumps(config))
    tensors: dict[str, np.ndarray] = {}
    with GGUFFile.open(need_cases(case, "mmproj-f16.gguf")) as file:
        for name, info in file.tensors.items():
            values = file.array(name)
            if name == "mm.soft_emb_norm.weight":
                values = values - 1
            if info.type is GGMLType.F16:
                values = values.astype(np.float16)
            if name == "v.patch_embd.weight" and "v.patch_embd.weight.1" in file.tensors:
                values = np.stack([values, file.array("v.patch_embd.weight.1").astype(values.dtype)], 2)
            if name != "v.patch_embd.weight.1":
                tensors[_theirs(name, GEMMA if case.startswith("gemma") else QWEN)] = values
    tensors["model.language_model.embed_tokens.weight"] = np.zeros((4, 8), np.float32)
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


@pytest.mark.parametrize("case", ["qwen3vl", "qwen35_vl", "gemma3_vl"])
def test_a_file_is_that_of_llama_cpp(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "mmproj.gguf"
    words = ["convert", str(folder_of(case, tmp_path)), "--mmproj", "-o", str(target), "--type", "f16", "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["type"] == "f16"
    with GGUFFile.open(target) as ours, GGUFFile.open(need_cases(case, "mmproj-f16.gguf")) as theirs:
        assert {n: t.shape for n, t in ours.tensors.items()} == {n: t.shape for n, t in theirs.tensors.items()}
        for name, info in theirs.tensors.items():
            assert np.allclose(ours.array(name), theirs.array(name), atol=1e-6), name
            assert ours.tensors[name].type is info.type or "patch_embd" in name, name
        said = {k: ours.metadata[k] for k in ours.metadata}
        for key in theirs.metadata:
            if key not in ("general.name", "general.size_label"):
                assert said.pop(key) == theirs.metadata[key], key
        assert set(said) == {"general.name"}
    # Another reader, and its own table of names.
    assert len(gguf.GGUFReader(target).tensors) > 10
    assert said["general.name"] == tmp_path.name


def test_colours_are_those_of_the_preprocessor(tmp_path: Path) -> None:
    folder = folder_of("qwen3vl", tmp_path)
    (folder / "preprocessor_config.json").write_text('{"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 3]}')
    with FolderFile(folder, mmproj=True) as file:
        assert file.metadata["clip.vision.image_mean"] == [0.1, 0.2, 0.3]
        assert file.metadata["clip.vision.image_std"] == [1.0, 2.0, 3.0]
    (folder / "preprocessor_config.json").write_text('{"image_mean": "x"}')
    with pytest.raises(QuarrelError, match="has image_mean x, wanted 3 numbers"):
        FolderFile(folder, mmproj=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"depth": 4}, "tells of 4 layers that see, but 3 are there"),
        ({"depth": None}, "has no depth"),
        ({"hidden_act": "relu"}, "the activation of what sees is 'relu', wanted gelu"),
        ({"deepstack_visual_indexes": [7]}, r"has deepstack_visual_indexes \[7\], wanted numbers of layers"),
        ({"deepstack_visual_indexes": []}, "has no place in this architecture"),
        ({"num_position_embeddings": "x"}, "wanted an integer"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(changes: dict[str, object], said: str, tmp_path: Path) -> None:
    folder = folder_of("qwen3vl", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"].update(changes)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(QuarrelError, match=said) as caught:
        FolderFile(folder, mmproj=True)
    assert "\n" not in str(caught.value)


def test_models_that_see_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(QuarrelError, match="'LlamaForCausalLM', of which this version converts nothing that sees"):
        FolderFile(llama_folder(tmp_path / "m"), mmproj=True)


@pytest.mark.parametrize("merge", [None, 2])
def test_pixtral_s_names_are_those_of_the_gguf_package(merge: int | None, tmp_path: Path) -> None:
    n, wide, heads, out = 32, 48, 2, 24
    vision = {"model_type": "pixtral", "hidden_size": n, "intermediate_size": wide, "num_hidden_layers": 2, "patch_size": 4,
              "num_attention_heads": heads, "image_size": 64, "hidden_act": "silu"}  # fmt: skip
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "vision_config": vision,
        "text_config": {"hidden_size": out},
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, "spatial_merge_size": merge}))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 3, "content": "[IMG_BREAK]"}]}))
    shapes: dict[str, tuple[int, ...]] = {"patch_conv.weight": (n, 3, 4, 4), "ln_pre.weight": (n,)}
    for i in range(2):
        at = f"transformer.layers.{i}."
        shapes |= {f"{at}{x}_norm.weight": (n,) for x in ("attention", "ffn")}
        shapes |= {f"{at}attention.{x}_proj.weight": (n, n) for x in "qkvo"}
        shapes |= {f"{at}feed_forward.{x}_proj.weight": (wide, n) for x in ("gate", "up")}
        shapes[f"{at}feed_forward.down_proj.weight"] = (n, wide)
    shapes = {f"vision_tower.{name}": shape for name, shape in shapes.items()}
    joined = {f"linear_{i}.weight": (out, n if i == 1 else out) for i in (1, 2)}
    joined |= {"norm.weight": (n,), "patch_merger.merging_layer.weight": (n, 4 * n)} if merge else {}
    shapes |= {f"multi_modal_projector.{name}": shape for name, shape in joined.items()}
    stored = {name: weights(name, shape) for name, shape in shapes.items()}
    words = {"language_model.model.embed_tokens.weight": weights("words", (8, out))}
    write_safetensors(tmp_path / "model.safetensors", {**stored, **words})
    assert main(["convert", str(tmp_path), "--mmproj", "-o", str(tmp_path / "mmproj.gguf")]) == 0
    read = gguf.GGUFReader(tmp_path / "mmproj.gguf")
    found = {t.name: t.data.reshape(t.shape[::-1]) for t in read.tensors}
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 3)
    named = {table.get_name(name, try_suffixes=(".weight",)): values for name, values in stored.items()}
    assert found.keys() == {*named, "v.token_embd.img_break"}
    assert np.array_equal(found["v.token_embd.img_break"], words["language_model.model.embed_tokens.weight"][3])
    for name, values in named.items():
        turned = (
            values.reshape(heads, 2, -1, n).swapaxes(1, 2).reshape(n, n)
            if name.endswith(("attn_q.weight", "attn_k.weight"))
            else values
        )
        assert np.array_equal(found[name], turned), name
    keys = {key: field.contents() for key, field in read.fields.items()}
    assert (keys["clip.projector_type"], keys["clip.use_silu"]) == ("pixtral", True)
    assert keys["clip.vision.attention.layer_norm_epsilon"] == pytest.approx(1e-5)
    assert (keys["clip.vision.projection_dim"], keys.get("clip.vision.spatial_merge_size")) == (out, merge)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(QuarrelError, match=r"has no token \[IMG_BREAK\]"):
        FolderFile(tmp_path, mmproj=True)
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "vision_config": {**vision, "model_type": "clip_vision_model"}})
    )
    with pytest.raises(QuarrelError, match="is a 'clip_vision_model', of which this version converts pixtral only"):
        FolderFile(tmp_path, mmproj=True)


@pytest.mark.parametrize(("folder", "case"), [(k, k) for k in KINDS] + [("gemma4_e", "gemma4")])
def test_names_and_keys_are_those_of_llama_cpp_s_files(folder: str, case: str, tmp_path: Path) -> None:
    target = tmp_path / "mmproj.gguf"
    assert main(["convert", str(WHOLE / folder), "--mmproj", "-o", str(target)]) == 0
    ours, theirs = (gguf.GGUFReader(path) for path in (target, EYES / case / "mmproj.gguf"))

    def names(read: gguf.GGUFReader) -> set[str]:
        return {re.sub(r"blk\.\d+\.", "", tensor.name) for tensor in read.tensors}

    limits = {name for name in names(ours) if name.endswith(("put_min", "put_max"))}
    assert len(limits) == (28 if folder == "gemma4_e" else 0)
    spread = {"v.std_bias", "v.std_scale"} if folder == "gemma4_e" else set()
    joined = {f"mm.{i}.bias" for i in (1, 2)} if folder == "pixtral" else set()
    assert names(ours) - limits - joined == names(theirs) - spread
    said, wanted = ({key for key in read.fields if key.startswith("clip.")} for read in (ours, theirs))
    assert wanted - said <= {"clip.vision.attention.head_dim"}
    assert said - wanted <= {"clip.vision.spatial_merge_size", "clip.vision.feature_layer"}
    kept = ("projector_type", "use_silu", "use_gelu", "n_wa_pattern")
    for key in (key for key in wanted if key.endswith(kept)):
        assert ours.fields[key].contents() == theirs.fields[key].contents(), key


@pytest.mark.parametrize(
    ("folder", "changes", "said"),
    [
        ("qwen25vl", {"fullatt_block_indexes": [0, 2]}, r"has fullatt_block_indexes \[0, 2\], wanted every n-th layer"),
        ("qwen25vl", {"fullatt_block_indexes": "x"}, "wanted every n-th layer"),
        ("qwen25vl", {"hidden_act": "relu"}, "is 'relu', wanted silu"),
        ("llava", {"hidden_act": "relu"}, "is 'relu', wanted quick_gelu or gelu"),
        ("llava", {"num_hidden_layers": 0}, "has vision_feature_layer -2, wanted one of the 0 layers"),
        ("gemma4", {"hidden_activation": "silu"}, "is 'silu', wanted gelu_pytorch_tanh"),
        ("gemma4", {"head_dim": 17}, "has head_dim 17, wanted hidden_size divided by the heads"),
    ],
)
def test_a_tower_that_would_be_another_is_refused(
    folder: str, changes: dict[str, object], said: str, tmp_path: Path
) -> None:
    for path in (WHOLE / folder).iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"].update(changes)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(QuarrelError, match=said):
        FolderFile(tmp_path, mmproj=True)


def test_a_text_of_an_unknown_kind_is_refused_and_older_rotations_are_read(tmp_path: Path) -> None:
    for name, folder in (("qwen25vl", tmp_path / "q"), ("llava", tmp_path / "l")):
        folder.mkdir()
        for path in (WHOLE / name).iterdir():
            if path.name != "config.json":
                (folder / path.name).symlink_to(path)
    config = json.loads((WHOLE / "qwen25vl" / "config.json").read_text())
    config["text_config"]["rope_scaling"] = {"type": "mrope", "mrope_section": [4, 2, 2]}
    config["text_config"]["rope_theta"] = config["text_config"].pop("rope_parameters")["rope_theta"]
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    with FolderFile(tmp_path / "q") as ours, FolderFile(WHOLE / "qwen25vl") as other:
        rotation = {key: ours.metadata[key] for key in ours.metadata if ".rope." in key}
        assert rotation == {key: other.metadata[key] for key in other.metadata if ".rope." in key}
        assert rotation["qwen2vl.rope.dimension_sections"] == [4, 2, 2, 0]
    config = json.loads((WHOLE / "llava" / "config.json").read_text())
    config["text_config"]["model_type"] = "opt"
    (tmp_path / "l" / "config.json").write_text(json.dumps(config))
    with pytest.raises(QuarrelError, match="is a 'opt'; this version converts llama, mistral"):
        FolderFile(tmp_path / "l")
