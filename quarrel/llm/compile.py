"""The third step of loading: kernels and weights become a step, which an engine runs on its thread from now on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from quarrel.engine import CacheRules, Loop
from quarrel.engine.draft import Drafter
from quarrel.engine.images import EncodesImages
from quarrel.engine.mtp import BlockDrafter
from quarrel.llm.experts import experts_on_host
from quarrel.llm.open import Opened
from quarrel.llm.options import MTP
from quarrel.llm.plan import Planned
from quarrel.models import ModelSpec, Tensors
from quarrel.ops.check import CheckedStep
from quarrel.ops.profile import Profiles, phases
from quarrel.ops.program import Program
from quarrel.ops.step import Step

log = logging.getLogger("quarrel")

CPU_STEPS = 16
"""Of so many steps on a CPU one is timed by default. Timing one costs about 1 us a kernel, 66 us with the 69 kernels of a
hybrid of three layers, which is too much for every step."""


@dataclass(frozen=True)
class Compiled:
    """A step and the loop that runs it."""

    loop: Loop
    step: Step


def compile_model(opened: Opened, planned: Planned) -> Compiled:
    """Everything on the loop's thread, again after the device was lost."""
    options, outputs = opened.options, planned.program.outputs
    width = int(outputs["logits" if "logits" in outputs else "hidden"].dims[-1])
    loop = Loop()
    try:
        step = loop.serve(
            lambda: _step(opened, planned),
            width,
            cache_rules(planned.program, options.prefix_cache, planned.kept_blocks, rollback=planned.draft is not None),
            max_waiting=options.max_waiting,
            make_drafter=None if planned.draft is None else lambda: _drafter(opened, planned),
            profile_steps=profile_steps(opened, planned.program),
            beside=options.beside_tokens,
            sight=planned.sight,
            make_encoder=_encoder(opened, planned),
        )
    except BaseException:
        loop.close(timeout=0.0)
        raise
    if options.profile_steps and not isinstance(step, Profiles):
        log.warning("profile_steps=%d: steps of %s cannot be timed", options.profile_steps, type(step).__name__)
    return Compiled(loop, step)


def cache_rules(program: Program, reuse: bool, kept_blocks: int | None = None, *, rollback: bool = False) -> CacheRules:
    """What the engine's cache has to know of a model. kept_blocks: how many may stay that no sequence uses. rollback:
    recurrent states, if there are any, have second slots.

    A window counts where every layer has one, or where the layers that have one have blocks of their own.
    """
    windows = [layer.window for layer in program.caches]
    window = program.window or (max(windows) if windows and all(windows) else 0)
    recurrent = bool(program.states)
    return CacheRules(reuse, recurrent, window, kept_blocks, program.window_groups, rollback and recurrent)


def profile_steps(opened: Opened, program: Program) -> int:
    """One step in how many is timed by its parts; 0 is none, as for models without those of which there are metrics."""
    if not {"routing", "scan"} & set(phases(program.nodes)):
        return 0
    wanted = opened.options.profile_steps
    # On a GPU a timed step is no captured graph, and takes several times as long.
    return (CPU_STEPS if opened.backend.name == "cpu" else 0) if wanted is None else wanted


def _step(opened: Opened, planned: Planned) -> Step:
    options, limits, backend = opened.options, planned.memory.limits, opened.backend
    if planned.team is not None:
        assert isinstance(planned.spec, ModelSpec)
        return planned.team.compile(planned.spec, opened.file, limits, planned.memory.n_ctx, options.progress)
    if opened.environment.check:
        return CheckedStep(backend, planned.program, opened.weights, limits, options.compute)
    with experts_on_host(backend, planned.host_experts):
        if (layers := planned.host_layers) is not None:
            from quarrel.parallel.host_layers import compile_stages

            return compile_stages(
                layers.stages, layers.backend, backend, opened.weights, limits, options.compute, options.progress
            )
        return backend.compile(planned.program, opened.weights, limits, options.compute, options.progress)


def _encoder(opened: Opened, planned: Planned) -> Callable[[], EncodesImages] | None:
    eyes = opened.eyes
    if eyes is None:
        return None
    return lambda: eyes.encoder(opened.backend, opened.options.compute, planned.memory.n_ctx)


def _drafter(opened: Opened, planned: Planned) -> Drafter:
    draft, options = planned.draft, opened.options
    assert draft is not None
    if options.draft == MTP:
        step = opened.backend.compile(draft.program, opened.tensors, draft.plan.limits, options.compute)
        return BlockDrafter(step, cache_rules(draft.program, reuse=False), planned.spec.n_vocab)
    step = opened.backend.compile(draft.program, Tensors(draft.file), draft.plan.limits, options.compute)
    return Drafter(step, cache_rules(draft.program, options.prefix_cache), planned.spec.n_vocab, draft.spec.n_vocab)
