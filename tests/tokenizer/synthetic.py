"""Small vocabularies of every model, as metadata: nothing to read, nothing to download."""

from __future__ import annotations

from collections.abc import Sequence

from quarrel.tokenizer.detokenizer import byte_alphabet

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

CHAT_TOKENS = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
    *("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>"),
    *("<start_of_turn>", "<end_of_turn>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    *("[INST]", "[/INST]", "<s>", "</s>"),
)
TAG_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
WORDS = ("hello", "world", "user", "system", "assistant", "the", "model", "you", "and", "in", "st", "end")


def bpe_metadata(
    control: Sequence[str] = CHAT_TOKENS, user_defined: Sequence[str] = TAG_TOKENS, **keys: object
) -> dict[str, object]:
    """All bytes, a few words with their merges, then the special tokens."""
    alphabet = {byte: char for char, byte in byte_alphabet().items()}
    tokens = [alphabet[byte] for byte in range(256)]
    merges = []
    for word in [*WORDS, *("Ġ" + word for word in WORDS)]:
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                tokens.append(word[:end])
                merges.append(f"{word[: end - 1]} {word[end - 1]}")
    kinds = [NORMAL] * len(tokens) + [CONTROL] * len(control) + [USER_DEFINED] * len(user_defined)
    tokens += [*control, *user_defined]
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
    }
    for name, text in (("bos", "<s>"), ("eos", "</s>")):
        if text in tokens:
            metadata[f"tokenizer.ggml.{name}_token_id"] = tokens.index(text)
    return metadata | {f"tokenizer.{key}": value for key, value in keys.items()}


def spm_metadata(
    control: Sequence[str] = CHAT_TOKENS, user_defined: Sequence[str] = TAG_TOKENS, **keys: object
) -> dict[str, object]:
    """<unk>, the bytes, ASCII, a few words, then the special tokens; bos and eos are <s> and </s> where they exist."""
    tokens = ["<unk>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = [UNKNOWN] + [BYTE] * 256
    pieces = [chr(code) for code in range(0x21, 0x7F)] + ["▁", "▁▁", "▁▁▁▁", "é"]
    for word in [*WORDS, *("▁" + word for word in WORDS)]:
        pieces += [word[:end] for end in range(2, len(word) + 1)]
    pieces = list(dict.fromkeys(pieces))
    tokens += pieces
    kinds += [NORMAL] * len(pieces)
    kinds += [CONTROL] * len(control) + [USER_DEFINED] * len(user_defined)
    tokens += [*control, *user_defined]
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(at) for at in range(len(tokens))],
        "tokenizer.ggml.token_type": kinds,
    }
    for name, text in (("bos", "<s>"), ("eos", "</s>")):
        if text in tokens:
            metadata[f"tokenizer.ggml.{name}_token_id"] = tokens.index(text)
    return metadata | {f"tokenizer.{key}": value for key, value in keys.items()}


def wpm_metadata(**keys: object) -> dict[str, object]:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "▁hello", "▁world", "▁he", "llo", "s", "▁,", "▁한", "▁中"]
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL, UNKNOWN, CONTROL, CONTROL, CONTROL] + [NORMAL] * (len(tokens) - 5),
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.cls_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.mask_token_id": 4,
    } | {f"tokenizer.{key}": value for key, value in keys.items()}


def ugm_metadata(**keys: object) -> dict[str, object]:
    tokens = ["<pad>", "</s>", "<unk>", "▁", "▁hello", "▁he", "llo", "l", "o", "h", "e", "▁world", "w", "<s>"]
    return {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL, CONTROL, UNKNOWN] + [NORMAL] * (len(tokens) - 4) + [CONTROL],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -2.0, -3.0, -4.0, -4.5, -6.0, -6.0, -6.5, -6.5, -3.5, -7.0, 0.0],
        "tokenizer.ggml.add_space_prefix": True,
    } | {f"tokenizer.{key}": value for key, value in keys.items()}
