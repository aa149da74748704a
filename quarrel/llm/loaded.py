"""The parts of a loaded model, which `load` puts together for an `LLM`."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quarrel.engine import Loop, SamplingParams
from quarrel.engine.images import SightRules
from quarrel.gguf import GGUFFile
from quarrel.llm.explain import Explanation
from quarrel.llm.options import LoadOptions
from quarrel.models import EncoderSpec, ModelSpec
from quarrel.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quarrel.llm.images import Eyes


@dataclass(frozen=True)
class Loaded:
    options: LoadOptions
    loop: Loop
    file: GGUFFile
    files: ExitStack
    """Closes it, and all others that are read from."""
    spec: ModelSpec | EncoderSpec
    tokenizer: Tokenizer
    explanation: Explanation
    load_seconds: float
    defaults: SamplingParams
    system: str | None = None
    adapters: tuple[str, ...] = ()
    eyes: Eyes | None = None
    sight: SightRules | None = None
