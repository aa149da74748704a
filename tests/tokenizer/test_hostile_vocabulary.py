"""Vocabularies that lie: each is refused with a sentence or used without harm, and no native library falls."""

from __future__ import annotations

import contextlib
import struct
import warnings
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quarrel.errors import ModelError, RequestError, TokenizerError
from quarrel.tokenizer import TokenizerWarning, load_tokenizer
from quarrel.tokenizer.charsmap import CharsMap
from tests.tokenizer.synthetic import (
    BYTE,
    CONTROL,
    NORMAL,
    USER_DEFINED,
    bpe_metadata,
    spm_metadata,
    ugm_metadata,
    wpm_metadata,
)

MAKERS: list[Callable[..., dict[str, object]]] = [bpe_metadata, spm_metadata, wpm_metadata, ugm_metadata]
TEXTS = ["", "hello world", "<s>é😁\0", "[CLS] x", " \n\t "]


def use(metadata: dict[str, object]) -> None:
    tokenizer = load_tokenizer(metadata)
    for text in TEXTS:
        for parse_special in (False, True):
            ids = tokenizer.encode(text, parse_special=parse_special)
            assert all(0 <= id < tokenizer.n_vocab for id in ids)
            tokenizer.decode(ids, skip_special=False)
    assert all(0 <= id < tokenizer.n_vocab for id in tokenizer.stop_ids)


def with_token(metadata: dict[str, object], text: str, kind: int) -> dict[str, object]:
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(kinds, list)
    scores = metadata.get("tokenizer.ggml.scores")
    changed = metadata | {"tokenizer.ggml.tokens": [*tokens, text], "tokenizer.ggml.token_type": [*kinds, kind]}
    return changed | {"tokenizer.ggml.scores": [*scores, 0.0]} if isinstance(scores, list) else changed


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("model", "rwkv", r"tokenizer\.ggml\.model is 'rwkv', wanted one of"),
        ("model", 7, r"tokenizer\.ggml\.model' is 7, wanted a string"),
        ("tokens", [], r"tokens is missing or empty"),
        ("tokens", [1, 2], r"tokens' is 1, wanted a string"),
        ("token_type", [1], r"token_type has 1 elements, wanted \d+"),
        ("token_type", ["a"], r"token_type' is 'a', wanted an integer"),
        ("scores", [0.5], r"scores has 1 elements, wanted \d+"),
        ("scores", [float("nan")], r"scores' is nan, wanted a finite number"),
        ("bos_token_id", 10**6, r"bos_token_id is 1000000, wanted 0 to \d+"),
        ("eos_token_id", -2, r"eos_token_id is -2, wanted 0 to \d+"),
        ("unknown_token_id", 2**40, r"unknown_token_id is 1099511627776, wanted"),
        ("eot_token_id", 2**31, r"eot_token_id is 2147483648, wanted"),
        ("add_bos_token", 1, r"add_bos_token' is 1, wanted true or false"),
    ],
)
def test_a_wrong_key_is_refused_by_name(
    make: Callable[..., dict[str, object]], key: str, value: object, sentence: str
) -> None:
    with pytest.raises(ModelError, match=sentence):
        load_tokenizer(make(**{f"ggml.{key}": value}))


def test_an_empty_header_is_refused() -> None:
    with pytest.raises(TokenizerError, match="holds no vocabulary"):
        load_tokenizer({})
    with pytest.raises(TokenizerError, match="tokens is missing or empty"):
        load_tokenizer({"tokenizer.ggml.model": "llama"})


def test_bpe_without_merges_is_refused() -> None:
    metadata = bpe_metadata()
    del metadata["tokenizer.ggml.merges"]
    with pytest.raises(TokenizerError, match="merges is missing"):
        load_tokenizer(metadata)


def test_a_bos_to_be_added_must_exist() -> None:
    metadata = bpe_metadata(control=["<x>"], **{"ggml.add_bos_token": True})
    with pytest.raises(TokenizerError, match="add_bos_token is true, but there is no bos_token_id"):
        load_tokenizer(metadata)


