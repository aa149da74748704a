"""Products in E4M3: how rows are rounded, three maps or gate and up in one launch, experts, and what memory is for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from quarrel.gguf import GGMLType
from quarrel.ops.contract import WeightRef, rel_error
from quarrel.ops.embedding import embedding, gather_rows
from quarrel.ops.linear import add, linear_add, norm_gate_up, norm_linear
from quarrel.ops.norm import NormSpec, norm
from quarrel.ops.null import Builder
from quarrel.ops.program import Program
from quarrel.triton_backend.backend import TritonBackend
from quarrel.triton_backend.experts import grouped
from quarrel.triton_backend.formats.e4m3 import round_rows
from quarrel.triton_backend.linear import e4m3
from quarrel.triton_backend.linear.e4m3 import NARROW, WIDE
from quarrel.triton_backend.linear.e4m3_kernels import e4m3_products
from quarrel.triton_backend.runtime.launch import INTERPRETED, launch
from tests.triton_backend.test_fuse import program as experts_program
from tests.triton_backend.test_step import LIMITS, Reference, Weights, batch

N, ROWS = 256, 40
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
LIMIT = 0.2 if INTERPRETED else 0.1
"""Of the norm of what is wanted; the interpreter halves what is rounded up to a power of two."""


def ref(name: str, rows: int, k: int = N, type: GGMLType = GGMLType.Q4_K) -> WeightRef:
    return WeightRef(name, type, rows, k)


def program(biased: bool) -> Program:
    """Three maps, gate and up behind a norm, and down."""
    b = Builder()
    h = embedding(b, b.input("ids"), ref("embd", 130, N, GGMLType.Q8_0))
    spec, gain = NormSpec("rms", N, 1e-5), ref("gain", 1, N, GGMLType.F32)

    def bias(name: str, n: int) -> WeightRef | None:
        return ref(f"{name}.bias", 1, n, GGMLType.F32) if biased else None

    widths = {"q": N, "k": 128, "v": 128}
    q, k, v = norm_linear(b, spec, h, [gain], [(ref(name, n), bias(name, n)) for name, n in widths.items()])
    h = add(b, h, q)
    h = linear_add(b, linear_add(b, h, k, ref("ok", N, 128, GGMLType.Q8_0)), v, ref("ov", N, 128, GGMLType.Q8_0), scale=0.5)
    y = norm_gate_up(
        b, spec, h, [gain], (ref("gate", 96), bias("gate", 96)), (ref("up", 96), bias("up", 96)), "silu"
    )  # fmt: skip
    h = linear_add(b, h, y, ref("down", N, 96, GGMLType.F16))
    return b.program(hidden=norm(b, NormSpec("rms", N, 1e-5, out="f32"), gather_rows(b, h, b.input("out_rows")), gain))


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(e4m3, "LEAST", 2)


def test_a_row_is_rounded_to_its_largest_value() -> None:
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((5, 100)) * 10.0 ** rng.integers(-3, 4, (5, 1))).astype(np.float32)
    x[2] = 0.0
    for block, step in ((128, 1), (32, 2)):
        codes = torch.zeros(5 * step, 100, dtype=torch.float8_e4m3fn, device=DEVICE)
        scale = torch.zeros(5 * step, device=DEVICE)
        launch(
            round_rows, (5,), codes, scale, torch.from_numpy(x).to(DEVICE), 100, step, WHOLE=block > 100, B=block,
            early=False,
        )  # fmt: skip
        got, s = codes[::step].float().cpu().numpy(), scale[::step].cpu().numpy()
        np.testing.assert_allclose(s, np.maximum(np.abs(x).max(1), 1e-12) / 448, rtol=1e-6)
        assert np.abs(got[[0, 1, 3, 4]]).max() == 448
        exact = np.abs(x / s[:, None])
        # Three bits of mantissa, down to 2^-6. The interpreter is wrong below, and loses the carry to a power of two.
        power = 2.0 ** np.floor(np.log2(np.maximum(exact, 1e-9)))
        sound = (exact >= 2.0**-6) & (exact < 1.9375 * power) | (not INTERPRETED)
        assert (np.abs(got - x / s[:, None]) <= np.maximum(power, 2.0**-6) / 8 * 0.501)[sound].all()


@pytest.mark.parametrize("kind", ["three", "gated", "added"])
def test_products_match_float32(kind: str) -> None:
    rng, k, rows = np.random.default_rng(2), 96, 21
    ns = {"three": [64, 32, 32], "gated": [2 * 24], "added": [48]}[kind]
    total, width = sum(ns), 24 if kind == "gated" else ns[0]

    def codes(count: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal((count, k)).astype(np.float32) * 30).to(torch.float8_e4m3fn).to(DEVICE)

    def floats(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to(DEVICE)

    x, w, sx, sw, bias, residual = (
        codes(rows),
        codes(total),
        floats(rows) / 1e3,
        floats(total),
        floats(total),
        floats(rows, width),
    )
    ys = [torch.full((rows, n), float("nan"), device=DEVICE) for n in (ns if kind == "three" else [width])]
    launch(
        e4m3_products, (2,), ys[0], ys[len(ys) // 2], ys[-1], TensorDescriptor.from_tensor(x, [16, 32]),
        TensorDescriptor.from_tensor(w, [32, 32]), sx, sw, bias, residual, rows, ns[0], ns[len(ns) // 2], ns[-1], 3, 0.5,
        GATED=kind == "gated", KIND="silu" if kind == "gated" else "none", BIAS=True, ADD=kind == "added",
        MAPS=len(ns), BT=16, BN=32, BK=32, early=False,
    )  # fmt: skip
    want = (x.float() * sx[:, None]) @ (w.float() * sw[:, None]).T + bias
    if kind == "gated":
        want = torch.nn.functional.silu(want[:, ::2]) * want[:, 1::2]
    want = residual + 0.5 * want if kind == "added" else want
    assert float((torch.cat(ys, 1) - want).norm() / want.norm()) < 1e-5


def test_tiles_fill_the_device() -> None:
    shapes = {"qkv": [4096, 1024, 1024], "o": [4096], "gate and up": [28672], "odd": [4096, 1000, 1000]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(e4m3, "INTERPRETED", False)
        assert [e4m3.tile_for(4096, ns, 132) for ns in shapes.values()] == [WIDE, WIDE, WIDE, NARROW]
        assert [e4m3.tile_for(512, ns, 132) for ns in shapes.values()] == [WIDE, NARROW, WIDE, NARROW]


@pytest.mark.parametrize("biased", [False, True])
def test_steps_match_the_reference(backend: TritonBackend, biased: bool) -> None:
    made = program(biased)
    step = backend.compile(made, Weights(), replace(LIMITS, decoded_bytes=1 << 30), "fp8")
    taken = [t.implementation for t in step.explain() if "linear" in t.op or "gate_up" in t.op]
    assert len(taken) == 5
    assert all("e4m3" in t for t in taken)
    inputs = batch([(0, 0, ROWS)], rows=list(range(ROWS)), seed=3)
    want = Reference(made)(inputs)["hidden"]
    for _ in range(2):  # the second finds the weights rounded
        assert 5e-3 < rel_error(step(inputs, "hidden").hidden, want) < LIMIT  # type: ignore[arg-type]
    step.close()


@pytest.mark.parametrize("kind", ["silu", "oai"])
def test_experts_match_the_reference(backend: TritonBackend, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "DECODE_FROM", 0)
    made = experts_program(kind)
    step = backend.compile(made, Weights(), replace(LIMITS, decoded_bytes=1 << 30), "fp8")
    inputs = batch([(0, 0, 21)], rows=list(range(21)), seed=3)
    error = rel_error(step(inputs, "hidden").hidden, Reference(made)(inputs)["hidden"])  # type: ignore[arg-type]
    assert 5e-3 < error < LIMIT
    step.close()


def test_weights_without_room_stay_in_16_bits(backend: TritonBackend) -> None:
    made = program(False)
    first = N * (N + 4) + 2 * 128 * (N + 4)
    limits = replace(LIMITS, decoded_bytes=first)
    step = backend.compile(made, Weights(), limits, "fp8")
    assert step.memory().decoded == first
    lines = [t for t in step.explain() if "linear" in t.op or "gate_up" in t.op]
    assert ["e4m3" in t.implementation for t in lines] == [True, False, False, False, False]
    assert all("no memory was left" in str(t.declined) for t in lines[1:])
    step.close()
    plain = backend.compile(made, Weights(), limits, "float16")
    assert not any("e4m3" in t.implementation for t in plain.explain())
    plain.close()
