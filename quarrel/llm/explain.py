"""What was chosen when a model was loaded, and why."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quarrel.llm.memory import Plan, cache_tokens
from quarrel.models import ModelSpec
from quarrel.ops.step import ExplainLine, MemoryPlan, Step
from quarrel.ops.traffic import Traffic

if TYPE_CHECKING:
    from quarrel.gguf import GGUFFile
    from quarrel.llm.compile import Compiled
    from quarrel.llm.open import Opened
    from quarrel.llm.plan import Planned


@dataclass(frozen=True)
class DraftFacts:
    """The draft model, and its memory as planned; it computes as the large one does."""

    model: str
    architecture: str
    plan: Plan


@dataclass(frozen=True)
class HostFacts:
    """The first layers of a model, which the host computes, and its memory for them."""

    layers: int
    of: int
    """Of so many."""
    device: str
    plan: Plan
    memory: MemoryPlan
    read: int
    """Bytes of the host's memory that a token of one sequence reads, without its keys: what bounds the speed."""


@dataclass(frozen=True)
class Explanation:
    """Who computes what, where, and with how much memory. `skipped` says why other backends could not be used."""

    model: str
    architecture: str
    backend: str
    device: str
    compute: str
    n_ctx: int
    max_seqs: int
    cache_tokens: int
    plan: Plan
    """Bytes by purpose, as planned."""
    memory: MemoryPlan
    """Bytes by purpose, as allocated."""
    choices: tuple[ExplainLine, ...]
    skipped: tuple[str, ...] = ()
    draft: DraftFacts | None = None
    parameters: int = 0
    """Numbers in the file's tensors."""
    quantization: str = ""
    """The block format of most of its bytes."""
    projector: str = ""
    """The kind of tower by which it sees images, if it does."""
    host_layers: HostFacts | None = None

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Of the device, and of the host where it computes layers."""
        return (self.plan,) if self.host_layers is None else (self.plan, self.host_layers.plan)

    @property
    def parts(self) -> tuple[tuple[str, str, MemoryPlan], ...]:
        """Backend, device and what is allocated there."""
        own = (self.backend, self.device, self.memory)
        return (own,) if self.host_layers is None else (own, ("cpu", self.host_layers.device, self.host_layers.memory))

    @classmethod
    def of(cls, opened: Opened, planned: Planned, compiled: Compiled) -> Explanation:
        device, step, draft = opened.backend.device(), compiled.step, planned.draft
        fp8 = opened.options.compute == "fp8"
        return cls(
            model=opened.name,
            architecture=planned.spec.architecture,
            backend=opened.backend.name,
            device=device if opened.devices == 1 else f"{opened.devices} x {device}",
            compute=f"{step.compute}, products of many rows in E4M3" if fp8 else step.compute,
            n_ctx=planned.memory.n_ctx,
            max_seqs=planned.memory.limits.max_seqs,
            cache_tokens=cache_tokens(planned.program, planned.memory.limits),
            plan=planned.memory,
            memory=step.memory(),
            choices=tuple(step.explain()),
            skipped=opened.skipped,
            draft=None if draft is None else DraftFacts(draft.name, draft.spec.architecture, draft.plan),
            parameters=sum(math.prod(t.dims) for t in opened.file.tensors.values()),
            quantization=quantization_of(opened.file),
            projector="" if opened.eyes is None else opened.eyes.tower.projector,
            host_layers=_host_facts(planned, step),
        )


def _host_facts(planned: Planned, step: Step) -> HostFacts | None:
    layers = planned.host_layers
    if layers is None:
        return None
    from quarrel.parallel.host_layers import HostLayersStep

    assert isinstance(step, HostLayersStep)
    assert isinstance(planned.spec, ModelSpec)
    read = int(Traffic.of(layers.stages[0], step.first.compute).step(1, 0))
    of = len(planned.spec.layers)
    return HostFacts(layers.count, of, layers.backend.device(), layers.plan, step.first.memory(), read)


def quantization_of(file: GGUFFile) -> str:
    """The block format of most of its bytes."""
    sizes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        sizes[tensor.type.name] += tensor.nbytes
    return max(sizes, key=lambda name: sizes[name], default="")
