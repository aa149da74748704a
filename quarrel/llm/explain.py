"""What was chosen when a model was loaded, and why."""

from __future__ import annotations

from dataclasses import dataclass

from quarrel.llm.plan import Plan
from quarrel.ops.step import MemoryPlan, Taken


@dataclass(frozen=True)
class DraftFacts:
    """The model that guesses, and its memory as it was planned; it computes as the large one does."""

    model: str
    architecture: str
    plan: Plan


@dataclass(frozen=True)
class Explanation:
    """Who computes what, where, and with how much memory. `skipped` says why other backends were not taken."""

    model: str
    architecture: str
    backend: str
    device: str
    compute: str
    n_ctx: int
    max_seqs: int
    cache_tokens: int
    plan: Plan
    """Bytes by purpose, as they were planned."""
    memory: MemoryPlan
    """Those that were taken."""
    choices: tuple[Taken, ...]
    skipped: tuple[str, ...] = ()
    draft: DraftFacts | None = None
    parameters: int = 0
    """Numbers in the file's tensors."""
    quantization: str = ""
    """The block format that most of its bytes are in."""
