"""What must agree among the tokenizer keys of a header, whatever the tokenizer makes of them later."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from quarrel.errors import GGUFError
from quarrel.gguf.metadata import Metadata

TOKENS = "tokenizer.ggml.tokens"
# Converters write -1 as an unsigned number for a token that does not exist.
NO_TOKEN = (-1, (1 << 32) - 1)
# Every merge makes a token, and real vocabularies reach a token by at most two or three merges.
MAX_MERGES_PER_TOKEN = 64


class _HasDims(Protocol):
    @property
    def dims(self) -> tuple[int, ...]: ...


def check_vocab(metadata: Metadata, tensors: Mapping[str, _HasDims] = MappingProxyType({})) -> None:
    """Raises GGUFError where the arrays of a vocabulary disagree in length, a special id lies outside it, or the token
    embedding has fewer rows than there are tokens (more are padding, and legal). Decodes nothing but single ids."""
    n_tokens = metadata.length(TOKENS)
    if n_tokens is None:
        if TOKENS in metadata:
            raise GGUFError(f"{TOKENS} is no array of strings")
        return
    if n_tokens == 0:
        raise GGUFError(f"{TOKENS} is empty: a vocabulary has at least one token")
    for name in ("scores", "token_type"):
        key = f"tokenizer.ggml.{name}"
        if key in metadata and metadata.length(key) != n_tokens:
            raise GGUFError(
                f"{key} has {metadata.length(key) or 'no'} elements, wanted one for each of the {n_tokens} tokens"
            )
    merges = metadata.length("tokenizer.ggml.merges") or 0
    if merges > n_tokens * MAX_MERGES_PER_TOKEN:
        raise GGUFError(f"tokenizer.ggml.merges has {merges} elements, too many for {n_tokens} tokens")
    for key in metadata:
        if key.startswith("tokenizer.ggml.") and key.endswith("_token_id"):
            _check_id(metadata, key, n_tokens)
    embedding = tensors.get("token_embd.weight")
    if embedding is not None and (rows := embedding.dims[1] if len(embedding.dims) > 1 else 1) < n_tokens:
        raise GGUFError(f"token_embd.weight has {rows} rows, fewer than the {n_tokens} tokens of the vocabulary")


def _check_id(metadata: Metadata, key: str, n_tokens: int) -> None:
    token = metadata[key]
    if not isinstance(token, int) or isinstance(token, bool):
        raise GGUFError(f"{key} is no integer")
    if not 0 <= token < n_tokens and token not in NO_TOKEN:
        raise GGUFError(f"{key} is {token}, wanted 0 to {n_tokens - 1}")
