"""Which layers' experts stay in host memory: none where the device has room, else as few as make the rest fit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate

from quarrel.errors import OutOfMemory, RequestError
from quarrel.llm.memory import Plan, gib
from quarrel.ops.host import ComputesParts, HostExperts, HostsExperts, expert_refs
from quarrel.ops.program import Program
from quarrel.ops.step import Backend
from quarrel.ops.weights import file_bytes

USEFUL_CONTEXT = 2048
"""Tokens: for a context shorter than this, or than the requested one, experts leave the device."""

MakePlan = Callable[[int], Plan]
"""A plan for so many bytes of weights on the device; raises OutOfMemory."""


def fits(make: Callable[[], Plan], useful: int) -> bool:
    """Whether there is a plan, with a context of so many tokens."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return make().n_ctx >= useful
        except OutOfMemory:
            return False


@dataclass(frozen=True)
class _Layers:
    """The layers with experts, of which the first few leave the device."""

    make_plan: MakePlan
    weights: int
    """Bytes of the whole model."""
    context: int
    sizes: Sequence[int]
    """Bytes of the experts of the first 0, 1, ... layers."""

    def plan(self, count: int) -> Plan:
        return self.make_plan(self.weights - self.sizes[count])

    def fits(self, count: int) -> bool:
        """Whether a useful context fits beside what is left."""
        return fits(lambda: self.plan(count), min(self.context, USEFUL_CONTEXT))

    def fewest(self, low: int) -> int | None:
        """The fewest layers, at least `low`, without whose experts the rest fits."""
        high = len(self.sizes) - 1
        if not self.fits(high):
            return None
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.fits(middle) else (middle + 1, high)
        return low


def place_experts(
    program: Program,
    make_plan: MakePlan,
    *,
    weights: int,
    context: int,
    backend: Backend | None,
    requested: int | None,
    host: Callable[[], ComputesParts],
) -> tuple[Plan, HostExperts | None]:
    """The plan, and whose experts the host computes: of the first `requested` layers; None is as few as needed.

    weights: bytes of all of them. context: tokens that are hoped for. backend: None where experts cannot leave the device.
    Raises RequestError for more layers than there are, OutOfMemory with what would fit.
    """
    sizes = {path: sum(map(file_bytes, refs)) for path, refs in expert_refs(program).items()}
    movable = isinstance(backend, HostsExperts)
    if requested:
        fault = f"experts_on_cpu is {requested}"
        check_movable(fault, "experts_on_cpu", len(sizes), movable)
        if requested > len(sizes):
            raise RequestError(f"{fault}, wanted 0 to {len(sizes)}, the layers with experts", "experts_on_cpu")
    layers = _Layers(make_plan, weights, context, [0, *accumulate(sizes.values())])
    count = requested or 0
    if requested is None and sizes and movable and not layers.fits(0):
        count = layers.fewest(0) or 0
    try:
        plan = layers.plan(count)
    except OutOfMemory as error:
        more = layers.fewest(count) if movable else None
        if more is None:
            raise
        raise OutOfMemory(
            f"{error}; with the experts of {more} layers in host memory ({gib(layers.sizes[more])}) the rest would fit:"
            f" use experts_on_cpu={more}",
            *error.fields,
            "experts_on_cpu",
        ) from None
    return (plan, None) if count == 0 else with_host(plan, dict(list(sizes.items())[:count]), host())


def with_host(plan: Plan, sizes: dict[str, int], host: ComputesParts) -> tuple[Plan, HostExperts]:
    """The plan with the experts of these layers, bytes by path, in host memory."""
    total, largest = sum(sizes.values()), max(sizes.values())
    if total > host.free_bytes():
        raise OutOfMemory(
            f"the experts of {len(sizes)} layers need {gib(total)} of host memory, and {gib(host.free_bytes())} are"
            " free there: use a smaller model, or leave fewer layers to the host"
        )
    streams = plan.spare >= largest
    plan = replace(plan, host=total, host_layers=len(sizes), scratch=plan.scratch + largest * streams)
    return plan, HostExperts(host, frozenset(sizes), streams)


@contextmanager
def experts_on_host(backend: Backend, experts: HostExperts | None) -> Iterator[None]:
    """Programs that the backend compiles in the block leave these experts to the host."""
    if experts is None or not isinstance(backend, HostsExperts):
        yield
        return
    backend.leave_to_host(experts)
    try:
        yield
    finally:
        backend.leave_to_host(None)


def check_movable(fault: str, option: str, layers: int, movable: bool) -> None:
    """Raises RequestError where a model has no layers with experts, or nobody takes them."""
    if not layers:
        raise RequestError(f"{fault}, and this model has no experts: leave it out", option)
    if not movable:
        raise RequestError(
            f"{fault}, and experts can leave the memory of one GPU only: use the triton backend for it,"
            " without tensor_parallel and QUARREL_CHECK",
            option,
            "tensor_parallel",
        )
