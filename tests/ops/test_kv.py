"""What a cache of 16-bit values or 8-bit codes keeps: the nearest there is, NaN where something was not finite."""

from __future__ import annotations

import numpy as np
import pytest

from quarrel.ops.attention import KV_APPEND, KVAppendSpec
from quarrel.ops.compare import errors
from quarrel.ops.contract import Case, KVArrays
from quarrel.ops.kv import KV_TYPES, KVType, decode, encode, head_bytes, step_of, stored
from quarrel.ops.reference import run_op

RNG = np.random.default_rng(4)
ROWS = (RNG.standard_normal((40, 3, 72)) * np.exp(RNG.uniform(-9, 6, (40, 3, 1)))).astype(np.float32)


def every_code(type: KVType) -> np.ndarray:
    """The finite values of E4M3 or E5M2, by their definitions."""
    bits, bias, count = (3, 7, 127) if type == "fp8" else (2, 15, 124)
    codes = np.arange(count)
    exponent, mantissa = codes >> bits, codes & ((1 << bits) - 1)
    up = np.where(exponent == 0, mantissa, (1 << bits) + mantissa) * 2.0 ** (np.maximum(exponent, 1) - bias - bits)
    return np.concatenate([up, -up]).astype(np.float32)


@pytest.mark.parametrize("type", ["int8", "fp8", "fp8_e5m2"])
def test_each_value_is_the_nearest_of_its_row(type: KVType) -> None:
    values = np.arange(-127, 128) if type == "int8" else every_code(type)
    top = values.max()
    got = stored(ROWS, type)
    scale = np.abs(ROWS).max(-1, keepdims=True) / top
    nearest = np.abs(ROWS[..., None] - (scale * values)[..., None, :]).min(-1)
    assert (np.abs(got - ROWS) <= nearest + 1e-6 * np.abs(ROWS).max(-1, keepdims=True)).all()
    codes, scales = encode(ROWS, type)
    assert codes.dtype == np.uint8
    assert np.array_equal(decode(codes, scales, type), got)
    again = encode(got, type)
    assert np.array_equal(again[0], codes)


def test_a_tie_goes_to_the_even_code() -> None:
    assert stored(np.array([127.0, 0.5, 1.5, -2.5], np.float32), "int8").tolist() == [127.0, 0.0, 2.0, -2.0]
    assert stored(np.array([448.0, 17.0, 19.0, 2.0**-10], np.float32), "fp8").tolist() == [448.0, 16.0, 20.0, 0.0]
    assert stored(np.array([57344.0, 9.0, 11.0, 2.0**-17], np.float32), "fp8_e5m2").tolist() == [57344.0, 8.0, 12.0, 0.0]


def test_e5m2_keeps_what_is_far_below_the_largest() -> None:
    row = np.array([57344.0, 2.0**-16, 3 * 2.0**-16], np.float32)
    assert np.array_equal(stored(row, "fp8_e5m2"), row)
    assert stored(row, "fp8").tolist() == [57344.0, 0.0, 0.0]


@pytest.mark.parametrize("type", [t for t in KV_TYPES if t != "auto"])
def test_what_is_not_finite_shows_and_small_rows_are_zeros(type: KVType) -> None:
    rows = np.array([[1.0, np.nan, 2.0], [0.0, 0.0, 0.0], [1e-35, -1e-36, 0.0]], np.float32)
    got = stored(rows, type)
    assert np.isnan(got[0, 1])
    assert (type in ("float16", "bfloat16")) != np.isnan(got[0]).all()
    assert not got[1].any()
    assert np.abs(got[2]).max() <= 1.01e-35


@pytest.mark.parametrize("type", ["int8", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize("scale", [1.0, 1.9, 3.3e-5, 1.1e7])
def test_steps_reach_from_each_code_to_the_next(type: KVType, scale: float) -> None:
    values = np.arange(128) if type == "int8" else np.split(every_code(type), 2)[0]
    row = (values * np.float32(scale)).astype(np.float32)
    step = step_of(row, type)
    np.testing.assert_allclose(step[:-1], np.diff(row), rtol=2e-5 if type == "int8" else 1e-5)
    assert np.array_equal(step_of(-row, type), step)


def test_a_wrong_code_is_no_rounding() -> None:
    """One step off is forgiven, two are not; nor is a scale that is off."""
    case = Case(KVAppendSpec(2, 64), {"T": 9, "block_size": 16, "C": 2, "kv": KV_TYPES.index("int8")})
    inputs = KV_APPEND.make(case, np.random.default_rng(1))  # type: ignore[misc]
    (want,) = run_op(KV_APPEND, case.spec, inputs)
    assert isinstance(want, KVArrays)
    step = step_of(want.k, "int8")

    def off(change: np.ndarray) -> float:
        return max(errors(KV_APPEND, case.spec, [KVArrays(change, want.v, "int8")], [want], case).values())

    assert off(want.k + step * (RNG.random(step.shape) < 0.5)) == 0.0
    assert off(want.k + 2 * step) > 1e-2
    assert off(want.k * np.float32(1.1)) > 1e-2


def test_bytes_of_a_head() -> None:
    assert [head_bytes(t, 128, 4) for t in KV_TYPES] == [512, 256, 256, 132, 132, 132]
