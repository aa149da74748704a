"""What the native libraries are built from: the quick ways through long vocabularies write what the slow ones write."""

from __future__ import annotations

import pytest

from quarrel.gguf import Metadata
from quarrel.tokenizer import spm
from quarrel.tokenizer.bpe import _pairs, _table
from quarrel.tokenizer.vocab import read_vocabulary
from tests.tokenizer.synthetic import NORMAL, UNUSED, bpe_metadata, spm_metadata


def with_pieces(*pieces: str) -> Metadata:
    metadata = spm_metadata()
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(kinds, list)
    kinds = [*kinds, *[NORMAL] * (len(pieces) - 1), UNUSED]
    scores = [-float(i) for i in range(len(kinds))]
    return Metadata(
        {
            **metadata,
            "tokenizer.ggml.tokens": [*tokens, *pieces],
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.scores": scores,
        }
    )


@pytest.mark.parametrize("size", [2, 59, 117, 118, 119, 127, 128, 300])
def test_pieces_of_any_length_are_written_alike(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = read_vocabulary(with_pieces("x" * size + "y", "é" * size, "q" * size, "unused"))
    quick = spm._model_proto(vocabulary)
    monkeypatch.setattr(spm, "_SHORT", 0)
    assert spm._model_proto(vocabulary) == quick


@pytest.mark.parametrize(("odd", "written"), [("a\0b", b"a\0b"), ("\udcc3zz", b"\xc3zz"), ("", b"\n\0"), ("hello", None)])
@pytest.mark.filterwarnings("ignore")
def test_one_odd_piece_is_left_out_and_the_others_are_not(odd: str, written: bytes | None) -> None:
    proto = spm._model_proto(read_vocabulary(with_pieces("plain", odd, "unused")))
    assert b"plain" in proto
    assert written is None or written not in proto
    assert proto.count(b"\x0a\x05hello") == 1


def test_a_merge_ends_its_left_piece_at_the_first_space_that_does_not_begin_it() -> None:
    merges = ["a b", "a  b", " a b", "  b", " ", "  ", "a ", "ab", "", "a b", "a b c"]
    want = [("a", "b"), ("a", " b"), (" a", "b"), (" ", "b"), (" ", ""), ("a", ""), ("a", "b c")]
    assert _pairs(merges) == want


@pytest.mark.filterwarnings("ignore")
def test_a_table_holds_what_the_library_can() -> None:
    metadata = bpe_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    sound = _table(read_vocabulary(Metadata(metadata)), [])
    for odd in ("a\0", "\udcc3", ""):
        vocabulary = read_vocabulary(Metadata({**metadata, "tokenizer.ggml.tokens": [*tokens[:-1], odd]}))
        assert odd not in _table(vocabulary, [])
    assert sound["hello"] == tokens.index("hello")
