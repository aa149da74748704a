"""Steps of one row: matvecs over packed weights, int8x2 activations, the chosen experts of one token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from quarrel.errors import UnsupportedOp
from quarrel.gguf import FORMATS, GGMLType
from quarrel.ops import draw
from quarrel.ops.contract import Case, Compute, Op, Value, WeightRef
from quarrel.ops.linear import (
    LINEAR,
    LINEAR_ADD,
    NORM_GATE_UP,
    NORM_LINEAR,
    LinearAddSpec,
    LinearSpec,
    NormGateUpSpec,
    NormLinearSpec,
    linear_reference,
)
from quarrel.ops.moe import EXPERT_DOWN, EXPERT_UP, ExpertDownSpec, ExpertUpSpec
from quarrel.ops.norm import NORM, NormSpec
from quarrel.ops.program import Node, Program
from quarrel.ops.registry import lower
from quarrel.ops.weights import CallWeights
from quarrel.triton_backend.backend import REGISTRY, TritonBackend
from quarrel.triton_backend.formats.int8x2 import int8x2_rows, reads_int8x2, words
from quarrel.triton_backend.formats.table import FLOATS, INTEGERS
from quarrel.triton_backend.formats.weights import Weights
from quarrel.triton_backend.plan import Plan
from quarrel.triton_backend.runtime.arrays import Slot
from quarrel.triton_backend.runtime.launch import INTERPRETED
from quarrel.triton_backend.runtime.site import Batch, Tables
from tests.triton_backend.cases import DEVICE, error_of, error_on

TYPES = [GGMLType[name] for name in (*INTEGERS, *FLOATS)]
FLOAT16: Compute = "float16"


def width(type: GGMLType) -> int:
    """Not whole tiles, and for blocks of 32 not whole superblocks."""
    elements = FORMATS[type].elements
    return 768 if elements == 256 else 11 * max(32, elements)


def check(backend: TritonBackend, op: Op, spec: object, note: str = "") -> None:
    assert error_of(backend, op, Case(spec, {"T": 1}, note), FLOAT16) <= op.tolerance[FLOAT16]


@pytest.mark.parametrize("type", TYPES, ids=lambda t: t.name)
def test_one_row_times_a_weight_of_each_format(backend: TritonBackend, type: GGMLType) -> None:
    check(backend, LINEAR, LinearSpec(type, 5, width(type), bias=True, out="f32"))


@pytest.mark.parametrize("type", [GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.F16], ids=lambda t: t.name)
def test_the_residual_is_added(backend: TritonBackend, type: GGMLType) -> None:
    check(backend, LINEAR_ADD, LinearAddSpec(LinearSpec(type, 21, 512), 0.22))


def test_a_float_row_of_any_width(backend: TritonBackend) -> None:
    check(backend, LINEAR, LinearSpec(GGMLType.F16, 5, 77))


def test_several_maps_of_mixed_formats_and_one_with_a_bias(backend: TritonBackend) -> None:
    norm = NormSpec("rms", 512, 1e-5)
    types = (GGMLType.Q6_K, GGMLType.Q4_K, GGMLType.Q8_0, GGMLType.Q4_K, GGMLType.F16, GGMLType.Q5_K)
    for maps in (types[:4], types[:2], types):
        check(backend, NORM_LINEAR, NormLinearSpec(norm, tuple(LinearSpec(t, 17 - i, 512) for i, t in enumerate(maps))))
    shapes = ((GGMLType.Q4_K, 6, False), (GGMLType.F16, 2, False), (GGMLType.Q6_K, 3, False), (GGMLType.Q8_0, 2, True))
    check(backend, NORM_LINEAR, NormLinearSpec(norm, tuple(LinearSpec(t, n, 512, b) for t, n, b in shapes)))
    check(backend, NORM_LINEAR, NormLinearSpec(norm, (LinearSpec(GGMLType.Q4_K, 5, 512),)))


@pytest.mark.parametrize(
    ("type", "activation", "k"),
    [
        ("Q4_K", "silu", 768),
        ("Q4_K", "gelu_tanh", 1280),
        ("Q8_0", "silu", 480),
        ("MXFP4", "silu", 32),
        ("F16", "silu", 224),
        ("F16", "gelu_tanh", 512),
    ],
)
def test_gate_and_up(backend: TritonBackend, type: str, activation: str, k: int) -> None:
    """Narrow floats by programs that walk rows with the norm inside, all others behind a norm."""
    same = LinearSpec(GGMLType[type], 19, k, bias=activation == "silu")
    check(backend, NORM_GATE_UP, NormGateUpSpec(NormSpec("rms", k, 1e-5), same, same, activation))  # type: ignore[arg-type]


@pytest.mark.parametrize("type", [GGMLType.Q5_0, GGMLType.BF16, GGMLType.MXFP4], ids=lambda t: t.name)
def test_chosen_experts(backend: TritonBackend, type: GGMLType) -> None:
    check(backend, EXPERT_UP, ExpertUpSpec(type, 4, 2, 3, 288, "oai", bias=True))
    check(backend, EXPERT_UP, ExpertUpSpec(type, 4, 2, 3, 64, "relu2", gated=False))
    check(backend, EXPERT_DOWN, ExpertDownSpec(type, 4, 3, 3, 544, bias=True), "three tiles at once, of two experts")


@pytest.mark.parametrize(
    ("compute", "tokens", "types"),
    [(FLOAT16, 1, ("Q4_K", "Q6_K")), (FLOAT16, 5, ("F16", "Q4_K")), ("float32", 3, ("Q5_K", "F32"))],
)
def test_experts_whose_gate_and_up_have_two_formats(
    backend: TritonBackend, compute: Compute, tokens: int, types: tuple[str, str]
) -> None:
    """As in files that were told a type for each tensor."""
    spec = ExpertUpSpec(GGMLType[types[0]], 4, 2, 19, 256, "silu", bias=True)
    x, ids, _, _, *biases = EXPERT_UP.make(Case(spec, {"T": tokens}), np.random.default_rng(3))  # type: ignore[misc]
    gate, up = (draw.weight(np.random.default_rng(i), GGMLType[type], spec.rows, spec.k) for i, type in enumerate(types))
    given = (x, ids, gate, up, *biases)
    assert error_on(backend, EXPERT_UP, spec, given, compute) <= EXPERT_UP.tolerance[compute]
    other = replace(spec, activation="oai")
    with pytest.raises(UnsupportedOp, match=f"needs one format, got gate {types[0]} and up {types[1]}"):
        backend.run_op(EXPERT_UP, other, given, compute)


def test_int8x2_keeps_15_bits_of_a_block() -> None:
    rng = np.random.default_rng(0)
    k = 96
    x = (draw.activations(rng, 1, k)[0] * np.repeat([1e-6, 1.0, 3e4], 32)).astype(np.float32)
    x[64:] = 0.0
    to = torch.full((words(k),), -1, dtype=torch.int32, device=DEVICE)
    with np.errstate(all="ignore"):
        int8x2_rows[(1, 2)](to, torch.from_numpy(x).to(DEVICE), K=k, B=2, PDL=False)
    got = from_int8x2(to, k)
    error = np.abs(got - x).reshape(3, 32).max(1) / np.maximum(np.abs(x).reshape(3, 32).max(1), 1e-30)
    assert error.max() <= 0.51 / 16256


def from_int8x2(to: torch.Tensor, k: int) -> np.ndarray:
    """The values of an int8x2 row, from the layout that `int8x2.py` describes."""
    ints = to.cpu().numpy()
    parts = (
        ints[: k // 2].view(np.int8).reshape(2, 2, k // 32, 16).astype(np.float64)
    )  # first or last 16 columns, high or low, block, column
    scale = ints[k // 2 : k // 2 + k // 32].view(np.float32).astype(np.float64)
    sums = ints[k // 2 + k // 32 :].reshape(2, k // 32)
    q = parts[:, 0] * 128 + parts[:, 1]
    assert np.array_equal(q.sum(-1), sums)
    return (q * scale[:, None]).transpose(1, 0, 2).reshape(k)  # type: ignore[no-any-return]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_reaches_every_result(backend: TritonBackend, bad: float) -> None:
    rng = np.random.default_rng(1)
    x = draw.activations(rng, 1, 256)
    x[0, 100] = bad
    (y,) = backend.run_op(LINEAR, LinearSpec(GGMLType.Q4_K, 4, 256), (x, draw.weight(rng, GGMLType.Q4_K, 4, 256)), FLOAT16)
    assert not np.isfinite(np.asarray(y)).any()


def test_a_norm_leaves_its_row_as_int8x2() -> None:
    """The row that a weight in integers reads is made by the norm before it; the plain one only if something reads it."""
    rng = np.random.default_rng(2)
    k, n = 256, 4
    given = {"gain": draw.weight(rng, GGMLType.F32, 1, k, 1.0), "w": draw.weight(rng, GGMLType.Q4_K, n, k)}
    x, h, y = (Value(i, "f32" if i != 1 else "act", ("T", d), str(i)) for i, d in ((0, k), (1, k), (2, n)))
    norm, linear = NormSpec("rms", k, 1e-5), LinearSpec(GGMLType.Q4_K, n, k, out="f32")
    nodes = (
        Node(NORM, norm, (x, WeightRef("gain", GGMLType.F32, 1, k)), (h,), "norm"),
        Node(LINEAR, linear, (h, WeightRef("w", GGMLType.Q4_K, n, k)), (y,), "linear"),
    )
    device = DEVICE
    rows = draw.activations(rng, 1, k)
    slots = {0: Slot(torch.from_numpy(rows.reshape(-1).copy()).to(device))}
    launched: list[str] = []

    def launch(kernel: object, grid: Sequence[int], *args: object, **told: object) -> None:
        from quarrel.triton_backend.runtime.launch import launch as really

        launched.append(kernel.__name__)  # type: ignore[attr-defined]
        really(kernel, tuple(grid), *args, **told)  # type: ignore[arg-type]

    none = Slot(torch.zeros(1, dtype=torch.int32, device=device))
    choices = lower(Program(nodes, {"x": x}, {}, ()), REGISTRY)
    weights = Weights(CallWeights(given), device, FLOAT16)
    plan = Plan(choices, slots, {2}, {"T": 1, "S": 1, "R": 1, "items": 1}, weights, [], [], Tables(none, none), FLOAT16,
                device, launch)  # fmt: skip
    plan.fill(255)
    for go in plan.launches:
        go(Batch(1, 1, 1, True, False, 1))
    assert launched == ["norm_int8x2_rows", "matvec"]
    library = "dequantize, then the library's matmul"
    tiles = "matmul 2 to 128" if INTERPRETED else "mma 2 to 32, matmul 33 to 128"
    assert plan.described[1].describe() == f"matvec 1, {tiles}, {library} from 129 rows"
    names = ["e4m3", "invariant ring", "ring", "mma", "wgmma", "separate launches", "float32 rows"]
    assert [why.split(":")[0] for why in plan.described[1].declined] == [n for n in names if INTERPRETED or n != "mma"]
    square = (rows.astype(np.float64) ** 2).mean()
    normed = rows / np.sqrt(square + 1e-5) * given["gain"].dense()
    (want,) = linear_reference(linear, normed, given["w"])
    assert np.abs(plan.slots[2].tensor.cpu().numpy() - want).max() <= 2e-3 * np.abs(want).max()
    assert torch.isnan(plan.slots[1].tensor).all()


def test_float32_and_deterministic_steps_keep_the_exact_tiles(backend: TritonBackend) -> None:
    spec = LinearSpec(GGMLType.Q4_K, 3, 256)
    node = Node(LINEAR, spec, (), (), "")
    assert reads_int8x2(node, FLOAT16)
    assert not reads_int8x2(node, "float32")
    assert error_of(backend, LINEAR, Case(spec, {"T": 1}), "float32") <= LINEAR.tolerance["float32"]
