"""Rope scaling that a caller asks for is the same as if the file had been written so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import quarrel
from quarrel.errors import QuarrelError, RequestError, UnsupportedModel
from quarrel.gguf import GGUFFile, Metadata
from quarrel.models import RopeScaling, read_spec
from tests.paths import need_cases
from tests.tiny_model import N_CTX, write_tiny_model

YARN = RopeScaling("yarn", 4, 1024)


class _Stripped:
    """A file without its scaling keys, of the context that it was trained on."""

    def __init__(self, file: GGUFFile) -> None:
        left = {key: file.metadata[key] for key in file.metadata if ".rope.scaling." not in key}
        self.metadata = Metadata({**left, "qwen3.context_length": 1024})
        self.tensors, self.array = file.tensors, file.array


def test_yarn_by_flags_is_yarn_by_keys() -> None:
    with GGUFFile.open(need_cases("qwen3_yarn") / "model-q4_0x.gguf") as file:
        whole, bare = read_spec(file), _Stripped(file)
        plain: Any = read_spec(bare)  # type: ignore[arg-type]
        assert plain.layers != whole.layers  # type: ignore[union-attr]
        assert plain.context_length == 1024
        for scaling, asked in ((YARN, None), (RopeScaling("yarn", 4), None), (RopeScaling("yarn"), 4096)):
            assert read_spec(bare, scaling=scaling, asked=asked) == whole  # type: ignore[arg-type]
        assert read_spec(file, scaling=RopeScaling("none")) == plain
        twice: Any = read_spec(file, scaling=RopeScaling(scale=8))
        assert (twice.context_length, twice.layers[0].mixer.rope.magnitude) == (8192, pytest.approx(1 + 0.1 * 2.0794415))


def test_linear_counts_positions_less(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf")
    with GGUFFile.open(path) as file:
        plain: Any = read_spec(file)
        spec: Any = read_spec(file, scaling=RopeScaling(scale=2.5))
    assert [f / 2.5 for f in plain.layers[0].mixer.rope.freq] == pytest.approx(list(spec.layers[0].mixer.rope.freq))
    assert spec.context_length == 2.5 * N_CTX


def test_a_longer_context_than_the_model_was_made_for(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf")
    with pytest.raises(RequestError, match=f"wanted 1 to {N_CTX}, .* was made for; rope_scaling='yarn' goes further"):
        quarrel.load(path, backend="cpu", n_ctx=2 * N_CTX)
    with quarrel.load(path, backend="cpu", n_ctx=2 * N_CTX, rope_scaling="yarn") as llm:
        assert llm.n_ctx == 2 * N_CTX
        result = llm.generate("a" * (N_CTX + 50), max_tokens=5)
        assert result.usage.prompt_tokens > N_CTX


WRONG: dict[str, tuple[dict[str, Any], type[QuarrelError], str]] = {
    "kind": ({"rope_scaling": "ntk"}, RequestError, "rope_scaling is 'ntk', wanted one of none, linear, yarn"),
    "scale": ({"rope_scale": 0.5}, RequestError, "rope_scale is 0.5, wanted a number from 1 to 1024"),
    "both": ({"rope_scaling": "none", "rope_scale": 2}, RequestError, "leave one of them out"),
    "no scale": ({"rope_scaling": "yarn"}, RequestError, "without a rope_scale, for a model that was trained on 512"),
    "original": (
        {"rope_scale": 2, "yarn_orig_ctx": 256},
        RequestError,
        "belongs to rope_scaling 'yarn', and it",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_scaled_is_refused(what: str, tmp_path: Path) -> None:
    options, kind, sentence = WRONG[what]
    with pytest.raises(kind, match=sentence):
        quarrel.load(write_tiny_model(tmp_path / "m.gguf"), backend="cpu", **options)


def test_a_model_without_rotations_is_refused() -> None:
    with GGUFFile.open(need_cases("mamba2") / "model-q4_k_m.gguf") as file:
        with pytest.raises(UnsupportedModel, match="does not rotate"):
            read_spec(file, scaling=RopeScaling(scale=2))
    with GGUFFile.open(next((need_cases("phi3_longrope")).glob("*.gguf"))) as file:
        with pytest.raises(UnsupportedModel, match="longrope"):
            read_spec(file, scaling=RopeScaling(scale=2))
