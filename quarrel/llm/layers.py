"""Which layers the host computes beside a device: none, the first so many, or as few as make the rest fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from quarrel.errors import OutOfMemory, RequestError
from quarrel.llm.experts import fits
from quarrel.llm.memory import Plan, state_bytes
from quarrel.llm.options import LoadOptions
from quarrel.models.stages import borders, two_stages
from quarrel.ops.host import HostExperts
from quarrel.ops.program import Program
from quarrel.ops.step import Backend
from quarrel.ops.windows import with_window_groups

OnDevice = Callable[[Program], tuple[Plan, HostExperts | None]]
"""The plan of a stage on the device; raises OutOfMemory."""


@dataclass(frozen=True)
class HostLayers:
    """The first layers of a model, which the host computes."""

    count: int
    backend: Backend
    plan: Plan
    """Of the host's memory."""
    stages: tuple[Program, Program]
    """What the host computes, and the device."""

    def of(self, program: Program, groups: int) -> HostLayers:
        """The same of the program that will be compiled, whose layers with a window have so many groups."""
        return replace(self, stages=divided(program, self.count, groups))

    def with_snapshots(self, plan: Plan, most: int | None) -> tuple[Plan, HostLayers]:
        """Both plans with slots for as many copies of recurrent states as fit both."""
        plans, sizes = [self.plan, plan], [state_bytes(stage) for stage in self.stages]
        shares = [None if most is None else most * size // max(1, sum(sizes)) for size in sizes]
        made = [p.with_snapshots(stage, share) for p, stage, share in zip(plans, self.stages, shares, strict=True)]
        slots = min((m.limits.n_states for m, size in zip(made, sizes, strict=True) if size), default=plan.limits.n_states)
        limits = replace(plan.limits, n_states=slots)
        copies = slots - plan.limits.states if any(sizes) else 0
        host, device = (replace(p, limits=limits, snapshots=copies * size) for p, size in zip(plans, sizes, strict=True))
        return device, replace(self, plan=host)


def check_gpu_layers(options: LoadOptions, devices: int, checked: bool) -> None:
    """Raises RequestError where other options rule it out."""
    if options.gpu_layers in (None, "auto"):  # with several devices, or checked, all that fits is all there is
        return
    if devices > 1:
        option = "pipeline_parallel" if (options.pipeline_parallel or 1) > 1 else "tensor_parallel"
        message = f"gpu_layers is {options.gpu_layers}, and the host has layers beside one device only: leave {option} out"
        raise RequestError(message, "gpu_layers", option)
    if checked:
        raise RequestError("QUARREL_CHECK looks at one device: unset it, or leave gpu_layers out", "gpu_layers")


def divided(program: Program, count: int, groups: int) -> tuple[Program, Program]:
    """The host's stage and the device's. groups: of the layers with a window, which both share the tables of."""
    first, rest = (with_window_groups(stage, groups) for stage in two_stages(program, count))
    return first, rest


def host_count(program: Program, layers: int, requested: int) -> int:
    """How many layers the host takes where the device has `requested` of them. Raises RequestError for a border that
    would part layers from keys that they read."""
    count = max(0, layers - requested)
    allowed = [0, *borders(program)]
    if count in allowed:
        return count
    fewer, more = min(c for c in allowed if c > count), max(c for c in allowed if c < count)
    raise RequestError(
        f"gpu_layers is {requested}, and the {layers - more} last layers of this model share keys, so that they lie"
        f" together: wanted {layers - more} or more, or {layers - fewer}",
        "gpu_layers",
    )


def fewest(program: Program, on_device: OnDevice, useful: int) -> int:
    """As few layers for the host as leave the rest room for a context of `useful` tokens; all of them if none do."""
    allowed = [0, *borders(program)]
    low, high = 0, len(allowed) - 1
    while low < high:
        middle = (low + high) // 2
        rest = program if middle == 0 else two_stages(program, allowed[middle])[1]
        low, high = (low, middle) if fits(lambda rest=rest: on_device(rest)[0], useful) else (middle + 1, high)  # type: ignore[misc]
    return allowed[low]


def both(device: Plan, host: Plan) -> tuple[Plan, Plan]:
    """The plans with the context, the blocks and the step that both have room for."""
    n_ctx, a, b = min(device.n_ctx, host.n_ctx), device.limits, host.limits
    limits = replace(
        a,
        max_tokens=min(a.max_tokens, b.max_tokens),
        max_blocks_per_seq=min(a.max_blocks_per_seq, b.max_blocks_per_seq),
        n_blocks=min(a.n_blocks, b.n_blocks),
    )
    longest = min(device.longest, host.longest)

    def within(plan: Plan) -> Plan:
        cache = plan.cache * limits.n_blocks // plan.limits.n_blocks
        return replace(plan, n_ctx=n_ctx, longest=longest, limits=limits, cache=cache)

    return within(device), within(host)


def on_host(make: Callable[[], Plan]) -> Plan:
    """The plan of the host's memory. Raises OutOfMemory, which says so."""
    try:
        return make()
    except OutOfMemory as error:
        raise OutOfMemory(f"the layers that gpu_layers leaves to the host: {error}", *error.fields, "gpu_layers") from None
