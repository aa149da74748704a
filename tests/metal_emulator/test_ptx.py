"""The same Metal text compiles for NVIDIA GPUs, without a GPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from quarrel.errors import BackendUnavailable, RequestError
from tests.metal_emulator.kernels import attention, attention_call, elementwise, matvec, matvec_call
from tests.metal_emulator.test_language import COLLECTIVES, MATRIX
from tools.metal_emulator import Call, MetalCompileError, metal_kernel
from tools.metal_emulator.build import MetalSource
from tools.metal_emulator.ptx import assemble, compile_ptx, libdevice
from tools.metal_emulator.toolchain import find_toolchain


def _collectives() -> tuple[metal_kernel, Call]:
    lines = [f"y[{n} * 32 + i] = float({expression});" for n, expression in enumerate(COLLECTIVES)]
    body = "uint i = thread_position_in_grid.x, lane = thread_index_in_simdgroup;\n" + "\n".join(lines)
    x = np.arange(256, dtype=np.float32)
    return metal_kernel("collectives", ["x"], ["y"], body), Call(
        [x], [(len(lines), 32)], [np.float32], (32, 1, 1), (32, 1, 1)
    )


def _matrices() -> tuple[metal_kernel, Call]:
    x = np.random.default_rng(3).standard_normal(256).astype(np.float32)
    return metal_kernel("matrices", ["x"], ["y"], MATRIX), Call([x], [(8, 8)], [np.float32], (32, 1, 1), (32, 1, 1))


KERNELS: dict[str, Callable[[], tuple[metal_kernel, Call]]] = {
    "matvec": lambda: (matvec(), matvec_call()),
    "matvec in half": lambda: (matvec(), matvec_call(dtype=np.float16)),
    "attention": lambda: (attention(), attention_call()),
    "collectives": _collectives,
    "matrices": _matrices,
    "active lanes": lambda: elementwise("y[i] = lane < 20 ? simd_sum(x[i]) + simd_prefix_inclusive_sum(1.0f) : 0;"),
    "atomics": lambda: elementwise(
        "threadgroup atomic_uint n; if (i == 0) atomic_store_explicit(&n, 0, memory_order_relaxed);"
        "threadgroup_barrier(mem_flags::mem_threadgroup);"
        "atomic_fetch_max_explicit(&n, i, memory_order_relaxed); threadgroup_barrier(mem_flags::mem_threadgroup);"
        "y[i] = atomic_load_explicit(&n, memory_order_relaxed);"
    ),
    "mathematics": lambda: elementwise("y[i] = exp(-x[i]) * sinpi(x[i] / 7) + rsqrt(x[i] + 1) + pow(x[i], 0.3f);"),
}


def ptx_of(kernel: metal_kernel, call: Call, arch: str) -> str:
    try:
        libdevice()
    except BackendUnavailable as reason:
        pytest.skip(str(reason))
    text = kernel.text(call)
    return compile_ptx(MetalSource(kernel.name, text.with_places(), text.entry), arch, find_toolchain())


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_and_assembles(name: str, arch: str) -> None:
    ptx = ptx_of(*KERNELS[name](), arch)
    assert f".target {arch}" in ptx
    assert ".visible .entry msl_kernel_entry(" in ptx
    resources = assemble(ptx, arch)
    assert 0 < resources.registers <= 128
    assert resources.spilled_bytes == 0


def test_threadgroup_memory_is_shared_memory_and_barriers_are_barriers() -> None:
    ptx = ptx_of(attention(), attention_call(), "sm_80")
    assert assemble(ptx, "sm_80").shared_bytes == 2 * 16 + 4 * 64 * 4
    assert "barrier.sync" in ptx
    assert "shfl.sync" in ptx


def test_an_error_names_the_metal_line() -> None:
    kernel, call = elementwise("\n\ny[i] = nothing;")
    with pytest.raises(MetalCompileError, match=r"body\.metal:3: error: use of undeclared identifier 'nothing'"):
        ptx_of(kernel, call, "sm_80")


def test_an_architecture_that_is_none() -> None:
    with pytest.raises(RequestError, match="'hopper' is no GPU architecture"):
        ptx_of(*elementwise("y[i] = 1;"), "hopper")
