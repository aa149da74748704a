"""Vector functions against float64, over their whole range, with and without float16 instructions."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from quarrel.cpu_backend.attention.rope import sin_cos
from quarrel.cpu_backend.runtime import features, jit, vector
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import F32, I16, I32, Kernel, Val, vec

LEVELS = {level.float16: level for level in features.levels()}
Run = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


def apply(
    name: str, f: Callable[[Kernel, Val], Val], x: np.ndarray, out: type = np.float32, level: Level | None = None
) -> np.ndarray:
    """f over an array, sixteen at a time."""
    source = vec(F32 if x.dtype == np.float32 else I16, 16)
    step = x.itemsize

    def emit(k: Kernel) -> None:
        at, to, n = k.params
        with k.range(0, n, 16) as i:
            y = f(k, k.load(at + i * step, source))
            k.store(y, to + i * np.dtype(out).itemsize)
        k.finish()

    y = np.zeros(len(x), out)
    Run(jit.address(f"test/{name}", emit, level or features.level()))(x.ctypes.data, y.ctypes.data, len(x))
    return y


def ulps(got: np.ndarray, want: np.ndarray) -> float:
    return float((np.abs(got.astype(np.float64) - want) / np.spacing(np.abs(want).astype(np.float32))).max())


def test_exp_is_within_two_ulps() -> None:
    x = np.linspace(-87, 88, 1 << 20, dtype=np.float32)
    assert ulps(apply("exp", vector.exp, x), np.exp(x.astype(np.float64))) < 2


def test_exp_of_extremes() -> None:
    x = np.array([-np.inf, -1e30, -100, 0, 1e30, np.inf, 88.3, -87.2] * 2, np.float32)
    y = apply("exp", vector.exp, x)
    assert (y[:3] == 0).all()
    assert y[3] == 1
    assert np.isfinite(y).all()


above = np.vectorize(lambda x: math.erfc(abs(x) / math.sqrt(2)) / 2)


@pytest.mark.parametrize(
    ("name", "f", "truth", "tolerance"),
    [
        ("tanh", vector.tanh, np.tanh, 5e-7),
        ("sigmoid", vector.sigmoid, lambda x: 1 / (1 + np.exp(-x)), 3e-7),
        ("softplus", vector.softplus, lambda x: np.logaddexp(0, x), 3e-7),
        ("normal_tail", lambda k, x: vector.normal_tail(k, k.fabs(x)), above, 1e-6),
    ],
)
def test_functions(
    name: str, f: Callable[[Kernel, Val], Val], truth: Callable[[np.ndarray], np.ndarray], tolerance: float
) -> None:
    x = np.concatenate([np.linspace(-30, 30, 65520), np.geomspace(1e-6, 1, 16)]).astype(np.float32)
    want = truth(x.astype(np.float64))
    # The rounding of x^2 / 2, of which a tail is the exponential.
    allowed = tolerance * np.maximum(1.0, x.astype(np.float64) ** 2 / 16) if name == "normal_tail" else tolerance
    assert (np.abs(apply(name, f, x) - want) <= allowed * np.maximum(np.abs(want), 1e-30)).all()
    assert np.isnan(apply(name, f, np.full(16, np.nan, np.float32))).all()


@pytest.mark.parametrize("float16", sorted(LEVELS))
def test_every_float16_number_becomes_itself(float16: bool) -> None:
    bits = np.arange(65536, dtype=np.uint16)
    got = apply(f"to_f32/{float16}", partial(_widen, LEVELS[float16]), bits.view(np.int16), level=LEVELS[float16])
    want = bits.view(np.float16).astype(np.float32)
    assert np.array_equal(got, want, equal_nan=True)


def _widen(level: Level, k: Kernel, x: Val) -> Val:
    return vector.f16_to_f32(k, level, x)


def _narrow(level: Level, k: Kernel, x: Val) -> Val:
    return vector.f32_to_f16(k, level, x)


@pytest.mark.parametrize("float16", sorted(LEVELS))
def test_rounding_to_float16(float16: bool) -> None:
    rng = np.random.default_rng(0)
    every = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    finite = np.sort(every[np.isfinite(every)])
    between = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)
    drawn = (rng.standard_normal(4096) * 10.0 ** rng.integers(-8, 6, 4096)).astype(np.float32)
    x = np.concatenate([finite, between, drawn, np.array([np.inf, -np.inf, 65519.9, 65520.0], np.float32)])
    x = np.resize(x, len(x) // 16 * 16 + 16)
    got = apply(f"f32_to_f16/{float16}", partial(_narrow, LEVELS[float16]), x, np.uint16, LEVELS[float16])
    with np.errstate(over="ignore"):
        want = x.astype(np.float16)
    assert np.array_equal(got.view(np.float16), want)


def test_sine_and_cosine_of_large_angles() -> None:
    x = np.concatenate([np.linspace(0, 10, 4096), np.linspace(0, 2.0**20, 61440)]).astype(np.float32)
    for i, truth in enumerate((np.sin, np.cos)):
        got = apply(f"sin_cos/{i}", lambda k, v, i=i: sin_cos(k, v)[i], x)
        assert np.abs(got - truth(x.astype(np.float64))).max() < 1e-7


def test_sums_fold_and_transpose() -> None:
    x = np.arange(16, dtype=np.float32)
    assert apply("sum", lambda k, v: k.splat(vector.sum_lanes(v), 16), x)[0] == 120
    assert apply("max", lambda k, v: k.splat(vector.max_lanes(k, v), 16), x)[0] == 15
    rows = np.arange(256, dtype=np.float32)

    def emit(k: Kernel) -> None:
        at, to, _ = k.params
        for i, column in enumerate(vector.transpose16([k.load(at, vec(F32, 16), 64 * r) for r in range(16)])):
            k.store(column, to, 64 * i)
        k.finish()

    out = np.zeros(256, np.float32)
    Run(jit.address("test/transpose", emit, features.level()))(rows.ctypes.data, out.ctypes.data, 0)
    assert np.array_equal(out.reshape(16, 16), rows.reshape(16, 16).T)


@pytest.mark.parametrize("level", features.levels(), ids=lambda level: level.name)
@pytest.mark.parametrize("lanes", [8, 16])
@pytest.mark.parametrize("largest", [16383, 16384, 32767, 32768])
def test_sums_fold_at_their_extremes(level: Level, lanes: int, largest: int) -> None:
    rng = np.random.default_rng(0)
    rows = rng.choice([-largest, largest, 1 - largest, 3], (4, lanes)).astype(np.int32)
    rows[:, :4] = largest

    def emit(k: Kernel) -> None:
        at, to, _ = k.params
        vectors = [k.load(at, vec(I32, lanes), 4 * lanes * r) for r in range(4)]
        k.store(vector.fold4(k, level, vectors, largest), to)
        k.finish()

    out = np.zeros(lanes, np.int32)
    Run(jit.address(f"test/fold/{lanes}/{largest}", emit, level))(rows.ctypes.data, out.ctypes.data, 0)
    assert np.array_equal(out.reshape(-1, 4), rows.reshape(4, -1, 4).sum(-1).T)  # [128 bits, vector]


@pytest.mark.parametrize("level", features.levels(), ids=lambda level: level.name)
@pytest.mark.parametrize("largest", [3, 15, 24, 31, 63, 240, 255])
def test_sums_of_byte_products_are_exact_at_their_extremes(level: Level, largest: int) -> None:
    steps = 9
    bias = vector.code_bias(level, largest > 127)

    def emit(k: Kernel) -> None:
        codes, x, out = k.params
        total = vector.ByteSum(k, level, k.lift(7, vector.I32x16), largest)
        for step in range(steps):
            total.add(*(k.load(at, vector.I8x64, 64 * step) for at in (codes, x)))
        k.store(total.total(), out)
        if level.dot != "plain":  # which has no shorter way
            k.store(vector.dot8(k, level, *(k.load(at, vector.I8x64) for at in (codes, x)), largest), out, 64)
        k.finish()

    rng = np.random.default_rng(largest)
    run = Run(jit.address(f"test/bytes{largest}", emit, level))
    for code, active in ((largest, 127), (largest, -127), (0, 127), (0, -127), (None, None)):
        codes, x = rng.integers(0, largest + 1, (steps, 16, 4)), rng.integers(-127, 128, (steps, 16, 4))
        if code is not None:
            codes[:], x[:] = code, active
        got, w, q = np.zeros(24, np.int32), codes.astype(np.uint8), x.astype(np.int8)
        run(w.ctypes.data, q.ctypes.data, got.ctypes.data)
        products = ((codes - bias) * x).sum(-1)
        assert np.array_equal(got[:16], 7 + products.sum(0))
        if level.dot != "plain":
            assert np.array_equal(got[16:], products[0, :8] + products[0, 8:])
