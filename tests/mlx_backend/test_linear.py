"""The linear family: every case of its contracts through both kernels, schedules, and rows that no neighbour changes."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quarrel.gguf import FORMATS, GGMLType
from quarrel.mlx_backend.backend import MlxBackend
from quarrel.mlx_backend.formats.layout import pack
from quarrel.mlx_backend.formats.table import NATIVE, packed_bytes
from quarrel.mlx_backend.registry import REGISTRY
from quarrel.mlx_backend.run_op import run_op
from quarrel.mlx_backend.runtime.launch import Batch, Rows
from quarrel.ops import draw, reference
from quarrel.ops.compare import errors
from quarrel.ops.contract import Array, Case, Compute, Concrete, Op, RawWeight
from quarrel.ops.formats import WEIGHT_TYPES
from quarrel.ops.linear import (
    LINEAR,
    LINEAR_ADD,
    NORM_GATE_UP,
    NORM_LINEAR,
    LinearAddSpec,
    LinearSpec,
    NormGateUpSpec,
    NormLinearSpec,
)
from quarrel.ops.norm import NormSpec
from tests.mlx_backend.cases import UNTYPED, running, same_bits
from tests.mlx_backend.emulated import CHECKED, FAST

EVERYTHING = os.environ.get("QUARREL_TEST_ALL") == "1"
"""Every case in every arithmetic through both kernels; without it each case takes one of the six, in turn."""
WAYS: list[tuple[bool, Compute]] = [
    (True, "float16"),
    (False, "float32"),
    (True, "bfloat16"),
    (False, "float16"),
    (True, "float32"),
    (False, "bfloat16"),
]
MOST = 32
"""More rows than these are a prompt's: decoding never brings so many in a contract's case."""
OPS = (LINEAR, LINEAR_ADD, NORM_LINEAR, NORM_GATE_UP)
CASES = [
    pytest.param(op, case, single, compute, id=f"{op.name}-{i}-{'decode' if single else 'prefill'}-{compute}")
    for op in OPS
    for i, case in enumerate(op.cases())
    for j, (single, compute) in enumerate(WAYS)
    if (EVERYTHING or i % 6 == j or (op is not LINEAR and i % 6 == (j + 1) % 6)) and not (single and case.dims["T"] > MOST)
]


def as_rows(count: int, single: bool) -> Batch:
    """Rows that all belong to sequences of one row, or of several."""
    rows = Rows(np.full(count, single))
    return Batch(rows, rows)


def run(op: Op, spec: Any, inputs: tuple[Concrete, ...], compute: Compute, single: bool) -> tuple[Concrete, ...]:
    count = len(next(i for i in inputs if isinstance(i, np.ndarray)))
    return run_op(REGISTRY, op, spec, inputs, compute, as_rows(count, single))


def made(op: Op, case: Case, seed: int = 0) -> tuple[Concrete, ...]:
    assert op.make is not None
    return op.make(case, np.random.default_rng(seed))


@pytest.mark.parametrize(("op", "case", "single", "compute"), CASES)
def test_case_matches_the_reference(op: Op, case: Case, single: bool, compute: Compute) -> None:
    inputs = made(op, case)
    with running(CHECKED if compute == "float16" else UNTYPED):
        got = run(op, case.spec, inputs, compute, single)
    found = errors(op, case.spec, got, reference.run_op(op, case.spec, inputs), case)
    assert max(found.values()) <= op.tolerance[compute]


FLAT = LinearSpec(GGMLType.Q4_K, 5, 2048, bias=True)
"""Flat enough that four SIMD-groups share its rows."""
RMS = NormSpec("rms", 2048, 1e-5)
SCHEDULED = [
    (LINEAR, FLAT),
    (LINEAR_ADD, LinearAddSpec(replace(FLAT, type=GGMLType.Q6_K), 0.5)),
    (NORM_LINEAR, NormLinearSpec(RMS, (FLAT, replace(FLAT, type=GGMLType.Q8_0)))),
    (NORM_GATE_UP, NormGateUpSpec(RMS, FLAT, FLAT, "silu")),
]


@pytest.mark.parametrize("single", [True, False], ids=["decode", "prefill"])
@pytest.mark.parametrize(("op", "spec"), SCHEDULED, ids=[op.name for op, _ in SCHEDULED])
def test_no_schedule_changes_a_bit(op: Op, spec: Any, single: bool) -> None:
    inputs = made(op, Case(spec, {"T": 2}))
    results = []
    for seed in (0, 1, 2):
        with running(replace(UNTYPED, seed=seed)):
            results.append(run(op, spec, inputs, "float16", single))
    assert same_bits(results[1], results[0])
    assert same_bits(results[2], results[0])
    found = errors(op, spec, results[0], reference.run_op(op, spec, inputs))
    assert max(found.values()) <= op.tolerance["float16"]


@pytest.mark.parametrize("single", [True, False], ids=["decode", "prefill"])
def test_a_row_does_not_depend_on_the_rows_beside_it(single: bool) -> None:
    """Nor on how many there are: 70 rows take other tiles than 9, and one row another kernel than four."""
    case = Case(LinearSpec(GGMLType.Q4_K, 67, 512), {"T": 70})
    x, *rest = made(LINEAR, case)
    assert isinstance(x, np.ndarray)
    with running(FAST):
        whole = first(run(LINEAR, case.spec, (x, *rest), "float16", single))
        for count in (1, 2, 3, 9):
            part = first(run(LINEAR, case.spec, (x[:count], *rest), "float16", single))
            assert np.array_equal(part, whole[:count])


def test_rows_of_both_kinds_keep_their_places() -> None:
    case = Case(LinearSpec(GGMLType.Q6_K, 33, 256), {"T": 7})
    x, weight = made(LINEAR, case)
    assert isinstance(x, np.ndarray)
    kinds = np.array([False, False, True, False, False, False, True])
    with running(FAST):
        mixed = first(run_op(REGISTRY, LINEAR, case.spec, (x, weight), "float16", Batch(Rows(kinds), Rows(kinds))))
        alone = first(run(LINEAR, case.spec, (np.ascontiguousarray(x[kinds]), weight), "float16", True))
        others = first(run(LINEAR, case.spec, (np.ascontiguousarray(x[~kinds]), weight), "float16", False))
    assert np.array_equal(mixed[kinds], alone)
    assert np.array_equal(mixed[~kinds], others)


def test_a_row_too_large_for_half_precision_is_normalised() -> None:
    """The float32 residual stream may exceed 65504; what comes out of the norm does not."""
    spec = NormLinearSpec(NormSpec("rms", 512, 1e-5), (LinearSpec(GGMLType.Q4_K, 16, 512),))
    x, *rest = made(NORM_LINEAR, Case(spec, {"T": 1}))
    assert isinstance(x, np.ndarray)
    want = reference.run_op(NORM_LINEAR, spec, (x * 60000, *rest))
    with running(FAST):
        got = run(NORM_LINEAR, spec, (x * 15000, *rest), "float16", True)
    assert max(errors(NORM_LINEAR, spec, got, want).values()) <= NORM_LINEAR.tolerance["float16"]


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_is_not_finite_stays_in_its_row(value: float) -> None:
    spec = LinearSpec(GGMLType.Q8_0, 9, 64)
    x, weight = made(LINEAR, Case(spec, {"T": 3}))
    assert isinstance(x, np.ndarray)
    x[1, 5] = value
    with running(FAST):
        for single in (True, False):
            y = first(run(LINEAR, spec, (x, weight), "float16", single))
            assert np.isfinite(y[[0, 2]]).all()
            assert not np.isfinite(y[1]).any()


def test_planes_take_at_most_three_percent_more_than_the_file() -> None:
    """But for TQ1_0, whose digits of base 3 become codes of 2 bits."""
    for type in NATIVE:
        block = FORMATS[type]
        rows, k = 64, 1024
        most = 1.23 if type == GGMLType.TQ1_0 else 1.03
        assert packed_bytes(type, rows, k) <= most * (rows * k // block.elements * block.nbytes)


def test_scales_that_neighbouring_blocks_share_are_kept_once(backend: MlxBackend) -> None:
    """As MLX's groups of 64 and 128 have them: 4.5 and 4.25 bits a weight for 5. One other scale, and all are kept."""
    rows, k = 9, 512
    spec = NormGateUpSpec(NormSpec("rms", k, 1e-5), *[LinearSpec(GGMLType.Q4_1, rows, k)] * 2, "silu")
    x, gain, gate, up = made(NORM_GATE_UP, Case(spec, {"T": 3}))
    for blocks, name in ((4, "Q4_1_128"), (2, "Q4_1_64")):
        packed = {}
        for way in ("shared", "but for one"):
            raw = _as_raw(gate).raw.reshape(rows, -1, blocks, 20).copy()
            raw[:, :, 1:, :4] = raw[:, :, :1, :4]
            if way != "shared":
                raw[-1, -1, -1, 2] ^= 1
            weight = RawWeight(GGMLType.Q4_1, raw.reshape(rows, -1), k)
            packed[way] = pack(NATIVE[GGMLType.Q4_1], rows, k, lambda start, stop, w=weight: w.raw[start:stop])
            if way == "shared":
                # Gate has groups here, and up has none.
                want = reference.run_op(NORM_GATE_UP, spec, (x, gain, weight, up))
                for single in (True, False) if blocks == 2 else (True,):
                    with running(FAST):
                        got = run(NORM_GATE_UP, spec, (x, gain, weight, up), "float32", single)
                    assert max(errors(NORM_GATE_UP, spec, got, want).values()) <= NORM_GATE_UP.tolerance["float32"]
        assert packed["shared"].format.name == name
        assert packed["shared"].nbytes == rows * k // 2 + max(rows * k // (32 * blocks), 4) * 4
        assert packed["but for one"].format.name in ("Q4_1", "Q4_1_64")
        assert packed["but for one"].nbytes > packed["shared"].nbytes


