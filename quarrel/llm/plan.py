"""The second step of loading: the program, its memory and its devices are planned; nothing is allocated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from quarrel.engine.images import SightRules
from quarrel.errors import OutOfMemory, RequestError
from quarrel.llm.draft import DraftModel, plan_block, plan_draft
from quarrel.llm.expert_memory import check_expert_memory, pool_experts
from quarrel.llm.experts import USEFUL_CONTEXT, check_movable, place_experts
from quarrel.llm.layers import HostLayers, both, check_gpu_layers, divided, fewest, host_count, on_host
from quarrel.llm.memory import DEFAULT_CONTEXT, Device, Plan, plan_encoder, plan_limits
from quarrel.llm.open import Opened
from quarrel.llm.options import MTP
from quarrel.llm.parallel import Parallel, weight_bytes
from quarrel.models import EncoderSpec, ModelSpec, assemble, read_spec
from quarrel.ops.host import ComputesParts, HostExperts, computing_parts
from quarrel.ops.program import Program
from quarrel.ops.registry import backend as backend_named
from quarrel.ops.step import Backend, CopiesWeights
from quarrel.ops.windows import by_window_if_smaller, with_window_groups


@dataclass(frozen=True)
class Planned:
    """What will be compiled, and where."""

    spec: ModelSpec | EncoderSpec
    program: Program
    memory: Plan
    kept_blocks: int | None
    """Cache blocks that may stay where no sequence uses them; None is as many as there is room for."""
    host_experts: HostExperts | None
    draft: DraftModel | None
    team: Parallel | None
    """The devices, where several share the model."""
    host_layers: HostLayers | None = None
    sight: SightRules | None = None
    """How it takes images."""


def plan_model(opened: Opened) -> Planned:
    """Fits context and caches into the memory that is free. Raises OutOfMemory with what would fit."""
    options, backend = opened.options, opened.backend
    check_expert_memory(options)
    check_gpu_layers(options, opened.devices, opened.environment.check)
    team = _team(opened)
    free = backend.free_bytes() if team is None else team.free_bytes()
    device = Device.of(free, options.memory, backend.step_tokens, captures=backend.name == "triton")
    draft: DraftModel | None = None
    host_experts: HostExperts | None = None
    host_layers: HostLayers | None = None
    program: Program | None = None
    if isinstance(opened.spec, EncoderSpec):
        for name in ("experts_on_cpu", "expert_memory"):
            if value := getattr(options, name):
                check_movable(f"{name} is {value}", name, layers=0, movable=True)
        if isinstance(options.gpu_layers, int) and options.gpu_layers < opened.spec.n_layers:
            raise RequestError("an encoder runs whole on one device: leave gpu_layers out", "gpu_layers")
        weights = opened.weight_bytes + _copies(opened, assemble(opened.spec, opened.tensors))
        n_ctx, max_seqs = options.n_ctx, options.max_seqs
        memory = plan_encoder(opened.spec, device=device, weights=weights, n_ctx=n_ctx, max_seqs=max_seqs)
    else:
        program = assemble(opened.spec, opened.tensors)
        if opened.eyes is not None:
            n_ctx = options.n_ctx or min(opened.spec.context_length, DEFAULT_CONTEXT)
            taken = opened.eyes.nbytes(n_ctx, keeps_rows=backend.name == "triton")
            device = replace(device, free=device.free - taken, budget=device.budget - taken)
        if options.draft is not None:
            draft = (plan_block if options.draft == MTP else plan_draft)(opened, program, device)
            device = replace(device, free=device.free - draft.plan.total, budget=device.budget - draft.plan.total)
        memory, host_experts, host_layers = _decoder(opened, opened.spec, program, device, team)
    # Some rope scalings depend on the context that will be used.
    spec = read_spec(opened.file, memory.n_ctx, options.scaling, options.n_ctx)
    sight: SightRules | None = None
    if opened.eyes is not None:
        spec = seen = opened.eyes.seeing(spec, opened.file.metadata)
        sight = opened.eyes.rules(seen)
        most = memory.limits.max_tokens
        if sight.both_ways and opened.eyes.fixed_tokens > most:
            message = f"an image has {opened.eyes.fixed_tokens} tokens, and a step {most}: give it more memory"
            raise RequestError(message, "mmproj")
    predicts = draft is not None and options.draft == MTP
    if program is None or predicts or spec != opened.spec:
        program = assemble(spec, opened.tensors, stream=predicts)
    if opened.adapters is not None:
        program = opened.adapters.applied(program)
    groups = memory.limits.window_groups
    host_layers = host_layers and host_layers.of(program, groups)
    program = with_window_groups(program, groups)
    memory, host_layers = _finished(opened, host_layers.stages[1] if host_layers else program, memory, host_layers)
    kept, cache = options.prefix_cache_bytes, memory.cache + (host_layers.plan.cache if host_layers else 0)
    kept_blocks = None if kept is None else kept * memory.limits.n_blocks // max(1, cache)
    return Planned(spec, program, memory, kept_blocks, host_experts, draft, team, host_layers, sight)


def _team(opened: Opened) -> Parallel | None:
    """The devices of a shared model; their processes import what they need while this one plans."""
    if opened.devices == 1:
        return None
    options = opened.options
    stages, paths = options.pipeline_parallel or 1, opened.found.paths
    team = Parallel(paths, opened.backend, options.compute, opened.devices, options.threads, stages, options.hosts)
    opened.files.callback(team.close)
    return team


def _decoder(
    opened: Opened, spec: ModelSpec, whole: Program, device: Device, team: Parallel | None
) -> tuple[Plan, HostExperts | None, HostLayers | None]:
    options, backend = opened.options, opened.backend
    context = options.n_ctx or min(spec.context_length, DEFAULT_CONTEXT)
    program, weights = by_window_if_smaller(whole, context), opened.weight_bytes
    groups, layers = program.window_groups, len(spec.layers)

    def on_device(stage: Program) -> tuple[Plan, HostExperts | None]:
        return _on_device(opened, spec, stage, weights * weight_bytes(stage) // weight_bytes(whole), context, device, False)

    def least() -> int:
        useful = min(context, USEFUL_CONTEXT)
        return fewest(whole, lambda stage: on_device(_like(with_window_groups(stage, groups), program)), useful)

    if team is not None:
        program, weights = team.largest_share(spec, opened.tensors, program.window_groups)
    requested, count, apart = options.gpu_layers, 0, _has_own_memory(opened)
    if requested == "auto" and apart:
        count = least()
    elif isinstance(requested, int):
        count = host_count(whole, layers, requested)
    if not count:
        try:
            return (*_on_device(opened, spec, program, weights, context, device, team is not None), None)
        except OutOfMemory as error:
            if requested is not None or not apart or "experts_on_cpu" in error.fields:
                raise
            fit = f"{layers - least()} of its {layers} layers"
            hint = f"or leave layers to the CPU with gpu_layers='auto', which has {fit} on the GPU"
            raise OutOfMemory(f"{error}; {hint}", *error.fields, "gpu_layers") from None
    first, rest = (_like(stage, program) for stage in divided(whole, count, groups))
    plan, host_experts = on_device(rest)
    alike = isinstance(backend, ComputesParts)
    host = backend if alike else backend_named("cpu", options.threads)
    free = Device.of(host.free_bytes() - plan.total * alike, None, plan.limits.max_tokens)
    taken = on_host(lambda: _planned(opened, spec, first, free, host, weights * weight_bytes(first) // weight_bytes(whole)))
    plan, taken = both(plan, taken)
    return plan, host_experts, HostLayers(count, host, taken, (first, rest))


def _has_own_memory(opened: Opened) -> bool:
    """Whether the device is one whose memory is not the host's, and layers may leave it."""
    return opened.backend.name == "triton" and opened.devices == 1 and not opened.environment.check


