"""Which tokens end a generation, and what the file says about special ids."""

from __future__ import annotations

import pytest

from quarrel.tokenizer import Tokenizer, load_tokenizer
from tests.tokenizer.synthetic import CONTROL, USER_DEFINED, bpe_metadata, spm_metadata, wpm_metadata


def stops(tokenizer: Tokenizer) -> set[str]:
    return {tokenizer.token_text(id) for id in tokenizer.stop_ids}


def with_tokens(*texts: str) -> Tokenizer:
    return load_tokenizer(bpe_metadata(control=texts, user_defined=()))


def test_stop_tokens_are_known_by_text() -> None:
    found = stops(with_tokens("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|eom_id|>", "<|im_start|>", "<think>"))
    assert found == {"<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|eom_id|>"}


def test_harmony_messages_end_without_ending_the_turn() -> None:
    assert stops(with_tokens("<|end|>", "<|return|>", "<|call|>", "<|start|>")) == {"<|return|>", "<|call|>"}
    assert stops(with_tokens("<|end|>", "<|flush|>", "<|calls|>")) == {"<|flush|>", "<|calls|>"}
    assert stops(with_tokens("<|end|>", "<|return|>")) == {"<|end|>", "<|return|>"}


def test_in_gemma4_a_closing_tag_of_html_is_text() -> None:
    tokenizer = with_tokens("</s>", "<|tool_response>", "<turn|>")
    assert stops(tokenizer) == {"<|tool_response>", "<turn|>"}


def test_the_file_names_stop_tokens_as_well() -> None:
    for key in ("eos", "eot", "eom", "fim_pad"):
        metadata = bpe_metadata(control=["<x>"], user_defined=())
        tokens = metadata["tokenizer.ggml.tokens"]
        assert isinstance(tokens, list)
        tokenizer = load_tokenizer(metadata | {f"tokenizer.ggml.{key}_token_id": tokens.index("<x>")})
        assert stops(tokenizer) == {"<x>"}


@pytest.mark.parametrize("kind", [1, CONTROL, USER_DEFINED])
def test_a_stop_text_is_a_control_token_whatever_the_file_calls_it(kind: int) -> None:
    metadata = bpe_metadata(control=["<|im_end|>"], user_defined=())
    kinds = metadata["tokenizer.ggml.token_type"]
    assert isinstance(kinds, list)
    kinds[-1] = kind
    tokenizer = load_tokenizer(metadata)
    last = tokenizer.n_vocab - 1
    assert tokenizer.is_control(last)
    assert last not in tokenizer.encode("<|im_end|>")


def test_special_ids_have_the_defaults_of_their_model() -> None:
    silent = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a", "b", "c"]}
    spm = load_tokenizer(silent)
    assert (spm.unk_id, spm.bos_id, spm.eos_id, spm.pad_id) == (0, 1, 2, None)
    assert (spm.add_bos, spm.add_eos) == (True, False)
    bpe = load_tokenizer(bpe_metadata(control=["<x>"], user_defined=()))
    assert (bpe.unk_id, bpe.bos_id, bpe.eos_id, bpe.add_bos) == (None, None, None, False)
    short = load_tokenizer(silent | {"tokenizer.ggml.tokens": ["a"]})
    assert (short.unk_id, short.bos_id, short.eos_id, short.add_bos) == (0, None, None, False)


def test_bert_starts_with_cls_and_ends_with_sep() -> None:
    tokenizer = load_tokenizer(wpm_metadata())
    assert (tokenizer.cls_id, tokenizer.bos_id, tokenizer.sep_id) == (2, 2, 3)
    metadata = wpm_metadata(**{"ggml.bos_token_id": 4})
    assert (load_tokenizer(metadata).cls_id, load_tokenizer(metadata).bos_id) == (2, 4)
    del metadata["tokenizer.ggml.cls_token_id"]
    assert load_tokenizer(metadata).encode("hello")[0] == 4
    zero = load_tokenizer(wpm_metadata(**{"ggml.cls_token_id": 0}))
    assert (zero.cls_id, zero.bos_id) == (0, 0)


def test_attributes_say_what_the_file_is() -> None:
    tokenizer = load_tokenizer(spm_metadata(**{"ggml.pre": "default"}))
    assert (tokenizer.model, tokenizer.pre, repr(tokenizer)) == (
        "llama",
        "default",
        f"Tokenizer(llama, {tokenizer.n_vocab} ids)",
    )
    assert tokenizer.token_id("<s>") == tokenizer.bos_id
    assert tokenizer.token_id("no such piece") is None


def test_the_parts_of_a_text_with_a_hole_are_found_by_key_or_by_name() -> None:
    from quarrel.gguf import Metadata
    from quarrel.tokenizer.tokenizer import fim_ids

    ids = {"a": 0, "<|fim_prefix|>": 1, "<|fim_suffix|>": 2, "<MID>": 3, "b": 4}
    assert fim_ids(Metadata({}), ids) == {"prefix": 1, "suffix": 2, "middle": 3}
    stated = {
        "tokenizer.ggml.fim_pre_token_id": 4,
        "tokenizer.ggml.suffix_token_id": 0,
        "tokenizer.ggml.fim_sep_token_id": 9,
    }
    assert fim_ids(Metadata(stated), ids) == {"prefix": 4, "suffix": 0, "middle": 3}
