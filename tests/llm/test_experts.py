"""Which layers' experts leave the device: as few as make the rest fit, and a sentence where that is not possible."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from quarrel.cpu_backend.backend import CpuBackend
from quarrel.errors import OutOfMemory, RequestError
from quarrel.gguf import GGUFFile
from quarrel.llm.experts import experts_on_host, place_experts
from quarrel.llm.memory import Device, Plan, plan_limits
from quarrel.models import Tensors, assemble, read_spec
from quarrel.ops.contract import Compute, WeightRef
from quarrel.ops.host import HostExperts
from quarrel.ops.program import Program
from quarrel.ops.weights import file_bytes
from tests.paths import need_cases

EXPERTS = 442368
"""Bytes of one layer's."""


class Leaves(CpuBackend):
    """A backend that can leave experts to the host."""

    left: HostExperts | None = None

    def leave_to_host(self, experts: HostExperts | None) -> None:
        self.left = experts

    def device_bytes(self, refs: Iterable[WeightRef], compute: Compute) -> int:
        return sum(map(file_bytes, refs))


class Full(CpuBackend):
    def free_bytes(self) -> int:
        return EXPERTS - 1


@pytest.fixture(name="model", scope="module")
def _model() -> tuple[Program, Any, int]:
    with GGUFFile.open(need_cases("mixtral") / "model-q4_0x.gguf") as file:
        spec = read_spec(file)
        return assemble(spec, Tensors(file)), spec, sum(t.nbytes for t in file.tensors.values())


def place(
    model: tuple[Program, Any, int],
    budget: int,
    requested: int | None = None,
    host: CpuBackend | None = None,
    **options: Any,
) -> tuple[Plan, HostExperts | None]:
    program, spec, weights = model

    def make(size: int) -> Plan:
        device = Device(budget, budget)
        return plan_limits(program, spec, compute="float16", device=device, weights=size, n_ctx=64, max_seqs=1)

    given = {"weights": weights, "context": 64, "backend": Leaves(), "requested": requested}
    return place_experts(program, make, **{**given, "host": lambda: host or CpuBackend(), **options})


@pytest.fixture(name="needed", scope="module")
def _needed(model: tuple[Program, Any, int]) -> int:
    """The smallest budget that holds everything."""
    low, high = 0, 1 << 30
    while low < high:
        middle = (low + high) // 2
        try:
            place(model, middle, 0, backend=None)
            high = middle
        except OutOfMemory:
            low = middle + 1
    return low


def test_nothing_leaves_where_there_is_room(model: tuple[Program, Any, int], needed: int) -> None:
    plan, host = place(model, needed)
    assert (plan.host, plan.host_layers, host) == (0, 0, None)


@pytest.mark.parametrize(("missing", "layers"), [(1, 1), (EXPERTS, 1), (EXPERTS + 1, 2)])
def test_as_few_layers_leave_as_needed(model: tuple[Program, Any, int], needed: int, missing: int, layers: int) -> None:
    plan, host = place(model, needed - missing)
    assert (plan.host, plan.host_layers) == (layers * EXPERTS, layers)
    assert plan.total <= plan.budget == needed - missing
    assert plan.weights == model[2] - plan.host
    assert host is not None
    assert host.paths == {f"blk.{i}.ffn" for i in range(layers)}


def test_as_many_layers_leave_as_requested(model: tuple[Program, Any, int], needed: int) -> None:
    plan, host = place(model, needed, 2)
    assert plan.host_layers == 2
    assert host is not None
    assert len(host.paths) == 2


def test_a_refusal_says_how_many_layers_would_make_it_fit(model: tuple[Program, Any, int], needed: int) -> None:
    for requested, enough in ((0, 1), (1, 2)):
        with pytest.raises(OutOfMemory, match=f"the model needs .* are free; .*: use experts_on_cpu={enough}$"):
            place(model, needed - 1 - requested * EXPERTS, requested)
    with pytest.raises(OutOfMemory, match="the model needs") as raised:
        place(model, needed - 2 * EXPERTS - 1)
    assert "experts_on_cpu" not in str(raised.value)
    with pytest.raises(OutOfMemory, match=r"the experts of 1 layers need .* of host memory, and .* are free there"):
        place(model, needed - 1, host=Full())


@pytest.mark.parametrize(
    ("requested", "backend", "match"),
    [
        (3, Leaves(), "experts_on_cpu is 3, wanted 0 to 2, the layers with experts"),
        (1, CpuBackend(), "experts can leave the memory of one GPU only"),
    ],
)
def test_layers_that_cannot_leave_are_refused(
    model: tuple[Program, Any, int], requested: int, backend: Any, match: str
) -> None:
    with pytest.raises(RequestError, match=match):
        place(model, 1 << 30, requested, backend=backend)


def test_a_model_without_experts_has_none_to_leave(model: tuple[Program, Any, int]) -> None:
    with pytest.raises(RequestError, match="this model has no experts"):
        place((Program((), {}, {}, ()), *model[1:]), 1 << 30, 1)


def test_only_what_is_compiled_meanwhile_leaves_them(model: tuple[Program, Any, int], needed: int) -> None:
    backend, (_, host) = Leaves(), place(model, needed, 1)
    with experts_on_host(backend, host):
        assert backend.left is host
    assert backend.left is None
    with experts_on_host(CpuBackend(), None):
        pass
