"""Stages whose stream stays on the device give what stages through the host give."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from quarrel.gguf import GGUFFile
from quarrel.gguf.resolve import resolve
from quarrel.models import Tensors, assemble, read_spec
from quarrel.models.shard import shard
from quarrel.ops.step import KeepsStream, Limits, StepInputs
from quarrel.triton_backend.backend import TritonBackend

LIMITS = Limits(max_tokens=16, max_seqs=2, max_blocks_per_seq=4, n_blocks=8, block_size=16)


def sequence(first: int, end: int) -> StepInputs:
    """Tokens of one sequence from `first` on; the last row is wanted."""
    at = np.arange(first, end, dtype=np.int32)
    return StepInputs(
        at + 7, at, at, np.array([0, len(at)], np.int32), np.array([end], np.int32), np.arange(4, dtype=np.int32)[None],
        np.array([len(at) - 1], np.int32),
    )  # fmt: skip


def test_a_stream_that_stays_on_the_device_is_the_one_that_the_host_hands_on(backend: TritonBackend) -> None:
    with GGUFFile.open(resolve("demo").paths[0]) as file:
        spec, steps = read_spec(file), []
        for rank in (1, 2, 0):  # the last stage is that of the first process
            own, tensors = shard(spec, Tensors(file), rank, 3, stages=3)  # type: ignore[arg-type]
            steps.append(backend.compile(assemble(own, tensors), tensors, LIMITS, "float32"))
    first, middle, last = steps
    for inputs in (sequence(0, 5), sequence(5, 6), sequence(6, 7)):
        by_host = middle(replace(inputs, stream=first(inputs, "hidden").stream), "hidden").stream
        want = last(replace(inputs, stream=by_host), "logits").logits
        assert isinstance(first, KeepsStream)
        assert isinstance(middle, KeepsStream)
        given = first.keep_stream(inputs, "hidden")
        made = middle.keep_stream(replace(inputs, stream=given), "hidden")
        assert isinstance(made, torch.Tensor)
        np.testing.assert_array_equal(made.cpu().numpy(), by_host)
        np.testing.assert_array_equal(last(replace(inputs, stream=made), "logits").logits, want)
    for step in steps:
        step.close()