@pytest.mark.parametrize(
    ("type", "bits", "name"), [(GGMLType.Q4_1, 2, "Q2_1"), (GGMLType.Q4_1, 3, "Q3_1"), (GGMLType.Q8_1, 6, "Q6_1")]
)
def test_small_codes_are_kept_in_as_many_bits(backend: MlxBackend, type: GGMLType, bits: int, name: str) -> None:
    """As MLX's 2, 3 and 6 bits have them: with groups of 64, half a bit more a weight. One larger code, and all have 4 or 8
    bits."""
    rows, k = 9, 256
    weight = draw.small_codes(draw.weight(np.random.default_rng(1), type, rows, k), bits)
    raw = weight.raw.reshape(rows, -1, FORMATS[type].nbytes)
    for shared, end in ((1, ""), (2, "_64"), (4, "_128")):
        for i in range(shared):
            raw[:, i::shared, :4] = raw[:, ::shared, :4]
        packed = pack(NATIVE[type], rows, k, lambda start, stop: weight.raw[start:stop])
        assert packed.format.name == name + end
        assert packed.nbytes == rows * k * bits // 8 + rows * k // (32 * shared) * 4
        for single in (True, False):
            with running(FAST):
                x = np.eye(k, dtype=np.float32)
                y = first(run(LINEAR, LinearSpec(type, rows, k), (x, weight), "float32", single))
            assert np.allclose(y.T, weight.dense(), rtol=2e-7, atol=1e-7)
    raw[-1, -1, -1] |= 0x80
    packed = pack(NATIVE[type], rows, k, lambda start, stop: weight.raw[start:stop])
    assert packed.format.name == type.name + "_128"


