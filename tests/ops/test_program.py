"""Tracing, the null arrays, choosing implementations, and the checks at the step's edge."""

from __future__ import annotations

import operator
from dataclasses import replace

import numpy as np
import pytest

from quarrel.errors import BackendUnavailable, RequestError, UnsupportedOp
from quarrel.gguf import GGMLType
from quarrel.ops.contract import WeightRef
from quarrel.ops.linear import LINEAR, LINEAR_ADD, LinearAddSpec, LinearSpec, linear, linear_add
from quarrel.ops.norm import NORM, NormSpec, norm
from quarrel.ops.null import Builder
from quarrel.ops.program import KVLayer
from quarrel.ops.registry import Implementation, Registry, backend, lower
from quarrel.ops.step import Limits, SampleInputs, StepInputs

W = WeightRef("w", GGMLType.Q8_0, 64, 32)


def value(b: Builder, width: int):  # type: ignore[no-untyped-def]
    from quarrel.ops.embedding import embedding

    return embedding(b, b.input("ids"), WeightRef("e", GGMLType.F16, 100, width))


def test_symbolic_values_refuse_to_compute() -> None:
    x = value(Builder(), 32)
    for use in (lambda: x + x, lambda: x[0], lambda: bool(x), lambda: list(x), lambda: len(x), lambda: np.asarray(x) + 1):
        with pytest.raises(TypeError, match="symbolic"):
            use()
    with pytest.raises(TypeError):
        operator.matmul(2, x)
    with pytest.raises(AttributeError):
        x.shape  # noqa: B018


def test_a_wrong_axis_or_kind_is_named_with_its_place() -> None:
    b = Builder()
    with b.at("blk.7"), pytest.raises(TypeError, match=r"blk\.7: linear: x wants \[T, 32\]"):
        linear(b, value(b, 48), W)
    with pytest.raises(TypeError, match="weight wants a weight"):
        b.emit(LINEAR, LinearSpec(GGMLType.Q8_0, 64, 32), value(b, 32), value(b, 32))
    with pytest.raises(TypeError, match="wants a LinearSpec"):
        b.emit(LINEAR, NormSpec("rms", 32, 1e-5), value(b, 32), W)
    with pytest.raises(TypeError, match="takes"):
        b.emit(LINEAR, LinearSpec(GGMLType.Q8_0, 64, 32), value(b, 32))


def test_free_axes_must_agree() -> None:
    b = Builder()
    x = value(b, 64)
    rows = b.input("out_rows")
    from quarrel.ops.embedding import gather_rows

    picked = gather_rows(b, x, rows)
    assert picked.dims == ("R", 64)
    with pytest.raises(TypeError, match=r"residual|x wants"):
        linear_add(b, picked, value(b, 32), W)


def test_a_weight_splits_into_row_slices() -> None:
    q, k = WeightRef("w", GGMLType.Q8_0, 10, 32).split(7, 3)
    assert (q.start, q.rows, k.start, k.rows) == (0, 7, 7, 3)


def program_of_linear_add():  # type: ignore[no-untyped-def]
    b = Builder()
    with b.at("blk.0.ffn"):
        x = value(b, 32)
        out = linear_add(b, value(b, 64), x, W, scale=0.5)
    return b.program(hidden=out)


def accept(op, name, reason=None):  # type: ignore[no-untyped-def]
    return Implementation(op, name, lambda: None, lambda spec: reason)


def test_a_composite_is_taken_whole_or_expanded_with_the_reason_kept() -> None:
    program = program_of_linear_add()
    from quarrel.ops.embedding import EMBEDDING
    from quarrel.ops.linear import ADD

    parts = [accept(EMBEDDING, "e"), accept(LINEAR, "l"), accept(ADD, "a")]
    whole = lower(program, Registry("toy", [*parts, accept(LINEAR_ADD, "fused")]))
    assert [c.implementation.name for c in whole] == ["e", "e", "fused"]
    declined = lower(program, Registry("toy", [*parts, accept(LINEAR_ADD, "fused", "needs n 128, got 64")]))
    assert [c.implementation.name for c in declined] == ["e", "e", "l", "a"]
    assert "needs n 128, got 64" in " ".join(declined[2].declined)
    assert declined[-1].node.outputs[0] is program.outputs["hidden"], "an expansion writes the composite's own outputs"
    assert declined[2].node.spec == LinearSpec(GGMLType.Q8_0, 64, 32, out="f32")


def test_a_declined_primitive_names_backend_op_and_reason() -> None:
    b = Builder()
    out = norm(b, NormSpec("rms", 32, 1e-5), value(b, 32), WeightRef("g", GGMLType.F32, 1, 32))
    from quarrel.ops.embedding import EMBEDDING

    registry = Registry("toy", [accept(EMBEDDING, "e"), accept(NORM, "n", "needs k 64, got 32")])
    with pytest.raises(UnsupportedOp, match=r"toy has no implementation of norm .* n: needs k 64, got 32"):
        lower(b.program(hidden=out), registry)


def test_the_first_that_accepts_wins() -> None:
    registry = Registry("toy", [accept(LINEAR_ADD, "picky", "no"), accept(LINEAR_ADD, "easy"), accept(LINEAR_ADD, "late")])
    found, reasons = registry.find(LINEAR_ADD, LinearAddSpec(LinearSpec(GGMLType.F16, 1, 1)))
    assert found is not None
    assert found.name == "easy"
    assert reasons == ["picky: no"]


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(BackendUnavailable, match="no backend is called 'vulkan'"):
        backend("vulkan")


def test_caches_are_numbered_in_order() -> None:
    b = Builder()
    assert [b.cache(KVLayer(1, 64)).layer for _ in range(3)] == [0, 1, 2]


GOOD = StepInputs(
    ids=np.array([1, 2, 3], np.int32),
    positions=np.array([0, 1, 5], np.int32),
    slots=np.array([0, 1, 37], np.int32),
    query_start=np.array([0, 2, 3], np.int32),
    kv_len=np.array([2, 6], np.int32),
    block_table=np.array([[0], [1]], np.int32),
    out_rows=np.array([1, 2], np.int32),
    sample=SampleInputs(*(np.zeros(2, np.float32) for _ in range(5))),
)


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("ids", [1, 2, 100]),
        ("ids", [1, -1, 3]),
        ("ids", []),
        ("positions", [0]),
        ("slots", [0, 1, 64]),
        ("query_start", [0, 2, 4]),
        ("query_start", [0, 4, 3]),
        ("kv_len", [2, 33]),
        ("kv_len", [0, 6]),
        ("block_table", [[0], [2]]),
        ("block_table", [[0], [-1]]),
        ("out_rows", [3]),
        ("out_rows", [-1]),
    ],
)
def test_a_bad_batch_is_refused_on_the_host(field: str, bad: list[int]) -> None:
    limits = Limits(max_tokens=8, max_seqs=2, max_blocks_per_seq=2, n_blocks=2)
    GOOD.check(limits, 100)
    with pytest.raises(RequestError, match="step inputs are unusable"):
        replace(GOOD, **{field: np.array(bad, np.int32)}).check(limits, 100)
