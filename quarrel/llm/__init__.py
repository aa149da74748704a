"""Loaded models: where files, tokenizers, assemblies, backends and the engine meet."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quarrel.llm.embeddings import Chunking, Embeddings
    from quarrel.llm.explain import Explanation
    from quarrel.llm.loading import check_context, find, load, load_tokenizer
    from quarrel.llm.model import LLM
    from quarrel.llm.structured import Structure

__all__ = ["LLM", "Chunking", "Embeddings", "Explanation", "Structure", "check_context", "find", "load", "load_tokenizer"]

_HOMES = {
    "LLM": "model",
    "Structure": "structured",
    "Explanation": "explain",
    **dict.fromkeys(("Chunking", "Embeddings"), "embeddings"),
    **dict.fromkeys(("check_context", "find", "load", "load_tokenizer"), "loading"),
}


def __getattr__(name: str) -> object:
    # Imported when first asked for: the plan alone needs no tokenizer.
    if name not in _HOMES:
        raise AttributeError(f"module 'quarrel.llm' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"quarrel.llm.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
