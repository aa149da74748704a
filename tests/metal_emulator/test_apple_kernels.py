"""Kernels that run on every Mac with MLX: here they give the right numbers and no finding, and lose a barrier badly."""

from __future__ import annotations

import pytest

from quarrel.errors import BackendUnavailable
from tools.metal_emulator import Kind, Mode, Settings
from tools.metal_emulator.mlx_headers import kernel_text, mlx_include

if mlx_include() is None:
    pytest.skip("mlx with its Metal headers is not installed", allow_module_level=True)
pytest.importorskip("mlx.core", reason="mlx is not installed")

from tests.metal_emulator.apple import QUANTIZED, AppleCase, all_cases, quantized_matmul
from tools.metal_emulator.ptx import assemble, compile_ptx, libdevice
from tools.metal_emulator.toolchain import find_toolchain

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


@pytest.mark.parametrize("mode", [Mode.FAST, Mode.CHECK])
@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_right_and_without_findings(case: AppleCase, mode: Mode) -> None:
    out, findings, statistics = case.run(Settings(mode=mode))
    assert not findings
    assert case.error(out) < case.tolerance
    assert statistics.partial_simd_operations == 0


@pytest.mark.parametrize("seed", [1, 2, 7])
def test_the_schedule_makes_no_difference(seed: int) -> None:
    case = quantized_matmul("float", 40)
    plain, _, _ = case.run(Settings())
    other, findings, _ = case.run(Settings(seed=seed))
    assert not findings
    assert (plain == other).all()


# Those of whole and of ragged tiles; the others belong to outputs that are no multiple of a tile wide.
@pytest.mark.parametrize("number", [2, 3, 6, 7])
def test_every_barrier_of_the_matmul_is_needed(number: int) -> None:
    text = kernel_text(*QUANTIZED)
    at = text.index("qmm_t_impl(")
    for _ in range(number + 1):
        at = text.index(BARRIER, at + 1)
    without = text[:at] + text[at + len(BARRIER) :]
    _, findings, _ = quantized_matmul("float", 40).run(Settings(mode=Mode.CHECK), without)
    assert {f.kind for f in findings} & {Kind.RACE, Kind.UNINITIALISED, Kind.WEAK_BARRIER}
    assert all(f.file.endswith(".h") and f.line > 0 for f in findings)
    assert any("quantized.h" in place for f in findings for place in (f.where, *f.calls))


@pytest.mark.parametrize("case", [all_cases()[i] for i in (0, 2, 8, 10, 12)], ids=lambda case: case.name)
def test_compiles_for_an_nvidia_gpu(case: AppleCase) -> None:
    try:
        libdevice()
    except BackendUnavailable as reason:
        pytest.skip(str(reason))
    resources = assemble(compile_ptx(case.source(), "sm_90", find_toolchain()), "sm_90")
    assert 0 < resources.registers <= 128
    assert resources.spilled_bytes == 0
