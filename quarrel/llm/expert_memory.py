"""How many experts the device holds where `expert_memory` says what they may take: pools of slots for those used most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from quarrel.errors import OutOfMemory, RequestError
from quarrel.llm.experts import MakePlan, check_movable, with_host
from quarrel.llm.memory import Plan, gib
from quarrel.llm.options import LoadOptions
from quarrel.ops.contract import Compute, WeightRef
from quarrel.ops.host import ComputesParts, ExpertPool, HostExperts, HostsExperts, expert_refs
from quarrel.ops.moe import EXPERT_UP
from quarrel.ops.program import Program
from quarrel.ops.step import Backend
from quarrel.ops.weights import file_bytes


def check_expert_memory(options: LoadOptions) -> None:
    """Raises RequestError where other options rule it out."""
    if options.expert_memory is None:
        return
    if options.experts_on_cpu is not None:
        message = "expert_memory and experts_on_cpu both say which experts are on the device: give one of them"
        raise RequestError(message, "expert_memory", "experts_on_cpu")
    if options.deterministic:
        raise RequestError(
            "expert_memory with deterministic: an expert's bits depend on where it is, and it moves; leave out one of them",
            "expert_memory",
            "deterministic",
        )


@dataclass(frozen=True)
class _Kind:
    """Layers whose experts are alike."""

    paths: tuple[str, ...]
    n_experts: int
    expert_bytes: int
    """Of one, on the device."""

    @property
    def bytes(self) -> int:
        return len(self.paths) * self.n_experts * self.expert_bytes

    def pool(self, memory: int, whole: int) -> ExpertPool:
        """The slots in this kind's share of the memory for all experts, `whole` bytes; one is of zeros."""
        return ExpertPool(self.paths, memory * self.bytes // whole // self.expert_bytes - 1)

    def least(self, whole: int) -> int:
        """Memory for all experts that leaves a slot for each layer of this kind."""
        return -(-(len(self.paths) + 1) * self.expert_bytes * whole // self.bytes)


def pool_experts(
    program: Program,
    make_plan: MakePlan,
    memory: int,
    *,
    weights: int,
    backend: Backend | None,
    compute: Compute,
    host: Callable[[], ComputesParts],
) -> tuple[Plan, HostExperts | None]:
    """The plan, and the pools of experts that take `memory` bytes of the device; no pool where all experts do.

    weights: bytes of the whole file. backend: None where experts cannot leave the device. Raises RequestError for a memory
    without room for an expert of each layer, OutOfMemory where the rest does not fit beside it.
    """
    layers = expert_refs(program)
    check_movable(f"expert_memory is {gib(memory)}", "expert_memory", len(layers), isinstance(backend, HostsExperts))
    assert isinstance(backend, HostsExperts)
    every = backend.device_bytes([ref for refs in layers.values() for ref in refs], compute)
    if memory >= every:
        return make_plan(weights), None
    pools, taken = expert_pools(program, backend, compute, memory)
    sizes = {path: sum(map(file_bytes, refs)) for path, refs in layers.items()}
    try:
        plan = make_plan(weights - sum(sizes.values()) + taken)
    except OutOfMemory as error:
        raise OutOfMemory(f"{error}; or give less expert_memory", *error.fields, "expert_memory") from None
    plan, experts = with_host(plan, sizes, host())
    return replace(plan, resident=taken), replace(experts, pools=pools)


def expert_pools(
    program: Program, backend: HostsExperts, compute: Compute, memory: int
) -> tuple[tuple[ExpertPool, ...], int]:
    """Pools of all experts that take at most `memory` bytes, less than all need, and the bytes that they take."""
    kinds = _kinds(program, backend, compute)
    whole = sum(kind.bytes for kind in kinds)
    least = max(kind.least(whole) for kind in kinds)
    if memory < least:
        layers = sum(len(kind.paths) for kind in kinds)
        raise RequestError(
            f"expert_memory is {gib(memory)}, wanted at least {gib(least)} ({least} bytes), an expert of each layer and one"
            f" of zeros: give more, or leave whole layers to the host with experts_on_cpu={layers}",
            "expert_memory",
            "experts_on_cpu",
        )
    pools = tuple(kind.pool(memory, whole) for kind in kinds)
    return pools, sum((pool.slots + 1) * kind.expert_bytes for pool, kind in zip(pools, kinds, strict=True))


def _kinds(program: Program, backend: HostsExperts, compute: Compute) -> list[_Kind]:
    counts = {node.path: node.spec.n_experts for node in program.nodes if node.op is EXPERT_UP}
    alike: dict[tuple[object, ...], list[str]] = {}
    one: dict[tuple[object, ...], Sequence[WeightRef]] = {}
    for path, refs in expert_refs(program).items():
        key = (counts[path], *((ref.type, ref.rows, ref.k) for ref in refs))
        alike.setdefault(key, []).append(path)
        one[key] = [replace(ref, rows=ref.rows // counts[path]) for ref in refs]
    return [_Kind(tuple(p), counts[p[0]], backend.device_bytes(one[key], compute)) for key, p in alike.items()]