def test_the_number_that_means_no_token_is_none() -> None:
    for value in (-1, 2**32 - 1):
        assert load_tokenizer(spm_metadata(**{"ggml.eos_token_id": value})).eos_id is None


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("kind", [-5, 0, 1, 2, 3, 4, 5, 6, 7, 255])
@pytest.mark.parametrize("text", ["", "\0", "a\0b", "\udc80", "a\udcffz", "<0xZZ>", "<0x41>", " ", "▁", "x" * 70_000])
def test_a_strange_piece_does_no_harm(make: Callable[..., dict[str, object]], kind: int, text: str) -> None:
    metadata = with_token(make(), text, kind)
    with warnings.catch_warnings():
        # "▁" and "<0x41>" are in some of them already.
        warnings.simplefilter("ignore", TokenizerWarning)
        use(metadata)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED, BYTE])
def test_of_equal_pieces_the_first_is_used(make: Callable[..., dict[str, object]], kind: int) -> None:
    metadata = with_token(with_token(make(), "hello", kind), "hello", kind)
    with pytest.warns(TokenizerWarning, match="more than once; the first of each is used"):
        use(metadata)
    with pytest.warns(TokenizerWarning):
        tokenizer = load_tokenizer(metadata)
    last = tokenizer.n_vocab - 1
    assert last not in tokenizer.encode("hello hellohello", parse_special=True)
    assert tokenizer.token_text(last) == "hello"


@pytest.mark.parametrize(
    "merge", ["a", "", " ", "  ", "a ", " a", "x y", "nothere a", "a nothere", "a  b", "h e l", "<s> <s>", "\udc80 a"]
)
def test_a_merge_that_does_not_resolve_is_left_out(merge: str) -> None:
    metadata = bpe_metadata()
    merges = metadata["tokenizer.ggml.merges"]
    assert isinstance(merges, list)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TokenizerWarning)
        use(metadata | {"tokenizer.ggml.merges": [merge, *merges, merge]})


def test_lost_merges_are_reported() -> None:
    metadata = bpe_metadata() | {"tokenizer.ggml.merges": ["h e", "q q", "q z"]}
    with pytest.warns(TokenizerWarning, match="2 of 3 merges name pieces that are not in the vocabulary"):
        load_tokenizer(metadata)


def test_the_first_of_equal_merges_counts() -> None:
    tokens = bpe_metadata()["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    metadata = with_token(with_token(bpe_metadata(), "ab", NORMAL), "bc", NORMAL)
    tokenizer = load_tokenizer(metadata | {"tokenizer.ggml.merges": ["a b", "b c", "a b"]})
    assert tokenizer.encode("abc")[0] == len(tokens)


def test_a_merge_cannot_make_a_control_token() -> None:
    metadata = with_token(bpe_metadata(), "ab", CONTROL)
    tokenizer = load_tokenizer(metadata | {"tokenizer.ggml.merges": ["a b"]})
    assert tokenizer.n_vocab - 1 not in tokenizer.encode("ab ab")


def test_sentencepiece_without_bytes_has_an_unknown_token() -> None:
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a", "▁"],
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1],
    }
    tokenizer = load_tokenizer(metadata)
    assert tokenizer.encode("aé", add_special=False) == [4, 3, 0]
    assert tokenizer.decode([4, 3, 0]) == "a"
    none = load_tokenizer(metadata | {"tokenizer.ggml.unknown_token_id": 2**32 - 1})
    assert none.encode("aé", add_special=False) == [4, 3]


