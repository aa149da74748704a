"""Correct kernels: right numbers in every type, and not one finding, whatever the schedule."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.metal_emulator.kernels import (
    attention,
    attention_call,
    elementwise,
    matvec,
    matvec_call,
    quantised,
    with_keys,
)
from tools.metal_emulator import BFloat16Array, Call, Mode, Settings, bfloat16, check

SEEDS = (0, 1, 2, 3, 7, 12345)


@pytest.mark.parametrize("rows", [1, 4, 11, 33])
def test_matvec(rows: int) -> None:
    call = matvec_call(rows)
    result = check(matvec(), call, seeds=SEEDS)
    assert not result.findings
    reference = quantised(rows, 256)[1] @ call.inputs[1].astype(np.float64)
    np.testing.assert_allclose(result.outputs[0], reference, rtol=0, atol=2e-6 * np.abs(reference).max())
    fast = matvec().launch(call, Settings())
    assert np.array_equal(fast.outputs[0], result.outputs[0])


@pytest.mark.parametrize(("groups", "keys"), [(1, 50), (4, 50), (8, 3)])
def test_attention(groups: int, keys: int) -> None:
    call = with_keys(attention_call(groups=groups), keys)
    result = check(attention(), call, seeds=SEEDS)
    assert not result.findings
    q, k, v, scale, _ = (np.asarray(a, np.float64) for a in call.inputs)
    k, v = np.repeat(k[:, :keys], 2, 0), np.repeat(v[:, :keys], 2, 0)
    weights = np.exp(np.einsum("hd,htd->ht", q, k) * scale)
    reference = np.einsum("ht,htd->hd", weights / weights.sum(1, keepdims=True), v)
    np.testing.assert_allclose(result.outputs[0], reference, rtol=0, atol=1e-3)
    assert result.statistics.barriers == 4
    assert result.statistics.threadgroup_bytes == 2 * max(16, 4 * groups) + groups * 64 * 4


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float16, 1e-3), (bfloat16, 8e-3)])
def test_matvec_in_short_types(dtype: object, tolerance: float) -> None:
    call = matvec_call()
    weights, x = call.inputs
    given = BFloat16Array.of(x) if dtype is bfloat16 else x.astype(dtype)
    template = (("T", dtype), *call.template[1:])
    result = check(matvec(), Call([weights, given], call.output_shapes, [dtype], call.grid, call.threadgroup, template))
    assert not result.findings
    (y,) = result.outputs
    reference = quantised(11, 256)[1] @ (given.float32() if isinstance(given, BFloat16Array) else given)
    error = np.abs((y.float32() if isinstance(y, BFloat16Array) else y) - reference).max()
    assert error < tolerance * np.abs(reference).max()


def test_atomics() -> None:
    kernel, call = elementwise(
        "atomic_fetch_add_explicit(&y[0], x[i % 256], memory_order_relaxed);",
        threads=512,
        atomic_outputs=True,
        init_value=0,
    )
    result = check(kernel, replace(call, output_shapes=[(1,)]), seeds=SEEDS)
    assert not result.findings
    assert result.outputs[0][0] == 2 * np.arange(256).sum()


@pytest.mark.parametrize("type_name", ["int", "uint", "float"])
def test_atomics_in_threadgroup_memory(type_name: str) -> None:
    body = f"""
      threadgroup atomic_{type_name} total;
      if (i == 0) atomic_store_explicit(&total, 0, memory_order_relaxed);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      atomic_fetch_add_explicit(&total, {type_name}(i), memory_order_relaxed);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      y[i] = float(atomic_load_explicit(&total, memory_order_relaxed));"""
    kernel, call = elementwise(body)
    result = check(kernel, call, seeds=SEEDS)
    assert not result.findings
    assert (result.outputs[0] == sum(range(64))).all()


def test_a_simdgroup_barrier_joins_the_lanes_of_a_simdgroup() -> None:
    body = "threadgroup float t[64]; t[i] = x[i]; simdgroup_barrier(mem_flags::mem_threadgroup); y[i] = t[i ^ 1];"
    kernel, call = elementwise(body)
    assert not check(kernel, call).findings


def test_a_helper_for_threadgroup_memory() -> None:
    header = "METAL_FUNC float first(const threadgroup float* p) { return p[0]; }\n"
    kernel, call = elementwise("threadgroup float t[4]; t[0] = x[0]; y[i] = first(t);", 1, 1, header)
    result = check(kernel, call)
    assert not result.findings
    assert result.outputs[0][0] == 0


def test_device_memory_handed_on_within_a_threadgroup() -> None:
    body = "y[i] = x[i]; threadgroup_barrier(mem_flags::mem_device); float v = y[i ^ 33];\n"
    body += "threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup); y[i] = v;"
    kernel, call = elementwise(body)
    result = check(kernel, call, seeds=SEEDS)
    assert not result.findings
    assert result.outputs[0].tolist() == [i ^ 33 for i in range(64)]


def test_several_workers_give_the_same() -> None:
    call = matvec_call(rows=257)
    one, four = (matvec().launch(call, Settings(mode=Mode.FAST, workers=n)).outputs[0] for n in (1, 4))
    assert np.array_equal(one, four)
