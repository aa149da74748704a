"""LoRA adapters act as if their products had been added to the weights, each for its own requests only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quarrel
from quarrel.errors import ModelError, QuarrelError, RequestError, UnsupportedModel
from quarrel.gguf import GGUFFile, GGUFWriter
from tests.tiny_model import FFN, WIDTH, write_tiny_model

SHAPES = {
    "attn_q": (WIDTH, WIDTH),
    "attn_v": (WIDTH, WIDTH),
    "attn_output": (WIDTH, WIDTH),
    "ffn_gate": (FFN, WIDTH),
    "ffn_down": (WIDTH, FFN),
}
ALPHA = 6.0
Pairs = dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]


def make_pairs(seed: int, rank: int, names: tuple[str, ...]) -> Pairs:
    rng = np.random.default_rng(seed)
    made = {}
    for name in names:
        n, k = SHAPES[name]
        a, b = (rng.standard_normal(s).astype(np.float32) * 0.3 for s in ((rank, k), (n, rank)))
        made[f"blk.0.{name}.weight"] = (a, b)
    return made


def write_adapter(path: Path, pairs: Pairs, keys: Mapping[str, object] | None = None) -> Path:
    writer = GGUFWriter()
    usual = {
        "general.type": "adapter",
        "adapter.type": "lora",
        "general.architecture": "llama",
        "adapter.lora.alpha": ALPHA,
    }
    for key, value in {**usual, **(keys or {})}.items():
        writer.add(key, value)  # type: ignore[arg-type]
    for name, (a, b) in pairs.items():
        writer.add_tensor(f"{name}.lora_a", a)
        writer.add_tensor(f"{name}.lora_b", b)
    writer.write(path)
    return path


def merge(source: Path, target: Path, pairs: Pairs) -> Path:
    writer = GGUFWriter()
    with GGUFFile.open(source) as file:
        for key in file.metadata:
            writer.add(key, file.metadata[key], file.metadata.kind(key) if isinstance(file.metadata[key], str) else None)
        for name in file.tensors:
            values = file.array(name)
            if name in pairs:
                a, b = pairs[name]
                values = (values + ALPHA / len(a) * (b @ a)).astype(np.float32)
            writer.add_tensor(name, values)
    writer.write(target)
    return target


ONE = make_pairs(1, 4, ("attn_q", "attn_output", "ffn_gate"))
TWO = make_pairs(2, 9, ("attn_v", "ffn_gate", "ffn_down"))
IDS = [5, 270, 280, 271, 287, 262, 263, 264]
OPTIONS: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "seed": 3}


@pytest.fixture(name="files", scope="module")
def _files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    base = write_tiny_model(folder / "base.gguf")
    return {
        "base": base,
        "one": write_adapter(folder / "one.gguf", ONE),
        "two": write_adapter(folder / "two.gguf", TWO),
        "merged one": merge(base, folder / "m1.gguf", ONE),
        "merged two": merge(base, folder / "m2.gguf", TWO),
    }


def load(path: Path, **options: Any) -> quarrel.LLM:
    return quarrel.load(path, backend="cpu", compute="float32", n_ctx=256, **options)


def test_logits_are_those_of_the_merged_weights(files: dict[str, Path]) -> None:
    with load(files["base"], adapters={"one": files["one"], "two": files["two"]}) as llm:
        assert llm.adapters == ("one", "two")
        got = {name: llm.logits(IDS, adapter=name) for name in (None, "one", "two")}
    for name, file in ((None, "base"), ("one", "merged one"), ("two", "merged two")):
        with load(files[file]) as merged:
            wanted = merged.logits(IDS)
        assert np.abs(got[name] - wanted)[:, 261:].max() <= 1e-5 * np.abs(wanted[:, 261:]).max()
    assert np.abs(got["one"] - got["two"])[:, 261:].max() > 0.1


def test_requests_with_different_adapters_share_steps_and_no_cache(files: dict[str, Path]) -> None:
    names = (None, "one", "two", "one")
    prompt = "a b c d e f g h i j k l m n o p q r s t u v w x y z" * 2
    with load(files["base"], adapters={"one": files["one"], "two": files["two"]}, prefix_cache=False) as llm:
        alone = [llm.generate(prompt, adapter=name, **OPTIONS).token_ids for name in names]
    with load(files["base"], adapters={"one": files["one"], "two": files["two"]}) as llm:
        streams = [llm.stream(prompt, adapter=name, **OPTIONS) for name in names]
        assert [s.wait().token_ids for s in streams] == alone
        again = llm.generate(prompt, adapter="two", **OPTIONS)
        assert (again.token_ids, again.usage.cached_tokens > 64) == (alone[2], True)
        fresh = llm.generate(prompt + " new", adapter="one", **OPTIONS)
        assert fresh.usage.cached_tokens > 64
    assert len(set(alone)) == 3
    # Who asks with a salt of its own finds no other adapter's either.
    with load(files["base"], adapters={"one": files["one"]}) as llm:
        llm.generate(prompt, adapter="one", service=quarrel.Service(cache_salt="x"), **OPTIONS)
        assert llm.generate(prompt, service=quarrel.Service(cache_salt="1:x"), **OPTIONS).usage.cached_tokens == 0


def test_an_adapter_that_there_is_not_is_refused(files: dict[str, Path]) -> None:
    with load(files["base"]) as llm, pytest.raises(RequestError, match="no adapter 'x', and the model was loaded without"):
        llm.generate("a", adapter="x")
    with load(files["base"], adapters={"one": files["one"]}) as llm:
        with pytest.raises(RequestError, match="no adapter 'x', wanted one of one"):
            llm.generate("a", adapter="x")
    with pytest.raises(RequestError, match="an adapter is called 'a:b'"):
        load(files["base"], adapters={"a:b": files["one"]})


BAD: dict[str, tuple[Callable[[], Pairs], Mapping[str, object], type[QuarrelError], str]] = {
    "another model's": (
        lambda: ONE,
        {"general.architecture": "qwen2"},
        ModelError,
        "made for qwen2, and the model is llama",
    ),
    "a model": (lambda: ONE, {"general.type": "model"}, ModelError, "is a model .* wanted a LoRA adapter"),
    "activated": (
        lambda: ONE,
        {"adapter.alora.invocation_tokens": [1, 2]},
        UnsupportedModel,
        "activated LoRA",
    ),
    "another size": (
        lambda: {"blk.0.attn_q.weight": (np.ones((2, WIDTH), np.float32), np.ones((WIDTH + 1, 2), np.float32))},
        {},
        ModelError,
        r"matrices \[33, 2\] and \[2, 32\] for blk.0.attn_q.weight, which is \[32, 32\]",
    ),
    "no such weight": (
        lambda: {"blk.7.attn_q.weight": ONE["blk.0.attn_q.weight"]},
        {},
        ModelError,
        "changes blk.7.attn_q.weight, which the model does not have",
    ),
    "the output layer": (
        lambda: {"output.weight": (np.ones((2, WIDTH), np.float32), np.ones((288, 2), np.float32))},
        {},
        UnsupportedModel,
        "the adapter bad changes output.weight, which is not a linear map of every token's row",
    ),
    "no number": (
        lambda: {"blk.0.attn_q.weight": (np.full((2, WIDTH), np.nan, np.float32), np.ones((WIDTH, 2), np.float32))},
        {},
        ModelError,
        "not finite",
    ),
    "nothing": (dict, {}, ModelError, "holds no tensors"),
}


@pytest.mark.parametrize("what", BAD)
def test_an_adapter_that_does_not_fit_is_refused(what: str, files: dict[str, Path], tmp_path: Path) -> None:
    pairs, keys, kind, sentence = BAD[what]
    path = write_adapter(tmp_path / "bad.gguf", pairs(), keys)
    with pytest.raises(kind, match=sentence):
        load(files["base"], adapters={"bad": path})
