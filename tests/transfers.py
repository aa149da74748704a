"""A step's cache read by the host and written elsewhere, as every backend does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quarrel.ops.contract import KVArrays, rel_error
from quarrel.ops.step import Step, StepInputs
from quarrel.ops.transfer import Transfers

TO = (15, 14)


def check_transfer(
    step: Step, kind: str, prompt: StepInputs, here: StepInputs, there: StepInputs, caches: Sequence[KVArrays] = ()
) -> None:
    """Behind `prompt`, which fills blocks 0 and 1, `here` decodes from those and `there` from blocks 15 and 14.

    caches: what a reference has kept of the same prompt, where values are kept as they are."""
    assert isinstance(step, Transfers)
    step(prompt, "hidden")
    form, found = step.form(), step.read_blocks([0, 1])
    step.transferred()()
    assert (form.kind, form.block_size, form.states) == (kind, step.limits.block_size, ())
    assert [(a.dtype, a.shape) for a in found] == [(np.uint8, shape) for shape in form.block_shapes(2)]
    for i, cache in enumerate(caches):
        for array, kept in zip(found[2 * i : 2 * i + 2], (cache.k, cache.v)):
            assert rel_error(array.view(np.float32), kept[:2]) < 2e-5
    before: Any = step(here, "logits").logits
    for layer in range(len(form.layers)):
        step.write_blocks(TO, found[2 * layer : 2 * layer + 2], layer)
    memory = np.empty(sum(a.nbytes for a in found), np.uint8)
    unpin, ends = step.pin(memory), np.cumsum([a.nbytes for a in found])
    into = [memory[end - a.nbytes : end].reshape(a.shape) for a, end in zip(found, ends)]
    assert all(a is b or np.shares_memory(a, b) for a, b in zip(step.read_blocks(TO, into), into, strict=True))
    step.transferred()()
    assert all(np.array_equal(a, b) for a, b in zip(found, into, strict=True))
    step.write_blocks(TO, into)  # all layers
    step.transferred()()
    unpin()
    assert np.array_equal(step(there, "logits").logits, before)  # type: ignore[arg-type]
