"""Short, repeatable runs of `python -m fuzz.tokenizer` and `python -m fuzz.chat`."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz import chat, tokenizer


@pytest.mark.parametrize("model", tokenizer.MAKERS)
def test_the_files_to_be_changed_are_sound(model: str, tmp_path: Path) -> None:
    assert tokenizer.check_mutant((tokenizer.file_of(model).data, "hello <s>", [1, 2, 3]), tmp_path / "sound.gguf")


def test_changed_vocabularies_do_no_harm(tmp_path: Path) -> None:
    refused, used = tokenizer.fuzz(100, 1, tmp_path / "mutant.gguf")
    assert refused > 50
    assert used


@pytest.mark.parametrize(("model", "text"), [("spm", "\u2581"), ("spm", "a\u2581 \u2581"), ("bpe", "a\u2581")])
def test_a_sound_vocabulary_gives_back_what_its_kind_promises(model: str, text: str) -> None:
    tokenizer.check_sound((model, text, []))


def test_changed_templates_do_no_harm() -> None:
    refused, rendered = chat.fuzz(40, 1)
    assert refused > 10
    assert rendered > 0
