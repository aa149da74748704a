"""Loaded models: where files, tokenizers, assemblies, backends and the engine meet."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quarrel.llm.embeddings import Chunking, Embeddings
    from quarrel.llm.explain import Explanation, HostFacts
    from quarrel.llm.facts import FileFacts, file_facts
    from quarrel.llm.loading import load, load_with
    from quarrel.llm.model import LLM
    from quarrel.llm.open import check_context, find, load_tokenizer
    from quarrel.llm.options import LoadOptions
    from quarrel.llm.protocol import Model
    from quarrel.llm.requests import GenerateRequest
    from quarrel.llm.structured import Structure

__all__ = [
    "LLM",
    "Chunking",
    "Embeddings",
    "Explanation",
    "FileFacts",
    "GenerateRequest",
    "HostFacts",
    "LoadOptions",
    "Model",
    "Structure",
    "check_context",
    "file_facts",
    "find",
    "load",
    "load_tokenizer",
    "load_with",
]

_MODULES = {
    "embeddings": "Chunking Embeddings",
    "explain": "Explanation HostFacts",
    "facts": "FileFacts file_facts",
    "loading": "load load_with",
    "model": "LLM",
    "open": "check_context find load_tokenizer",
    "options": "LoadOptions",
    "protocol": "Model",
    "requests": "GenerateRequest",
    "structured": "Structure",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    # Imported on first use: the command line reads `options` to print its help, and needs no NumPy for that.
    if name not in _HOMES:
        raise AttributeError(f"module 'quarrel.llm' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"quarrel.llm.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
