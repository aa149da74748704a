"""Text to ids and back, in small vocabularies of every model."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quarrel.errors import RequestError
from quarrel.tokenizer import Tokenizer, TokenizerWarning, load_tokenizer
from tests.tokenizer.synthetic import (
    CONTROL,
    NORMAL,
    USER_DEFINED,
    bpe_metadata,
    spm_metadata,
    ugm_metadata,
    wpm_metadata,
)

BPE = load_tokenizer(bpe_metadata())
SPM = load_tokenizer(spm_metadata())
SPM_WITHOUT_TAGS = load_tokenizer(spm_metadata(user_defined=()))
WPM = load_tokenizer(wpm_metadata())
UGM = load_tokenizer(ugm_metadata())
ALL = [BPE, SPM, WPM, UGM]

# Pieces that matter: names of special tokens, white space, bytes of characters, marks of spaces and of words.
fragments = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["hello", " world", "<|im_end|>", "<s>", "</s>", "[INST]", "<0x41>", " ", "\n", "\0", "é", "😁", "한"]),
)
texts = st.lists(fragments, max_size=8).map("".join)


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.token_text(id) for id in ids]


@given(texts)
def test_byte_level_bpe_gives_every_text_back(text: str) -> None:
    assert BPE.decode(BPE.encode(text)) == text


@given(texts)
def test_sentencepiece_gives_every_text_back_but_its_own_mark(text: str) -> None:
    text = text.replace("▁", "")
    assert SPM_WITHOUT_TAGS.decode(SPM_WITHOUT_TAGS.encode(text)) == text


def test_sentencepiece_puts_a_space_behind_a_tag_as_llama_cpp_does() -> None:
    assert SPM.decode(SPM.encode("<think>0")) == "<think> 0"


@given(texts, st.booleans())
def test_word_models_take_any_text(text: str, add_special: bool) -> None:
    for tokenizer in (WPM, UGM):
        assert all(0 <= id < tokenizer.n_vocab for id in tokenizer.encode(text, add_special))


@given(texts)
def test_plain_text_never_becomes_a_control_token(text: str) -> None:
    for tokenizer in (BPE, SPM, WPM, UGM):
        assert not any(
            tokenizer.is_control(id) and id != tokenizer.unk_id for id in tokenizer.encode(text, add_special=False)
        )


@pytest.mark.parametrize("tokenizer", ALL, ids=lambda tokenizer: tokenizer.model)
def test_the_detokenizer_writes_what_decode_writes(tokenizer: Tokenizer) -> None:
    @settings(max_examples=60)
    @given(st.lists(st.integers(0, tokenizer.n_vocab - 1), max_size=40), st.booleans())
    def run(ids: list[int], skip_special: bool) -> None:
        detokenizer = tokenizer.detokenizer(skip_special)
        parts = [detokenizer.push(id) for id in ids]
        assert "".join(parts) + detokenizer.flush() == tokenizer.decode(ids, skip_special)
        for part in parts:
            part.encode()

    run()


@given(st.lists(st.integers(0, 255), max_size=40))
def test_bytes_become_text_as_utf8_with_replacement(values: list[int]) -> None:
    data = bytes(values)
    ids = [1 + value for value in data]
    detokenizer = SPM.detokenizer(continues=True)
    text = "".join([detokenizer.push(id) for id in ids]) + detokenizer.flush()
    assert text == data.decode("utf-8", "replace")
    assert b"".join(map(SPM.token_bytes, ids)) == data


def test_no_half_character_is_written() -> None:
    detokenizer = SPM.detokenizer(continues=True)
    assert [detokenizer.push(1 + byte) for byte in "a😁b".encode()] == ["a", "", "", "", "😁", "b"]
    assert detokenizer.flush() == ""


def test_bytes_that_cannot_become_a_character_are_written_at_once() -> None:
    detokenizer = SPM.detokenizer(continues=True)
    assert [detokenizer.push(1 + byte) for byte in b"\xf0\x9fa\xff"] == ["", "", "�a", "�"]
    assert detokenizer.push(1 + 0xE4) == ""
    assert detokenizer.flush() == "�"


def test_a_continuation_keeps_its_first_space() -> None:
    ids = SPM.encode("hello", add_special=False)
    assert SPM.decode(ids) == "hello"
    detokenizer = SPM.detokenizer(continues=True)
    assert "".join(map(detokenizer.push, ids)) == " hello"


def test_the_prefix_space_follows_each_special_token() -> None:
    ids = SPM.encode("hello<think>world", add_special=False)
    assert pieces(SPM, ids) == ["▁hello", "<think>", "▁world"]
    without = load_tokenizer(spm_metadata(**{"ggml.add_space_prefix": False}))
    assert pieces(without, without.encode("hello<think>world", add_special=False)) == ["hello", "<think>", "world"]


def test_sentencepiece_neither_collapses_nor_normalises() -> None:
    assert SPM.decode(SPM.encode("  ﬁ  ①\t\n ")) == "  ﬁ  ①\t\n "
    assert pieces(SPM, SPM.encode("   é", add_special=False)) == ["▁▁▁▁", "é"]
    assert pieces(SPM, SPM.encode("ß", add_special=False)) == ["▁", "<0xC3>", "<0x9F>"]


def test_sentencepiece_merges_the_best_score_then_the_leftmost() -> None:
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "a", "b", "aa", "ab", "aab"],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -1.0, -1.0, -5.0],
        "tokenizer.ggml.token_type": [2, 1, 1, 1, 1, 1],
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": False,
    }
    tokenizer = load_tokenizer(metadata)
    assert pieces(tokenizer, tokenizer.encode("aab")) == ["aab"]
    assert pieces(tokenizer, tokenizer.encode("aaab")) == ["aa", "ab"]


def test_bpe_merges_by_rank_unless_merges_are_ignored() -> None:
    metadata = bpe_metadata() | {"tokenizer.ggml.merges": ["h e", "l l"]}
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "ll"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], NORMAL]
    merged = load_tokenizer(metadata)
    assert pieces(merged, merged.encode("hello", add_special=False)) == ["he", "ll", "o"]
    whole = load_tokenizer(metadata | {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False})
    assert pieces(whole, whole.encode("hello", add_special=False)) == ["hello"]


def test_the_longest_special_token_wins_wherever_it_stands() -> None:
    tokenizer = load_tokenizer(bpe_metadata(control=["<|a|>", "a|><|b|>x"], user_defined=["  ", "    "]))
    assert pieces(tokenizer, tokenizer.encode("<|a|><|b|>x", parse_special=True)) == ["<", "|", "a|><|b|>x"]
    assert pieces(tokenizer, tokenizer.encode(" " * 7)) == ["    ", "  ", "Ġ"]


def test_control_tokens_are_parsed_on_request_only() -> None:
    assert "<|im_end|>" in pieces(BPE, BPE.encode("x<|im_end|>", parse_special=True))
    assert "<|im_end|>" not in pieces(BPE, BPE.encode("x<|im_end|>"))
    assert "<think>" in pieces(BPE, BPE.encode("x<think>"))


def test_a_whole_word_that_names_a_control_token_stays_text() -> None:
    metadata = bpe_metadata(control=["hello", "<s>"]) | {"tokenizer.ggml.pre": "llama-bpe"}
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    named = tokens.index("hello")
    tokens[named] = "unused word"
    tokenizer = load_tokenizer(metadata)
    control = tokens.index("hello")
    assert tokenizer.is_control(control)
    assert control not in tokenizer.encode("hello hello")
    assert control in tokenizer.encode("hello", parse_special=True)


def test_bos_and_eos_follow_the_file() -> None:
    for metadata in (bpe_metadata, spm_metadata):
        both = load_tokenizer(metadata(**{"ggml.add_bos_token": True, "ggml.add_eos_token": True}))
        ids = both.encode("hello")
        assert (ids[0], ids[-1]) == (both.bos_id, both.eos_id)
        assert both.encode("hello", add_special=False) == ids[1:-1]
        assert both.encode("") == [both.bos_id, both.eos_id]
        neither = load_tokenizer(metadata(**{"ggml.add_bos_token": False}))
        assert neither.encode("") == []
    assert SPM.encode("") == [SPM.bos_id]
    assert BPE.encode("") == []
    assert WPM.encode("") == [WPM.cls_id, WPM.sep_id]
    assert UGM.encode("hello")[-1] == UGM.eos_id


def test_wordpiece_splits_words_and_gives_up_on_whole_words() -> None:
    found = pieces(WPM, WPM.encode("Hello, HELLOS wörld héllo xhello 中hello", add_special=False))
    assert found == ["▁hello", "▁,", "▁hello", "s", "▁world", "▁hello", "[UNK]", "▁中", "▁hello"]
    assert pieces(WPM, WPM.encode("hello\0\u200b\tworld", add_special=False)) == ["▁hello", "▁world"]
    assert pieces(WPM, WPM.encode("s" * 101, add_special=False)) == ["[UNK]"]
    cased = load_tokenizer(wpm_metadata(**{"ggml.normalizer.lowercase": False}))
    assert pieces(cased, cased.encode("hello Hello", add_special=False)) == ["▁hello", "[UNK]"]


def test_unigram_takes_the_best_sum_of_scores() -> None:
    assert pieces(UGM, UGM.encode("hello", add_special=False)) == ["▁hello"]
    assert pieces(UGM, UGM.encode("hellol", add_special=False)) == ["▁hello", "l"]
    assert pieces(UGM, UGM.encode("zz hello", add_special=False)) == ["▁", "<unk>", "▁hello"]
    assert pieces(UGM, UGM.encode("<s>", add_special=False)) == ["▁", "<unk>"]


def test_unigram_collapses_spaces_where_the_file_says_so() -> None:
    assert pieces(UGM, UGM.encode("  hello ", add_special=False))[0] == "▁"
    tidy = load_tokenizer(ugm_metadata(**{"ggml.remove_extra_whitespaces": True}))
    assert pieces(tidy, tidy.encode("  hello   world ", add_special=False)) == ["▁hello", "▁world"]


def test_phi3_tokens_swallow_the_space_behind_them() -> None:
    metadata = spm_metadata() | {"general.name": "Phi-3 mini"}
    tokenizer = load_tokenizer(metadata)
    ids = tokenizer.encode("<|user|> \nhello<|end|>", add_special=False, parse_special=True)
    assert pieces(tokenizer, ids) == ["<|user|>", "▁hello", "<|end|>"]


def test_a_mask_swallows_the_space_before_it() -> None:
    metadata = ugm_metadata() | {"general.architecture": "nomic-bert-moe"}
    metadata["tokenizer.ggml.tokens"] = [*ugm_metadata()["tokenizer.ggml.tokens"], "<mask>"]
    metadata["tokenizer.ggml.token_type"] = [*ugm_metadata()["tokenizer.ggml.token_type"], USER_DEFINED]
    metadata["tokenizer.ggml.scores"] = [*ugm_metadata()["tokenizer.ggml.scores"], 0.0]
    tokenizer = load_tokenizer(metadata)
    assert pieces(tokenizer, tokenizer.encode("hello  <mask>", add_special=False)) == ["▁hello", "<mask>"]


def test_specials_are_hidden_unless_asked_for() -> None:
    ids = BPE.encode("<|im_start|>hello<think>", parse_special=True)
    assert BPE.decode(ids) == "hello<think>"
    assert BPE.decode(ids, skip_special=False) == "<|im_start|>hello<think>"
    assert BPE.token_bytes(ids[0]) == b""
    assert BPE.token_bytes(ids[0], special=True) == b"<|im_start|>"


@pytest.mark.parametrize("id", [-1, 10**6, 2**31, -(2**63), 2**70])
def test_an_id_outside_the_vocabulary_is_refused(id: int) -> None:
    for act in (BPE.token_bytes, BPE.token_text, BPE.is_control, BPE.detokenizer().push, lambda id: BPE.decode([id])):
        with pytest.raises(RequestError, match=r"outside the vocabulary, wanted 0 to \d+"):
            act(id)


@pytest.mark.parametrize("id", ["1", 1.5, None])
def test_an_id_that_is_no_number_is_refused(id: object) -> None:
    with pytest.raises(RequestError, match="wanted an integer"):
        BPE.decode([id])  # type: ignore[list-item]


@pytest.mark.parametrize("tokenizer", ALL, ids=lambda tokenizer: tokenizer.model)
def test_text_that_is_not_unicode_is_refused(tokenizer: Tokenizer) -> None:
    for text in ("\ud800", "a\udfffb", "\udc80<s>"):
        with pytest.raises(RequestError, match="lone surrogate"):
            tokenizer.encode(text)
    with pytest.raises(RequestError, match="wanted a str"):
        tokenizer.encode(b"bytes")  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("text", ["a" * 10**6, " " * 10**6, "\n " * 500_000, "1" * 10**6, "<|" * 500_000])
def test_a_megabyte_takes_seconds_not_minutes(text: str) -> None:
    start = time.process_time()
    for tokenizer in ALL:
        tokenizer.encode(text, parse_special=True)
    # Measured: at most 4 s for the four of them on two busy cores. Quadratic time would be minutes.
    assert time.process_time() - start < 40


def test_user_defined_whitespace_runs_are_tokens() -> None:
    tokenizer = load_tokenizer(bpe_metadata(user_defined=["\n\n", "<table>"]))
    assert pieces(tokenizer, tokenizer.encode("x\n\n<table>")) == ["x", "\n\n", "<table>"]


def test_gemma4_is_bpe_over_marked_spaces() -> None:
    letters = list("helowrd▁")
    merges = ["▁ w", "h e", "l l"]
    tokens = ["<unk>", "<bos>", "<eos>", *[f"<0x{byte:02X}>" for byte in range(256)], *letters, "▁w", "he", "ll", "\n"]
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, CONTROL, CONTROL] + [6] * 256 + [NORMAL] * (len(tokens) - 259),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    tokenizer = load_tokenizer(metadata)
    ids = tokenizer.encode("hello world\né<0x41>")
    assert pieces(tokenizer, ids)[:11] == ["<bos>", "he", "ll", "o", "▁w", "o", "r", "l", "d", "\n", "<0xC3>"]
    assert tokenizer.decode(ids) == "hello world\né<0x41>"


def test_an_unknown_or_missing_pre_tokenizer_warns() -> None:
    metadata = bpe_metadata(**{"ggml.pre": "from-the-future"})
    with pytest.warns(TokenizerWarning, match="'from-the-future', unknown here: texts are split by llama.cpp's default"):
        tokenizer = load_tokenizer(metadata)
    assert tokenizer.pre == "from-the-future"
    assert tokenizer.decode(tokenizer.encode("It's 12345 o'clock!")) == "It's 12345 o'clock!"
    del metadata["tokenizer.ggml.pre"]
    with pytest.warns(TokenizerWarning, match=r"names no tokenizer\.ggml\.pre"):
        assert load_tokenizer(metadata).pre is None
