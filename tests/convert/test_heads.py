"""What lies behind the layers of a folder: maps of vectors, rerankers' heads, and blocks that predict further tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import quarrel
from quarrel.cli import main
from quarrel.convert.folder import FolderFile
from quarrel.errors import ModelError, QuarrelError
from quarrel.gguf import GGMLType
from tests.convert.folders import weights, write_safetensors
from tests.convert.test_references import folder_of, references


def converted(folder: Path, target: Path) -> gguf.GGUFReader:
    """As another reader sees what `quarrel convert` makes of it."""
    assert main(["convert", str(folder), "-o", str(target)]) == 0
    return gguf.GGUFReader(target)


def changed(folder: Path, **config: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))


def stored(case: str, **others: tuple[int, ...] | None) -> dict[str, np.ndarray]:
    """A case's weights, more of them, and without those whose shape is None."""
    shapes = {**references()[case]["stored"], **{name.replace("__", "."): shape for name, shape in others.items()}}
    return {name: weights(name, shape) for name, shape in shapes.items() if shape is not None}


def dense_folder(folder: Path, *shapes: tuple[int, int], **said: Any) -> Path:
    folder_of("gemma_embedding", folder)
    listed = [{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    for i, shape in enumerate(shapes, 2):
        part = folder / f"{i}_Dense"
        part.mkdir()
        identity = {"activation_function": "torch.nn.modules.linear.Identity", "bias": False, **said}
        (part / "config.json").write_text(json.dumps(identity))
        write_safetensors(part / "model.safetensors", {"linear.weight": weights(part.name, shape)})
        listed.append({"type": "sentence_transformers.models.Dense", "path": part.name})
    listed.append({"type": "sentence_transformers.models.Normalize", "path": "9_Normalize"})
    (folder / "modules.json").write_text(json.dumps(listed))
    return folder


def test_maps_behind_the_pooling_are_kept_and_applied(tmp_path: Path) -> None:
    n = references()["gemma_embedding"]["config"]["hidden_size"]
    folder = tmp_path / "m"
    folder.mkdir()
    dense_folder(folder, (96, n), (n, 96))
    read = converted(folder, tmp_path / "m.gguf")
    up, down = weights("2_Dense", (96, n)), weights("3_Dense", (n, 96))
    found = {t.name: t.data for t in read.tensors}
    assert np.array_equal(found["dense_2.weight"], up)
    assert np.array_equal(found["dense_3.weight"], down)
    sizes = [read.fields[f"gemma-embedding.dense_{key}"].contents() for key in ("2_feat_in", "2_feat_out", "3_feat_in")]
    assert sizes == [n, 96, 96]
    with quarrel.load(tmp_path / "m.gguf", backend="cpu", compute="float32", n_ctx=64) as llm:
        made = llm.embed(["some words", "others", "some words"], normalize=False)
        mean = llm.token_embeddings("some words").astype(np.float64).mean(0)
        assert made.vectors[0] == pytest.approx(down @ (up @ mean), rel=1e-4, abs=1e-5)
        assert np.array_equal(made.vectors[0], made.vectors[2])
        assert np.array_equal(made.vectors[1], llm.embed("others", normalize=False).vectors[0])
        unit = llm.embed("some words").vectors[0]
        assert unit == pytest.approx(made.vectors[0] / np.linalg.norm(made.vectors[0]), abs=1e-6)


def test_a_single_map_may_change_the_length_of_vectors(tmp_path: Path) -> None:
    n = references()["gemma_embedding"]["config"]["hidden_size"]
    with quarrel.load(dense_folder(tmp_path, (24, n)), backend="cpu", n_ctx=64) as llm:
        assert llm.embedding_dim == 24
        made = llm.embed("some words", dimensions=10)
        assert (made.full, made.vectors.shape) == (24, (1, 10))


@pytest.mark.parametrize(
    ("shapes", "said", "config"),
    [
        ([(96, 64), (64, 96)], "has the activation Tanh, which a GGUF file cannot tell", {"activation_function": "x.Tanh"}),
        ([(96, 64)], "has a bias, which", {"bias": True}),
        ([(96, 64), (64, 96), (64, 64)], "names 3 dense maps of vectors, wanted 2 at most", {}),
        ([(96, 63)], r"dense_2.weight is \[96, 63\], wanted rows of 64", {}),
    ],
)
def test_maps_that_cannot_be_kept_are_refused(
    shapes: list[tuple[int, int]], said: str, config: dict[str, Any], tmp_path: Path
) -> None:
    n = references()["gemma_embedding"]["config"]["hidden_size"]
    right = [tuple(n if size == 64 else n - 1 if size == 63 else size for size in shape) for shape in shapes]
    folder = dense_folder(tmp_path, *right, **config)  # type: ignore[arg-type]
    with pytest.raises(QuarrelError, match=said.replace("63", str(n - 1)).replace("64", str(n))) as caught:
        quarrel.load(folder, backend="cpu", n_ctx=64)
    assert "\n" not in str(caught.value)


def test_an_architecture_without_such_maps_refuses_them(tmp_path: Path) -> None:
    dense_folder(tmp_path, (96, 64))
    folder_of("bert", tmp_path)
    with pytest.raises(ModelError, match=r"dense_2_out\.weight has no place in this architecture"):
        FolderFile(tmp_path)
    listed = [{"type": "models.Dense", "path": "../2_Dense"}]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(ModelError, match=r"places the dense in '\.\./2_Dense', wanted a folder in this one"):
        FolderFile(tmp_path)


def with_words(folder: Path, *words: str) -> list[int]:
    """Puts words in the place of tokens that nothing names; returns their ids."""
    path = folder / "tokenizer.json"
    file = json.loads(path.read_text())
    vocab = file["model"]["vocab"]
    ids = [vocab.pop(next(text for text in vocab if text.startswith("more"))) for _ in words]
    vocab.update(zip(words, ids))
    path.write_text(json.dumps(file))
    return ids


@pytest.mark.parametrize("tied", [True, False])
def test_a_reranker_s_head_is_the_rows_of_yes_and_no(tied: bool, tmp_path: Path) -> None:
    plain, folder = tmp_path / "plain", tmp_path / "Qwen3-Reranker-0.6B"
    shape = references()["qwen3"]["stored"]["model.embed_tokens.weight"]
    for each in (plain, folder):
        each.mkdir()
        folder_of("qwen3", each)
        head = {} if tied else {"lm_head__weight": tuple(shape)}
        write_safetensors(each / "model.safetensors", stored("qwen3", **head))
        changed(each, tie_word_embeddings=tied)
        yes, no = with_words(each, "yes", "no")
    read = converted(folder, tmp_path / "r.gguf")
    found = {t.name: t.data for t in read.tensors}
    rows = weights("model.embed_tokens.weight" if tied else "lm_head.weight", shape)
    assert np.array_equal(found["cls.output.weight"], rows[[yes, no]])
    assert "output.weight" not in found
    assert read.fields["qwen3.classifier.output_labels"].contents() == ["yes", "no"]
    assert read.fields["qwen3.pooling_type"].contents() == 4
    assert "<Document>: {document}<|im_end|>" in read.fields["tokenizer.chat_template.rerank"].contents()
    with quarrel.load(plain, backend="cpu", compute="float32", n_ctx=512) as llm:
        ids = llm.tokenize("which of them")
        logits = llm.logits(ids)[-1]
    with quarrel.load(tmp_path / "r.gguf", backend="cpu", compute="float32", n_ctx=512) as llm:
        made = llm.embed([ids])
        assert made.pooling == "rank"
        shares = np.exp(logits[[yes, no]] - logits[[yes, no]].max())
        assert made.vectors[0] == pytest.approx(shares / shares.sum(), rel=1e-4)
        assert "which answers" in llm.tokenizer.decode(llm.tokenizer.encode_pair("which answers", "this one"))


def test_a_classifier_with_one_label_says_what_a_sigmoid_makes_of_it(tmp_path: Path) -> None:
    n = references()["qwen3"]["config"]["hidden_size"]
    folder_of("qwen3", tmp_path)
    write_safetensors(tmp_path / "model.safetensors", stored("qwen3", score__weight=(1, n)))
    one = {"architectures": ["Qwen3ForSequenceClassification"], "tie_word_embeddings": True, "id2label": {"0": "LABEL_0"}}
    changed(tmp_path, **one)
    with quarrel.load(tmp_path, backend="cpu", compute="float32", n_ctx=512) as llm:
        score = (weights("score.weight", (1, n)) @ llm.token_embeddings("a b")[-1]).item()
        assert llm.embed("a b").vectors[0, 0] == pytest.approx(1 / (1 + np.exp(-score)), rel=1e-4)
    changed(tmp_path, id2label={"0": "a", "1": "b", "2": "c"})
    with pytest.raises(QuarrelError, match="the classifier has 3 labels, wanted the one of a reranker"):
        FolderFile(tmp_path)


def test_rerankers_without_what_they_need_are_refused(tmp_path: Path) -> None:
    folder_of("qwen3", tmp_path)
    (tmp_path / "README.md").write_text("---\nlicense: x\n---\n# Qwen3-Reranker-0.6B\n")
    with pytest.raises(QuarrelError, match="its tokenizer has no tokens yes and no"):
        FolderFile(tmp_path)
    with_words(tmp_path, "yes", "no")
    changed(tmp_path, tie_word_embeddings=False)
    write_safetensors(tmp_path / "model.safetensors", stored("qwen3"))
    with pytest.raises(QuarrelError, match="it is a reranker, and there is no classifier among the weights"):
        FolderFile(tmp_path)


def predictor(case: str, behind: str, last: int) -> dict[str, np.ndarray]:
    """The case's weights, and its last layer once more as a block that predicts, named as the model's makers do."""
    tensors = stored(case)
    n, v = tensors["model.embed_tokens.weight"].shape[1], tensors["model.embed_tokens.weight"].shape[0]
    at = f"model.layers.{last}."
    tensors |= {name.replace(at, behind): values for name, values in tensors.items() if name.startswith(at)}
    if behind.startswith("mtp"):
        shapes: dict[str, tuple[int, ...]] = {"mtp.fc.weight": (n, 2 * n)}
        shapes |= {f"mtp.{name}.weight": (n,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    else:
        shapes = {f"{behind}eh_proj.weight": (n, 2 * n)}
        shapes |= {f"{behind}{name}.weight": (n,) for name in ("enorm", "hnorm", "shared_head.norm")}
        shapes |= {f"{behind}{name}.weight": (v, n) for name in ("embed_tokens", "shared_head.head")}
    return tensors | {name: weights(name, shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("case", "behind"),
    [
        ("qwen3next", "mtp.layers.0."),
        ("qwen35moe", "mtp.layers.0."),
        ("deepseek2", "model.layers.3."),
        ("glm47flash", "model.layers.3."),
    ],
)
def test_blocks_that_predict_further_tokens_draft(case: str, behind: str, tmp_path: Path) -> None:
    """Whatever config.json says of them: Qwen3-Next's says nothing."""
    folder = tmp_path / "m"
    folder.mkdir()
    folder_of(case, folder)
    arch, layers = references()[case]["architecture"], references()[case]["config"]["num_hidden_layers"]
    write_safetensors(folder / "model.safetensors", predictor(case, behind, layers - 1))
    read = converted(folder, tmp_path / "m.gguf")
    assert read.fields[f"{arch}.nextn_predict_layers"].contents() == 1
    assert read.fields[f"{arch}.block_count"].contents() == layers + 1
    names = {t.name for t in read.tensors}
    for name in ("nextn.eh_proj", "nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm", "attn_norm"):
        assert f"blk.{layers}.{name}.weight" in names
    asked: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    texts = []
    for options in ({}, {"draft": "mtp"}):
        with quarrel.load(tmp_path / "m.gguf", backend="cpu", compute="float32", n_ctx=64, **options) as llm:  # type: ignore[arg-type]
            made = llm.generate([5, 9, 3], **asked)
            texts.append(made.token_ids)
    assert texts[0] == texts[1]
    assert made.timings.guessed_tokens


@pytest.mark.parametrize(("case", "said"), [("qwen35", "mtp_num_hidden_layers"), ("glm4moe", "num_nextn_predict_layers")])
def test_a_config_that_speaks_of_blocks_that_were_not_saved_is_not_believed(case: str, said: str, tmp_path: Path) -> None:
    folder_of(case, tmp_path)
    assert references()[case]["config"][said] == 1
    layers = references()[case]["config"]["num_hidden_layers"]
    kept = {n: v for n, v in stored(case).items() if not n.startswith(("mtp.", f"model.layers.{layers}."))}
    write_safetensors(tmp_path / "model.safetensors", kept)
    with FolderFile(tmp_path) as file:
        arch = file.metadata["general.architecture"]
        assert f"{arch}.nextn_predict_layers" not in file.metadata
        assert file.metadata[f"{arch}.block_count"] == layers
        assert file.tensors["blk.0.attn_norm.weight"].type is GGMLType.F32


def test_a_layer_too_many_is_no_block_that_predicts(tmp_path: Path) -> None:
    folder_of("deepseek2", tmp_path)
    more = {n.replace("layers.2.", "layers.3."): v for n, v in stored("deepseek2").items() if "layers.2." in n}
    write_safetensors(tmp_path / "model.safetensors", {**stored("deepseek2"), **more})
    with pytest.raises(ModelError, match=r"model\.layers\.3\.\S+ has no place in this architecture"):
        FolderFile(tmp_path)
