"""Every op of the contract against its reference: the contract's cases, then shapes drawn at random."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quarrel.ops import ALL_OPS
from quarrel.ops.contract import Case, Compute, Op
from quarrel.triton_backend.backend import REGISTRY, TritonBackend
from tests.triton_backend.cases import COMPUTES, EVERYTHING, error_of

CASES = [
    pytest.param(op, case, compute, id=f"{op.name}-{i}-{compute}")
    for op in ALL_OPS.values()
    for i, case in enumerate(op.cases())
    for j, compute in enumerate(COMPUTES)
    # The largest case goes to float16, which the interpreter multiplies in one piece.
    if EVERYTHING or j == (1 if case.dims.get("T", 0) > 100 else i % len(COMPUTES))
]


@pytest.mark.parametrize(("op", "case", "compute"), CASES)
def test_case_matches_the_reference(backend: TritonBackend, op: Op, case: Case, compute: Compute) -> None:
    """Buffers hold NaN beforehand, so an element that no kernel writes is an infinite error."""
    assert error_of(backend, op, case, compute) <= op.tolerance[compute]


@pytest.mark.parametrize("name", [name for name, op in ALL_OPS.items() if op.strategy is not None])
@settings(
    max_examples=40 if EVERYTHING else 5,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_random_shapes_match_the_reference(backend: TritonBackend, name: str, data: st.DataObject) -> None:
    op = ALL_OPS[name]
    assert op.strategy is not None
    case = data.draw(op.strategy())
    # Shapes of one or two values are drawn too, whose sums may nearly cancel: hence the room, and no half precision.
    assert error_of(backend, op, case, "float32", seed=data.draw(st.integers(0, 99))) <= 4 * op.tolerance["float32"]


def test_every_op_has_an_implementation_or_an_expansion() -> None:
    for op in ALL_OPS.values():
        assert op.name in REGISTRY.ops() or op.expand is not None, op
