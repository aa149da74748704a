"""The third step of loading: kernels and weights become a step, which an engine runs on its thread from now on."""

from __future__ import annotations

from dataclasses import dataclass

from quarrel.engine import CacheRules, Loop
from quarrel.engine.draft import Drafter
from quarrel.llm.experts import experts_on_host
from quarrel.llm.open import Opened
from quarrel.llm.plan import Planned
from quarrel.models import ModelSpec, Tensors
from quarrel.ops.check import CheckedStep
from quarrel.ops.program import Program
from quarrel.ops.step import Step


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
            cache_rules(planned.program, options.prefix_cache, planned.kept_blocks),
            max_waiting=options.max_waiting,
            make_drafter=None if planned.draft is None else lambda: _drafter(opened, planned),
        )
    except BaseException:
        loop.close(timeout=0.0)
        raise
    return Compiled(loop, step)


def cache_rules(program: Program, reuse: bool, kept_blocks: int | None = None) -> CacheRules:
    """What the engine's cache has to know of a model. kept_blocks: how many may stay that no sequence uses.

    A window counts where every layer has one, or where the layers that have one have blocks of their own.
    """
    windows = [layer.window for layer in program.caches]
    window = program.window or (max(windows) if windows and all(windows) else 0)
    return CacheRules(reuse, bool(program.states), window, kept_blocks, program.window_groups)


def _step(opened: Opened, planned: Planned) -> Step:
    options, limits, backend = opened.options, planned.memory.limits, opened.backend
    if planned.team is not None:
        assert isinstance(planned.spec, ModelSpec)
        return planned.team.compile(planned.spec, opened.file, limits, planned.memory.n_ctx, options.progress)
    if opened.environment.check:
        return CheckedStep(backend, planned.program, opened.weights, limits, options.compute)
    with experts_on_host(backend, planned.host_experts):
        return backend.compile(planned.program, opened.weights, limits, options.compute, options.progress)


def _drafter(opened: Opened, planned: Planned) -> Drafter:
    draft, options = planned.draft, opened.options
    assert draft is not None
    step = opened.backend.compile(draft.program, Tensors(draft.file), draft.plan.limits, options.compute)
    return Drafter(step, cache_rules(draft.program, options.prefix_cache), planned.spec.n_vocab, draft.spec.n_vocab)