def _like(stage: Program, whole: Program) -> Program:
    """A stage that counts its blocks as the whole model does."""
    return replace(stage, window=whole.window, window_groups=whole.window_groups)


def _planned(opened: Opened, spec: ModelSpec, program: Program, device: Device, backend: Backend, weights: int) -> Plan:
    options = opened.options
    return plan_limits(
        program,
        spec,
        compute=backend.compute_of(options.compute),
        device=device,
        weights=weights,
        n_ctx=options.n_ctx,
        max_seqs=options.max_seqs,
        kv_cache=options.kv_cache,
        rollback=options.draft is not None,
    )


def _on_device(
    opened: Opened, spec: ModelSpec, program: Program, weights: int, context: int, device: Device, shared: bool
) -> tuple[Plan, HostExperts | None]:
    options, backend = opened.options, opened.backend
    copies = _copies(opened, program)

    def make_plan(size: int) -> Plan:
        # Of what leaves the device there are no copies on it.
        return _planned(opened, spec, program, device, backend, size + copies * size // weights)

    alone = None if shared or opened.environment.check else backend
    host = partial(_host, options.threads)
    if options.expert_memory is not None:
        return pool_experts(
            program,
            make_plan,
            options.expert_memory,
            weights=weights,
            backend=alone,
            compute=backend.compute_of(options.compute),
            host=host,
        )
    return place_experts(
        program,
        make_plan,
        weights=weights,
        context=context,
        backend=alone,
        requested=options.experts_on_cpu,
        host=host,
    )


def _copies(opened: Opened, program: Program) -> int:
    """Bytes that the backend keeps of these weights beside them."""
    backend = opened.backend
    return backend.copies_bytes(program, opened.options.compute) if isinstance(backend, CopiesWeights) else 0


def _host(threads: int | None) -> ComputesParts:
    return computing_parts(backend_named("cpu", threads))


def _finished(
    opened: Opened, program: Program, memory: Plan, host_layers: HostLayers | None
) -> tuple[Plan, HostLayers | None]:
    """The plan with snapshots of recurrent states, limits that say how the step computes, and decoded weights."""
    options = opened.options
    if options.prefix_cache and host_layers is not None:
        memory, host_layers = host_layers.with_snapshots(memory, options.prefix_cache_bytes)
    elif options.prefix_cache:
        memory = memory.with_snapshots(program, options.prefix_cache_bytes)
    limits = replace(
        memory.limits,
        deterministic=options.deterministic,
        attention=options.attention,
        n_adapters=len(options.adapters or {}),
    )
    memory = replace(memory, limits=limits)
    sixteen = opened.backend.compute_of(options.compute) != "float32"
    if opened.backend.name == "triton" and sixteen and options.decoded_weights == "auto" and not options.deterministic:
        memory = memory.with_decoded(program)
    return memory, host_layers
