"""GGUF in, tokens out, in pure Python: near the speed of the memory bus on a CPU, at half of it on an H200.

import quarrel

with quarrel.load("demo") as llm:
    print(llm.generate("Once upon a time", max_tokens=50).text)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from quarrel.engine import Chunk, Result, SamplingParams, Service, Stream, Timings, Usage
    from quarrel.errors import QuarrelError
    from quarrel.llm import LLM, Explanation, Structure, load, load_tokenizer

__all__ = [
    "LLM",
    "Chunk",
    "Explanation",
    "QuarrelError",
    "Result",
    "SamplingParams",
    "Service",
    "Stream",
    "Structure",
    "Timings",
    "Usage",
    "__version__",
    "load",
    "load_tokenizer",
]

_HOMES = {
    **dict.fromkeys(("Chunk", "Result", "SamplingParams", "Service", "Stream", "Timings", "Usage"), "quarrel.engine"),
    **dict.fromkeys(("LLM", "Explanation", "Structure", "load", "load_tokenizer"), "quarrel.llm"),
    "QuarrelError": "quarrel.errors",
}


def __getattr__(name: str) -> object:
    # Imported on first use: `import quarrel` alone stays quick.
    if name not in _HOMES:
        raise AttributeError(f"module 'quarrel' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