def _as_raw(given: Concrete) -> RawWeight:
    assert isinstance(given, RawWeight)
    return given


def test_planes_hold_the_exact_values_of_every_format(backend: MlxBackend) -> None:
    """Columns one at a time: a row of x that is a unit vector gives a column of W, to the last bit."""
    for type in WEIGHT_TYPES:
        k = max(FORMATS[type].elements, 32)
        weight = draw.weight(np.random.default_rng(1), type, 3, k, std=1.0)
        assert isinstance(weight, RawWeight)
        x = np.eye(k, dtype=np.float32)
        with running(FAST):
            y = first(run(LINEAR, LinearSpec(type, 3, k), (x, weight), "float32", False))
        assert np.allclose(y.T, weight.dense(), rtol=2e-7, atol=0), type


def test_four_maps_with_all_their_planes_fit_into_one_launch() -> None:
    """Metal has 31 places for buffers, and the emulator refuses more; five maps are taken apart."""
    maps = (LinearSpec(GGMLType.Q3_K, 5, 256, bias=True),) * 4
    spec = NormLinearSpec(NormSpec("rms", 256, 1e-5), maps)
    inputs = made(NORM_LINEAR, Case(spec, {"T": 1}))
    with running(FAST):
        got = run(NORM_LINEAR, spec, inputs, "float16", True)
    found = errors(NORM_LINEAR, spec, got, reference.run_op(NORM_LINEAR, spec, inputs), Case(spec, {"T": 1}))
    assert max(found.values()) <= 2 * NORM_LINEAR.tolerance["float16"]
    taken, reasons = REGISTRY.find(NORM_LINEAR, replace(spec, linears=(*maps, maps[0])))
    assert taken is None
    assert reasons == ["matvec with norm: needs at most 4 maps, got 5"]


def test_a_layer_norm_is_left_to_the_smaller_ops(backend: MlxBackend) -> None:
    spec = NormLinearSpec(NormSpec("layer", 32, 1e-5), (LinearSpec(GGMLType.Q4_0, 4, 32),))
    taken, reasons = REGISTRY.find(NORM_LINEAR, spec)
    assert taken is None
    assert reasons == ["matvec with norm: needs one rms norm of the row, got layer norm in 1 groups"]


def first(results: tuple[Concrete, ...]) -> Array:
    assert isinstance(results[0], np.ndarray)
    return results[0]
