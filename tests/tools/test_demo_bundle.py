"""The bundled story model: one file of at most 12 MB, with every key a reader needs, a card, and known greedy tokens."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quarrel
from quarrel.gguf import GGMLType, GGUFFile, resolve
from quarrel.models import Tensors, assemble, read_spec
from quarrel.ops.contract import KVArrays
from quarrel.ops.reference import run_program
from quarrel.ops.step import ComputeChoice, StepInputs
from quarrel.tokenizer.tokenizer import load_tokenizer

FOLDER = Path(quarrel.__file__).parent / "demo"
CARD = (FOLDER / "MODEL_CARD.md").read_text(encoding="utf-8")
GREEDY: dict[str, Any] = json.loads(Path(__file__).with_name("demo_greedy.json").read_text(encoding="utf-8"))


@pytest.fixture(name="path")
def _path() -> Path:
    (path,) = resolve("demo").paths
    return path


def test_it_is_small_and_found_by_its_name(path: Path) -> None:
    assert path.stat().st_size <= 12_000_000
    assert resolve("quarrel-demo").paths == (path,)


def test_it_has_the_keys_of_a_llama(path: Path) -> None:
    with GGUFFile.open(path) as file:
        keys = file.metadata
        assert keys.str("general.architecture") == keys.str("tokenizer.ggml.model") == "llama"
        assert keys.str("general.license") == "apache-2.0"
        assert "public domain" in keys.str("general.description")
        assert keys.int("llama.context_length") >= 512
        assert keys.int("llama.embedding_length") % 256 == keys.int("llama.feed_forward_length") % 256 == 0
        assert keys.int("llama.vocab_size") == keys.length("tokenizer.ggml.tokens") == 4096
        for key in ("tokens", "scores", "token_type", "bos_token_id", "eos_token_id", "unknown_token_id"):
            assert f"tokenizer.ggml.{key}" in keys
        types = Counter(info.type for name, info in file.tensors.items() if "norm" not in name)
        assert types == {GGMLType.Q8_0: 1 + 7 * keys.int("llama.block_count")}


def test_its_tokenizer_undoes_itself_and_keeps_newlines(path: Path) -> None:
    tokenizer = load_tokenizer(path)
    for text in ("Once upon a time", "One line.\n\nAnd  another — “quoted”.\n", "", " 日本 🙂"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("Once upon a time")[0] == tokenizer.bos_id == 1
    assert tokenizer.eos_id in tokenizer.stop_ids


def test_the_card_tells_what_it_is(path: Path) -> None:
    for fact in (path.name, "Apache-2.0", "Project Gutenberg", "public domain", "tools.train_demo", "erplexity", "Limits"):
        assert fact in CARD
    assert hashlib.sha256(path.read_bytes()).hexdigest() in CARD


@pytest.mark.parametrize("case", GREEDY["cases"], ids=lambda case: case["prompt"])
def test_it_continues_as_it_did_when_it_was_made(path: Path, case: dict[str, Any]) -> None:
    assert path.name == GREEDY["file"]
    tokenizer = load_tokenizer(path)
    prompt, new = case["prompt_ids"], case["new_ids"]
    assert tokenizer.encode(case["prompt"]) == prompt
    assert tokenizer.decode(prompt + new) == case["text"]

    ids = np.array(prompt + new[:-1], np.int32)
    logits = reference_logits(path, ids)[len(prompt) - 1 :]
    assert logits.argmax(-1).tolist() == new
    best = np.sort(logits, axis=-1)
    assert (best[:, -1] - best[:, -2]).min() >= case["least_margin"] - 1e-3


@pytest.mark.parametrize("compute", ["auto", "float32"])
def test_it_continues_like_that_on_a_cpu_too(compute: ComputeChoice) -> None:
    cases = GREEDY["cases"]
    with quarrel.load("demo", backend="cpu", compute=compute) as llm:
        for case in cases:
            result = llm.generate(case["prompt"], temperature=0, max_tokens=len(case["new_ids"]), ignore_eos=True)
            assert list(result.token_ids) == case["new_ids"], case["prompt"]
        together = llm.generate([case["prompt"] for case in cases], temperature=0, max_tokens=len(cases[0]["new_ids"]))
        assert list(together[0].token_ids) == cases[0]["new_ids"]


def reference_logits(path: Path, ids: np.ndarray) -> np.ndarray:
    """Logits [T, V] of one sequence, by the ops' NumPy bodies."""
    n = len(ids)
    each = np.arange(n, dtype=np.int32)
    blocks = -(-n // 16)
    table = np.arange(blocks, dtype=np.int32)[None]
    inputs = StepInputs(ids, each, each, np.array([0, n], np.int32), np.array([n], np.int32), table, each)
    with GGUFFile.open(path) as file:
        tensors = Tensors(file)
        program = assemble(read_spec(file), tensors)
        caches = [np.zeros((blocks, 16, cache.n_kv, cache.head_dim), np.float32) for cache in program.caches]
        return run_program(program, tensors, [KVArrays(c, c.copy()) for c in caches], inputs)["logits"]
