"""Experts in host memory: the device's step with them gives what the reference gives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from quarrel.cpu_backend.backend import CpuBackend
from quarrel.llm import load
from quarrel.ops.contract import Compute, rel_error
from quarrel.ops.host import HostExperts, expert_refs
from quarrel.ops.moe import EXPERT_DOWN, EXPERT_UP
from quarrel.triton_backend.backend import TritonBackend
from quarrel.triton_backend.experts import host as hosted
from quarrel.triton_backend.runtime.site import Batch
from tests.paths import need_cases
from tests.triton_backend.test_fuse import program
from tests.triton_backend.test_step import LIMITS, Reference, Weights, batch

TOLERANCE: dict[Compute, float] = {"float32": 2e-5, "float16": 2e-2}
"""The host rounds activations to 8 bits unless it is to be exact."""


@pytest.mark.parametrize(("kind", "compute"), [("silu", "float32"), ("relu2", "float16"), ("oai", "float16")])
def test_steps_match_the_reference(backend: TritonBackend, kind: str, compute: Compute) -> None:
    made, host = program(kind), CpuBackend(threads=1)
    (path,) = expert_refs(made)
    plain = backend.compile(made, Weights(), LIMITS, compute)
    backend.leave_to_host(HostExperts(host, frozenset({path})))
    step, reference = backend.compile(made, Weights(), LIMITS, compute), Reference(made)
    for tokens in (1, 5):
        inputs = batch([(0, 0, tokens)], rows=list(range(tokens)), seed=3)
        assert rel_error(step(inputs, "hidden").hidden, reference(inputs)["hidden"]) <= TOLERANCE[compute]  # type: ignore[arg-type]
    hosted = {t.op for t in step.explain() if t.implementation.startswith("in host memory, on ")}
    assert hosted == {EXPERT_UP.name, EXPERT_DOWN.name}
    assert step.memory().weights < plain.memory().weights
    step.close()
    plain.close()
    host.close()


def test_rows_that_pad_a_batch_are_not_computed(backend: TritonBackend) -> None:
    """What a captured bucket does, in the pieces that it is cut into."""
    made, host = program("silu"), CpuBackend(threads=1)
    backend.leave_to_host(HostExperts(host, frozenset(expert_refs(made))))
    step = backend.compile(made, Weights(), LIMITS, "float32")
    inputs = batch([(0, 0, 1), (6, 0, 1), (12, 0, 1)], seed=5)
    want = step(inputs, "hidden").hidden
    step._plan.fill(255)
    step._inputs.send(inputs, 4)
    step._run(Batch(4, 4, 4, True, False, 4), "hidden")
    assert np.array_equal(step._read(step._outputs["hidden"], {"R": 3}), want)  # type: ignore[arg-type]
    step.close()
    host.close()


def test_more_rows_than_the_host_takes_at_once(backend: TritonBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quarrel.triton_backend.experts.host.ROWS", 4)
    made, host = program("silu"), CpuBackend(threads=1)
    backend.leave_to_host(HostExperts(host, frozenset(expert_refs(made))))
    step = backend.compile(made, Weights(), replace(LIMITS, max_tokens=16), "float32")
    inputs = batch([(0, 0, 7)], rows=list(range(7)))
    assert rel_error(step(inputs, "hidden").hidden, Reference(made)(inputs)["hidden"]) <= 2e-5  # type: ignore[arg-type]
    step.close()
    host.close()


@pytest.mark.parametrize(("kind", "compute"), [("silu", "float16"), ("relu2", "float32")])
def test_many_rows_take_the_experts_to_the_device(backend: TritonBackend, kind: str, compute: Compute) -> None:
    made, host = program(kind), CpuBackend(threads=1)
    backend.leave_to_host(HostExperts(host, frozenset(expert_refs(made)), streams=True, stream_from=4))
    step, reference = backend.compile(made, Weights(), LIMITS, compute), Reference(made)
    assert any(t.implementation.endswith("copied to the device for steps of many rows") for t in step.explain())
    errors = []
    for tokens in (3, 5):
        inputs = batch([(0, 0, tokens)], rows=list(range(tokens)), seed=3)
        errors.append(rel_error(step(inputs, "hidden").hidden, reference(inputs)["hidden"]))  # type: ignore[arg-type]
    assert max(errors) <= TOLERANCE[compute]
    if compute == "float16":  # the host's 8 bits, and the device's 16
        assert errors[1] < 2e-3 < errors[0]
    step.close()
    host.close()


def test_from_how_many_rows_is_measured(backend: TritonBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    made, host = program("silu"), CpuBackend(threads=1)
    seconds = iter((3.0, 1.0))
    monkeypatch.setattr(hosted, "_seconds", lambda run: [run(), next(seconds)][1])
    source = Weights()
    exchange = hosted.Exchange(torch.device("cpu"), source, "float16")
    up, down = (n for n in made.nodes if n.op in (EXPERT_UP, EXPERT_DOWN))
    part = HostExperts(host, frozenset()).part(up, down, source, 64, "float16")
    layer = hosted.Layer(exchange, hosted.Turn(None), 64, up, down, part)
    assert sorted(layer.refs.values()) == [0, 1, 2]
    batch = Batch(1, 1, 1, True, False, 1)
    assert not layer.streams(batch)
    assert [layer.streams(replace(batch, T=t)) for t in (16, 47, 48)] == [False, False, True]
    assert layer.turn.rows == 48
    host.close()


def test_the_choice_ends_with_the_next_one(backend: TritonBackend) -> None:
    made = program("silu")
    backend.leave_to_host(HostExperts(CpuBackend(threads=1), frozenset(expert_refs(made))))
    backend.leave_to_host(None)
    step = backend.compile(made, Weights(), LIMITS, "float32")
    assert not any("host memory" in t.implementation for t in step.explain())
    step.close()


def test_a_loaded_model_says_what_the_host_holds(backend: TritonBackend) -> None:
    with load(need_cases("mixtral") / "model-q4_0x.gguf", backend=backend, n_ctx=64, max_seqs=1, experts_on_cpu=1) as llm:
        told = llm.explain()
    assert (told.plan.host_layers, told.plan.host) == (1, 442368)
    where = {c.path for c in told.choices if c.implementation.startswith("in host memory")}
    assert where == {"blk.0.ffn"}
    assert told.memory.weights < told.plan.weights + told.plan.host
    assert backend._host is None
