"""Loaded models: where files, tokenizers, assemblies, backends and the engine meet."""

from quarrel.llm.explain import Explanation
from quarrel.llm.loading import find, load, load_tokenizer
from quarrel.llm.model import LLM

__all__ = ["LLM", "Explanation", "find", "load", "load_tokenizer"]
