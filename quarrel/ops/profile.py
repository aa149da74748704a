"""Where a step's time goes: a step that can be timed gives the seconds of its parts, and each part has a phase.

    if isinstance(step, Profiles):
        profiled = step.profile(inputs, "tokens")      # a step like any other: use profiled.outputs
        profiled.by_phase()["scan"]                    # seconds in all layers
        profiled.by_layer("routing", "experts")        # {"blk.0.ffn": 0.0004, ...}
        profiled.by_layer("scan")                      # {"blk.1.attn": 0.0002, ...}

`profile` waits for the launches before it and for its own end; `from_last` counts it as a launch. On the CPU each stage of
a step notes when it began, some 30 ns each; reading the times costs the caller about 1 us a kernel. On CUDA the step runs
as plain launches with an event behind each instead of a captured graph, after a pause in which the host queues them all: it
takes several times as long as a replay, and the first of a shape may compile kernels, which its seconds then contain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args, runtime_checkable

from quarrel.ops.contract import Value
from quarrel.ops.program import Node
from quarrel.ops.step import StepInputs, StepOutputs, Want

Phase = Literal[
    "embedding", "attention", "ffn", "norm", "routing", "experts", "projection", "convolution", "scan", "head", "sampling"
]
"""`attention` holds the maps, the rotation and the cache of an attention layer, `projection` the maps of a recurrent one,
`experts` shared ones and the sum. A kernel that does the work of two phases counts as what its node is: `scan` holds the
convolution of a decode step on CUDA."""
PHASES: tuple[Phase, ...] = get_args(Phase)

_BY_OP: Mapping[str, Phase] = {
    "embedding": "embedding",
    "norm": "norm",
    "gated_norm": "norm",
    "route": "routing",
    "expert_up": "experts",
    "expert_down": "experts",
    "conv": "convolution",
    "scan1": "scan",
    "scan2": "scan",
    "scan1_gate": "scan",
    "mamba2_mix": "scan",
    "adjust": "sampling",
    "sample": "sampling",
    "logprobs": "sampling",
}
_BY_PLACE: Mapping[str, Phase] = {"token_embd": "embedding", "output": "head", "attn": "attention", "ffn": "ffn"}
_REST: Mapping[Phase, Phase] = {"experts": "experts", "scan": "projection"}
"""What else a layer with this phase does."""


@dataclass(frozen=True)
class Part:
    """What was timed: a node of the lowered program, or one of its kernels."""

    path: str
    op: str
    kernel: str
    """Empty where a backend times whole nodes."""
    phase: Phase


@dataclass(frozen=True)
class Profiled:
    """A step's outputs, and the seconds of each of its parts, in order."""

    outputs: StepOutputs
    parts: tuple[Part, ...]
    seconds: tuple[float, ...]

    def by_phase(self) -> dict[Phase, float]:
        """Seconds of each phase that the step has, in the order of PHASES."""
        spent: dict[Phase, float] = {}
        for part, seconds in zip(self.parts, self.seconds, strict=True):
            spent[part.phase] = spent.get(part.phase, 0.0) + seconds
        return {phase: spent[phase] for phase in PHASES if phase in spent}

    def by_layer(self, *phases: Phase) -> dict[str, float]:
        """Seconds of these phases together in each layer that has one of them, by its path."""
        spent: dict[str, float] = {}
        for part, seconds in zip(self.parts, self.seconds, strict=True):
            if part.phase in phases:
                spent[part.path] = spent.get(part.path, 0.0) + seconds
        return spent


@runtime_checkable
class Profiles(Protocol):
    """A step that can time its parts; ask with `isinstance`."""

    def profile(self, inputs: StepInputs, want: Want) -> Profiled:
        """Runs once, to its end, as calling the step does; raises what that raises."""


def phases(nodes: Sequence[Node]) -> list[Phase]:
    """The phase of each node, by its op, its layer, and what reads its result."""
    routed = {v.id for n in nodes if n.op.name == "route" for v in n.inputs if isinstance(v, Value)}
    known = [_BY_OP.get(node.op.name) for node in nodes]
    rest = {node.path: _REST[kind] for node, kind in zip(nodes, known, strict=True) if kind is not None and kind in _REST}

    def one(node: Node, kind: Phase | None) -> Phase:
        if kind is not None:
            return kind
        if any(v.id in routed for v in node.outputs):
            return "routing"
        return rest.get(node.path) or _BY_PLACE.get(node.path.rpartition(".")[2], "head")

    return [one(node, kind) for node, kind in zip(nodes, known, strict=True)]
