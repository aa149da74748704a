"""Threads by registers, as Apple's GPUs have them."""

from __future__ import annotations

import numpy as np
import pytest

from quarrel.errors import BackendUnavailable
from tools.metal_emulator import Call, Kind, MetalFindings, Mode, Settings, metal_kernel
from tools.metal_emulator.ptx import libdevice
from tools.metal_emulator.registers import ALWAYS, threads_for

# 80 values that are all alive at once.
WIDE = metal_kernel(
    "wide",
    ["x"],
    ["y"],
    """
  const uint i = thread_position_in_grid.x;
  float v[80], sum = 0.0f;
  _Pragma("clang loop unroll(full)") for (int j = 0; j < 80; j++) v[j] = x[i + j * 1024];
  threadgroup_barrier(mem_flags::mem_device);
  _Pragma("clang loop unroll(full)") for (int j = 0; j < 80; j++) sum = sum * x[j] + v[79 - j];
  y[i] = sum;
""",
)


def run(threads: int) -> None:
    x = np.zeros(81 * 1024, np.float32)
    call = Call([x], [(1024,)], [np.float32], (1024, 1, 1), (threads, 1, 1))
    found = WIDE.launch(call, Settings(mode=Mode.TYPECHECK)).findings
    if found:
        raise MetalFindings("wide", found)


def test_more_registers_leave_fewer_threads() -> None:
    assert [threads_for(n) for n in (20, 52, 53, 104, 128, 200)] == [1024, 1024, 896, 512, ALWAYS, ALWAYS]


def test_a_threadgroup_that_finds_no_room_is_reported() -> None:
    try:
        libdevice()
    except BackendUnavailable as reason:
        pytest.skip(str(reason))
    run(256)
    with pytest.raises(MetalFindings, match="1024 threads that take about .* an M1 may run 384") as caught:
        run(1024)
    assert caught.value.findings[0].kind is Kind.REGISTERS
