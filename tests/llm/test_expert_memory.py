"""`expert_memory`: slots for those used most, within the bytes; and one sentence where it cannot be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quarrel.cpu_backend.backend import CpuBackend
from quarrel.errors import OutOfMemory, RequestError
from quarrel.llm import LoadOptions, load
from quarrel.llm.expert_memory import check_expert_memory, pool_experts
from quarrel.llm.memory import Device, Plan, plan_limits
from quarrel.ops.host import HostExperts
from quarrel.ops.program import Program
from tests.llm.test_experts import EXPERTS, Full, Leaves
from tests.llm.test_experts import _model as _model  # its fixture
from tests.paths import need_cases

LAYERS, EACH = 2, EXPERTS // 4
"""Of the tiny mixtral: 4 experts a layer."""


def pooled(
    model: tuple[Program, Any, int], memory: int, budget: int = 1 << 30, **options: Any
) -> tuple[Plan, HostExperts | None]:
    program, spec, weights = model

    def make(size: int) -> Plan:
        device = Device(budget, budget)
        return plan_limits(program, spec, compute="float16", device=device, weights=size, n_ctx=64, max_seqs=1)

    given = {"weights": weights, "backend": Leaves(), "compute": "float16", "host": CpuBackend}
    return pool_experts(program, make, memory, **{**given, **options})


@pytest.mark.parametrize(("memory", "slots"), [(3 * EACH, 2), (4 * EACH - 1, 2), (4 * EACH, 3), (8 * EACH - 1, 6)])
def test_slots_are_what_the_bytes_hold(model: tuple[Program, Any, int], memory: int, slots: int) -> None:
    plan, host = pooled(model, memory)
    assert host is not None
    (pool,) = host.pools
    assert (set(pool.paths), pool.slots) == (set(host.paths), slots)
    assert pool.paths == ("blk.0.ffn", "blk.1.ffn")
    assert plan.resident == (slots + 1) * EACH <= memory
    assert (plan.weights, plan.host) == (model[2] - LAYERS * EXPERTS + plan.resident, LAYERS * EXPERTS)
    assert host.streams


def test_nothing_is_left_to_the_host_where_all_fit(model: tuple[Program, Any, int]) -> None:
    plan, host = pooled(model, LAYERS * EXPERTS)
    assert (plan.weights, plan.host, plan.resident, host) == (model[2], 0, 0, None)


def test_layers_of_two_kinds_share_by_their_bytes(model: tuple[Program, Any, int]) -> None:
    program, spec, weights = model
    last = max(i for i, node in enumerate(program.nodes) if node.op.name == "expert_down")
    node = program.nodes[last]
    ref = replace(node.inputs[3], k=4 * node.inputs[3].k)  # type: ignore[type-var]
    odd = replace(node, inputs=(*node.inputs[:3], ref, *node.inputs[4:]))
    nodes = (*program.nodes[:last], odd, *program.nodes[last + 1 :])
    every = (LAYERS + 1) * EXPERTS
    _, host = pooled((replace(program, nodes=nodes), spec, weights + EXPERTS), every // 2)
    assert host is not None
    assert [(pool.paths, pool.slots) for pool in host.pools] == [(("blk.0.ffn",), 1), (("blk.1.ffn",), 1)]


@pytest.mark.parametrize("memory", [1, 3 * EACH - 1])
def test_too_little_says_the_least(model: tuple[Program, Any, int], memory: int) -> None:
    with pytest.raises(RequestError, match=rf"wanted at least 0.32 MiB \({3 * EACH} bytes\).*experts_on_cpu=2$") as raised:
        pooled(model, memory)
    assert raised.value.field == "expert_memory"


@pytest.mark.parametrize("backend", [CpuBackend(), None])
def test_other_backends_refuse_it(model: tuple[Program, Any, int], backend: Any) -> None:
    with pytest.raises(RequestError, match="expert_memory is 0.42 MiB, and experts can leave the memory of one GPU only"):
        pooled(model, 4 * EACH, backend=backend)


def test_a_model_without_experts_refuses_it(model: tuple[Program, Any, int]) -> None:
    with pytest.raises(RequestError, match="expert_memory is .*, and this model has no experts: leave it out"):
        pooled((Program((), {}, {}, ()), *model[1:]), 4 * EACH)
    with pytest.raises(RequestError, match="expert_memory is .*, and this model has no experts: leave it out"):
        load(need_cases("bert") / "model-q4_0x.gguf", backend="cpu", expert_memory=1 << 20)


def test_what_does_not_fit_beside_it_is_refused(model: tuple[Program, Any, int]) -> None:
    with pytest.raises(OutOfMemory, match="the model needs .* are free; .*; or give less expert_memory$"):
        pooled(model, 7 * EACH, budget=1 << 19)
    with pytest.raises(OutOfMemory, match="need .* of host memory, and .* are free there"):
        pooled(model, 4 * EACH, host=Full)


@pytest.mark.parametrize("other", [{"experts_on_cpu": 0}, {"experts_on_cpu": 1}, {"deterministic": True}])
def test_options_that_rule_it_out(other: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as raised:
        check_expert_memory(LoadOptions(expert_memory=1 << 20, **other))
    assert set(raised.value.fields) == {"expert_memory", *other}
    check_expert_memory(LoadOptions(**other))
