"""Ids of real vocabularies, made by llama.cpp, and checked by it against the models' own tokenizers."""

from __future__ import annotations

import json
import time
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quarrel.tokenizer import Tokenizer, TokenizerWarning, load_tokenizer, wpm
from tests.models.test_reference_logits import variants
from tests.paths import CASE_SETS, need_cases

VOCABULARIES = (
    *("bert-bge", "deepseek-coder", "falcon", "gpt-2", "gpt-neox", "llama-bpe", "llama-spm", "mpt"),
    *("nomic-bert-moe", "phi-3", "qwen2", "starcoder"),
)
# llama.cpp removes spaces before punctuation when it detokenizes with the others; `decode` leaves text as it is.
KEEPS_SPACES = ("llama-spm", "phi-3", "qwen2", "deepseek-coder")
MODELS = (
    *("bert", "gemma2", "gemma3", "gptoss", "granite", "granite4micro", "granitehybrid", "granitemoe", "llama32", "mamba"),
    *("mamba2", "mistral", "mixtral", "nemotron", "nemotron_h", "nomic_bert", "phi3", "qwen2", "qwen3", "smollm2"),
    "tinyllama",
    *dict.fromkeys(arch for arch, _ in variants() if (CASE_SETS[1] / arch).exists()),
)


@cache
def real(name: str) -> Tokenizer:
    path = need_cases("tokenizers", f"ggml-vocab-{name}.gguf")
    with warnings.catch_warnings():
        # gpt-neox names no pre-tokenizer.
        warnings.simplefilter("ignore", TokenizerWarning)
        return load_tokenizer(path)


def expected(name: str) -> dict[str, Any]:
    return json.loads(need_cases("tokenizers", f"{name}.json").read_text())


@pytest.mark.parametrize("name", VOCABULARIES)
def test_every_text_has_the_reference_ids(name: str) -> None:
    tokenizer, vectors = real(name), expected(name)
    assert len(vectors["texts"]) >= 58
    for text, ids in zip(vectors["texts"], vectors["ids"], strict=True):
        assert tokenizer.encode(text, add_special=False) == ids, text


@pytest.mark.parametrize("name", VOCABULARIES)
def test_every_text_has_the_reference_ids_with_special_tokens(name: str) -> None:
    tokenizer, vectors = real(name), expected(name)
    for text, ids in zip(vectors["texts"], vectors["ids_special_parse"], strict=True):
        assert tokenizer.encode(text, add_special=True, parse_special=True) == ids, text


@pytest.mark.parametrize("name", VOCABULARIES)
def test_ids_become_the_reference_text(name: str) -> None:
    tokenizer, vectors = real(name), expected(name)
    for ids, text in zip(vectors["ids"], vectors["detok"], strict=True):
        found = tokenizer.decode(ids, skip_special=False)
        if name not in KEEPS_SPACES:
            found, text = found.replace(" ", ""), text.replace(" ", "")
        assert found == text


@pytest.mark.parametrize("name", [name for name in VOCABULARIES if name not in ("bert-bge", "nomic-bert-moe")])
def test_decode_undoes_encode(name: str) -> None:
    tokenizer = real(name)
    for text in expected(name)["texts"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("name", MODELS)
def test_the_small_models_have_the_reference_ids(name: str) -> None:
    folder = need_cases(name)
    tokenizer = load_tokenizer(sorted(folder.glob("model-*.gguf"))[0])
    samples = json.loads((folder / "meta.json").read_text())["tokenizer"]
    for text, ids in zip(samples["texts"], samples["ids_llamacpp"], strict=True):
        assert tokenizer.encode(text) == ids, text


def test_sentences_have_the_ids_of_sentence_transformers() -> None:
    folder = need_cases("minilm")
    tokenizer = load_tokenizer(folder / "all-MiniLM-L6-v2-q8_0.gguf")
    samples = json.loads((folder / "meta.json").read_text())
    for text, ids in zip(samples["sentences"], samples["ids"], strict=True):
        assert tokenizer.encode(text)[: len(ids)] == ids, text


@pytest.mark.parametrize(
    ("name", "stops"),
    [
        ("llama-bpe", {"<|end_of_text|>", "<|eot_id|>"}),
        ("llama-spm", {"</s>"}),
        ("phi-3", {"</s>", "<|endoftext|>", "<|end|>"}),
        ("deepseek-coder", {"<｜end▁of▁sentence｜>"}),
        ("gpt-2", {"<|endoftext|>"}),
    ],
)
def test_stop_tokens_are_found(name: str, stops: set[str]) -> None:
    tokenizer = real(name)
    assert {tokenizer.token_text(id) for id in tokenizer.stop_ids} == stops


def test_a_large_vocabulary_loads_quickly() -> None:
    path = need_cases("tokenizers", "ggml-vocab-qwen2.gguf")
    start = time.process_time()
    assert load_tokenizer(path).n_vocab == 151936
    # Measured: 0.6 s on two busy cores.
    assert time.process_time() - start < 6


def test_words_that_are_remembered_have_the_ids_of_a_whole_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line of the vectors' texts twice, with odd spaces in some, against one pass of the library over each."""
    monkeypatch.setattr(wpm, "_MOST_KNOWN", 500)  # forgotten now and then
    tokenizer = load_tokenizer(need_cases("minilm") / "all-MiniLM-L6-v2-q8_0.gguf")
    model = tokenizer._model
    assert isinstance(model, wpm.WordPieceModel)
    source = Path(__file__).read_text("utf-8") + (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    lines = [line for line in source.split("\n") if line.strip()][:600]
    odd = [
        "Ünïcödé 한국어",
        "a\x1cb c\x1fd",
        "a\tb\x85c\u3000d",
        "中文字 text",
        "x" * 99 + " " + "y" * 101,
        "\x00 \ufffd",
    ]
    for text in [*lines, *odd, *reversed(lines), *odd, "  ".join(lines)]:
        words = text.translate(model._words).split(" ")
        marked = " ".join([wpm.WORD_START + word for word in words if word])
        whole = model._tokenizer.encode(marked, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special=False) == [100 if id == model._unknown else id for id in whole]
    assert 0 < len(model._known) <= 500


def test_characters_that_are_remembered_are_bounded() -> None:
    """Somebody may send every character that there is."""
    tokenizer = load_tokenizer(need_cases("minilm") / "all-MiniLM-L6-v2-q8_0.gguf")
    model = tokenizer._model
    assert isinstance(model, wpm.WordPieceModel)
    wanted = tokenizer.encode("Ünïcödé text")
    every = "".join(chr(code) for code in range(3 * wpm._MOST_CHARACTERS) if not 0xD800 <= code < 0xE000)
    tokenizer.encode(" ".join(every[i : i + 50] for i in range(0, len(every), 50)))
    assert 0 < len(model._words) <= wpm._MOST_CHARACTERS
    assert tokenizer.encode("Ünïcödé text") == wanted