def test_a_vocabulary_of_one_piece_works() -> None:
    for model in ("llama", "bert", "t5"):
        use({"tokenizer.ggml.model": model, "tokenizer.ggml.tokens": ["a"]})
    use(
        {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": []}
        | {"tokenizer.ggml.pre": "gpt-2"}
    )


def test_too_many_tokens_are_refused() -> None:
    tokens = ["a"] * ((2 << 20) + 1)
    with pytest.raises(TokenizerError, match="has 2097153 pieces, wanted at most 2097152"):
        load_tokenizer({"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens})
    n = (1 << 18) + 1
    many = {"tokenizer.ggml.tokens": [f"<{at}>" for at in range(n)], "tokenizer.ggml.token_type": [CONTROL] * n}
    with pytest.raises(TokenizerError, match="has 262145 special tokens, wanted at most 262144"):
        load_tokenizer({"tokenizer.ggml.model": "llama"} | many)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_vocabulary_is_refused_or_used(data: st.DataObject) -> None:
    pieces = st.one_of(st.text(max_size=4), st.sampled_from(["a", "b", "ab", "▁", "▁a", "<0x61>", "<s>", "[UNK]", "Ġ"]))
    tokens = data.draw(st.lists(pieces, max_size=12))
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": data.draw(st.sampled_from(["llama", "gpt2", "bert", "t5", "gemma4"])),
        "tokenizer.ggml.pre": data.draw(st.sampled_from(["gpt-2", "llama-bpe", "default", "kimi-k2"])),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": data.draw(st.lists(st.builds("{} {}".format, pieces, pieces), max_size=8)),
    }
    for key, value in (
        ("token_type", st.lists(st.integers(0, 7), min_size=len(tokens), max_size=len(tokens))),
        ("scores", st.lists(st.floats(allow_nan=False, width=32), min_size=len(tokens), max_size=len(tokens))),
        ("unknown_token_id", st.integers(-1, 12)),
        ("bos_token_id", st.integers(-1, 12)),
        ("add_space_prefix", st.booleans()),
        ("add_bos_token", st.booleans()),
    ):
        if data.draw(st.booleans()):
            metadata[f"tokenizer.ggml.{key}"] = data.draw(value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TokenizerWarning)
        try:
            use(metadata)
        except ModelError as error:
            assert str(error)


def charsmap(*entries: tuple[int, int], texts: bytes = b"x\0") -> bytes:
    """A map from trie units by position, all others empty, and its replacements."""
    units = [0] * 512
    for at, unit in entries:
        units[at] = unit
    return struct.pack("<I", 4 * len(units)) + struct.pack(f"<{len(units)}I", *units) + texts


def test_a_charsmap_replaces_the_longest_prefix() -> None:
    # "a" -> texts at 0. The root's base is 256; a's unit is 256 ^ 97, its value stands at 256 ^ 97 ^ 2.
    at = 256 ^ 97
    blob = charsmap((0, 256 << 10), (at, 97 | 1 << 8 | 2 << 10), (at ^ 2, 0 | 1 << 31), texts=b"XY\0")
    assert CharsMap.parse(blob).apply("bab") == "bXYb"
    longest = CharsMap({"a": "1", "abc": "2", "b": ""})
    assert longest.apply("abab abc abcx a") == "11 2 2x 1"
    assert CharsMap.parse(b"").apply("same") == "same"


@pytest.mark.parametrize(
    "blob",
    [
        b"\1",
        b"\0\0\0\0",
        struct.pack("<I", 2**32 - 4) + b"\0" * 64,
        struct.pack("<I", 6) + b"\0" * 64,
        # A value beyond the trie, one beyond the texts, a text without an end, a trie that runs in a circle.
        charsmap((0, 256 << 10), (256 ^ 97, 97 | 1 << 8 | 0x3FF << 10 | 1 << 9)),
        charsmap((0, 256 << 10), (256 ^ 97, 97 | 1 << 8 | 2 << 10), (256 ^ 97 ^ 2, 999 | 1 << 31)),
        charsmap((0, 256 << 10), (256 ^ 97, 97 | 1 << 8 | 2 << 10), (256 ^ 97 ^ 2, 1 << 31), texts=b"x"),
        charsmap((0, 256 << 10), (256 ^ 97, 97 | 97 << 10)),
    ],
)
def test_a_broken_charsmap_is_refused(blob: bytes) -> None:
    with pytest.raises(TokenizerError, match="precompiled_charsmap"):
        load_tokenizer(ugm_metadata(**{"ggml.precompiled_charsmap": list(blob)}))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 511), st.integers(0, 2**32 - 1)), max_size=20), st.text(max_size=20))
def test_any_charsmap_is_refused_or_used(entries: list[tuple[int, int]], text: str) -> None:
    with contextlib.suppress(TokenizerError):
        CharsMap.parse(charsmap(*entries)).apply(text)


def test_a_charsmap_has_a_limit() -> None:
    with pytest.raises(TokenizerError, match="has 1048577 bytes"):
        load_tokenizer(ugm_metadata(**{"ggml.precompiled_charsmap": [0] * ((1 << 20) + 1)}))
    with pytest.raises(TokenizerError, match="no array of bytes"):
        load_tokenizer(ugm_metadata(**{"ggml.precompiled_charsmap": [300]}))


def test_a_text_beyond_the_regular_expressions_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    # Oniguruma stops after ten million steps back in one match, and the library panics.
    tokenizer = load_tokenizer(bpe_metadata())
    with pytest.raises(RequestError, match="cannot be split into words"):
        tokenizer.encode(" " * 11_000_000)
    capfd.readouterr()
    assert tokenizer.encode("hello")
