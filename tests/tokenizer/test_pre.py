"""How words are cut before merging: every set of rules is sound, and the ones with tricks cut where they should."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from quarrel.tokenizer.pre import _RULES, PreTokenizer, pre_tokenizer

DISTINCT = {rules.patterns: name for name, rules in _RULES.items()}
NASTY = (
    "It's THEY'LL o'clock ǅungla İstanbul ﬀ 1234567 ١٢٣ ½Ⅷ e\u0301 हिन्दी 中文混合かなカナ 한국어 ไทย\r\n\r\n \t\n "
    "x\u3000y  foo_bar/baz//\n <|im_end|> --- ...!!! 😁👩\u200d👧 a\u00a0b\u2028c \u0085 'ſ ‘quoted’ ，。 "
    "<sentinel:12>IMGIMGABZ"
)
LETTERS = "aA1 \n\t.,'!</é中한ไ\u0301½\u00a0\r_ǅ😁٣"


def cut(rules: PreTokenizer, text: str) -> list[str]:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rules.patterns]
    return [piece for piece, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)]


@pytest.mark.parametrize("name", DISTINCT.values())
def test_nothing_is_lost(name: str) -> None:
    rules = _RULES[name]
    assert "".join(cut(rules, NASTY)) == NASTY
    assert len(cut(rules, NASTY)) > 1

    @settings(max_examples=40, deadline=None)
    @given(st.text(LETTERS, max_size=30))
    def run(text: str) -> None:
        pieces = cut(rules, text)
        assert "".join(pieces) == text
        assert all(pieces)

    run()


@pytest.mark.parametrize("name", DISTINCT.values())
@pytest.mark.parametrize("unit", [" ", "1", "A", "a", "中", "!", "\t", "\r\n", "a ", "'", "A\u0301"])
def test_long_runs_take_linear_time(name: str, unit: str) -> None:
    start = time.process_time()
    cut(_RULES[name], unit * 20_000 + "x")
    cut(_RULES[name], unit * 20_000 + "1")
    # Measured: 0.1 s at most. Quadratic, twenty thousand characters take half a minute.
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("llama-bpe", "It'S 12345 x\n\n  y", ["It", "'S", " ", "123", "45", " x", "\n\n", " ", " y"]),
        ("dbrx", "12345", ["123", "45"]),
        ("qwen2", "12345 été", ["1", "2", "3", "4", "5", " été"]),
        ("qwen35", "e\u0301a हिन्दी", ["e\u0301a", " हिन्दी"]),
        ("qwen2", "e\u0301a", ["e", "\u0301a"]),
        ("gpt-2", "It'S 12345  x", ["It", "'", "S", " 12345", " ", " x"]),
        ("smollm", "a 12", ["a", " ", "1", "2"]),
        ("gpt-4o", "CamelCaseTEXT'll  a/b//\n", ["Camel", "Case", "TEXT'll", " ", " a", "/b", "//\n"]),
        ("tekken", "CamelCase's 123", ["Camel", "Case", "'s", " ", "1", "2", "3"]),
        ("falcon", "12345 a.b", ["123", "45", " a", ".", "b"]),
        ("deepseek-v3", "12345中文a.b", ["123", "45", "中文", "a", ".b"]),
        ("deepseek-llm", "éé the 12中文   ", ["éé", " the", " ", "12", "中文", "   "]),
        ("kimi-k2", "中文Abc漢字", ["中文", "Abc", "漢字"]),
        ("superbpe", "a 1234567", ["a ", "1", "234", "567"]),
        ("afmoe", "12345", ["12", "345"]),
        ("tiny_aya", "12345 12345x", ["12", "345", " ", "123", "45", "x"]),
        ("viking", " ab1, c", [" ab", "1", ",", " c"]),
        ("gemma4", "a b\n\nc", ["a b", "\n\n", "c"]),
        ("jais-2", " " * 7 + "x", ["    ", "  ", " x"]),
        ("bailingmoe", "\n\n\nA", ["\n\n\n", "A"]),
    ],
)
def test_words_are_cut_where_the_model_expects(name: str, text: str, pieces: list[str]) -> None:
    rules = pre_tokenizer(name)
    assert rules is not None
    assert cut(rules, text) == pieces


def test_names_that_stand_for_the_same_rules() -> None:
    for names in (
        "llama3 llama-v3 llama-bpe falcon3 pixtral lfm2",
        "dbrx smaug-bpe chatglm-bpe glm4",
        "qwen2 deepseek-r1-qwen stablelm2 megrez",
        "gpt-4o llama4 kanana2",
        "gpt-2 phi-2 mpt olmo jais exaone4 modern-bert",
        "smollm refact starcoder command-r codeshell exaone",
    ):
        assert len({pre_tokenizer(name) for name in names.split()}) == 1
    for name in ("llama-bpe", "tekken"):
        rules = pre_tokenizer(name)
        assert rules is not None
        assert rules.ignore_merges
        assert rules.add_bos
    assert pre_tokenizer("from-the-future") is None
