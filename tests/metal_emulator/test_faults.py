"""Whatever a kernel does to memory, signals or time, the process lives on and says where it happened."""

from __future__ import annotations

import signal
import time
from dataclasses import replace

import numpy as np
import pytest

from tests.metal_emulator.kernels import elementwise
from tools.metal_emulator import Finding, Kind, Mode, Settings

BOTH = pytest.mark.parametrize("mode", [Mode.FAST, Mode.CHECK])


def findings(body: str, mode: Mode, timeout_s: float = 60.0) -> tuple[Finding, ...]:
    kernel, call = elementwise(body)
    settings = Settings(mode=mode, workers=1, timeout_s=timeout_s)
    return kernel.launch(call, settings).findings


@BOTH
@pytest.mark.parametrize("index", ["64", "1 << 20", "-70000"])
@pytest.mark.parametrize("write", [True, False], ids=["write", "read"])
def test_accesses_outside_a_buffer(mode: Mode, index: str, write: bool) -> None:
    body = f"int one = 1;\ny[int(i) + one * ({index})] = 1;" if write else f"\ny[i] = y[int(i) + (x[0] == 0) * ({index})];"
    found = [f for f in findings(body, mode) if f.kind is Kind.OUT_OF_BOUNDS]
    assert [f.where for f in found] == ["body.metal:2"]
    assert "'y' of 256 bytes" in found[0].message


@BOTH
@pytest.mark.parametrize("index", ["1l << 40", "-(1l << 40)", "1l << 61"])
@pytest.mark.parametrize("write", [True, False], ids=["write", "read"])
def test_accesses_far_from_every_buffer(mode: Mode, index: str, write: bool) -> None:
    body = f"\ny[i + ({index})] = 1;" if write else f"\ny[i] = y[i + (x[0] == 0) * ({index})];"
    found = [f for f in findings(body, mode) if f.kind in (Kind.OUT_OF_BOUNDS, Kind.FAULT)]
    assert [f.where for f in found] == ["body.metal:2"]
    assert "far" in found[0].message


def test_the_rest_of_the_grid_goes_on_after_a_fault() -> None:
    kernel, call = elementwise("y[i == 5 ? 1l << 30 : i] = 1;")
    launch = kernel.launch(call, Settings(workers=1))
    assert len(launch.findings) == 1
    assert np.flatnonzero(launch.outputs[0] != 1).tolist() == [5]
    assert launch.findings[0].threads[0].index == 5


def test_a_small_write_before_a_buffer_is_seen_afterwards() -> None:
    found = findings("y[i] = 1; if (i == 0) y[-1] = 1;", Mode.FAST)
    assert [f.kind for f in found] == [Kind.OUT_OF_BOUNDS]
    assert "offset -4" in found[0].message


@BOTH
def test_integer_division_by_zero(mode: Mode) -> None:
    found = findings("int zero = int(x[0]);\ny[i] = 7 / zero;", mode)
    assert {f.kind for f in found} <= {Kind.FAULT, Kind.UNDEFINED}
    assert "division by zero" in found[0].message
    assert found[0].where == "body.metal:2"


@BOTH
def test_stack_overflow(mode: Mode) -> None:
    found = findings("float big[60000];\nfor (int j = 0; j < 60000; j++) big[j] = x[i] + j;\ny[i] = big[i * 900];", mode)
    assert found
    assert "stack overflow" in found[0].message


@BOTH
@pytest.mark.parametrize(
    "body",
    ["volatile int stop = 0; while (!stop) {} y[i] = 1;", "while (simd_sum(1.0f) > 0) {} y[i] = 1;"],
    ids=["spinning", "waiting for each other"],
)
def test_endless_loops_end(mode: Mode, body: str) -> None:
    start = time.monotonic()
    found = findings(body, mode, timeout_s=0.3)
    assert Kind.TIMEOUT in {f.kind for f in found}
    assert next(f for f in found if f.kind is Kind.TIMEOUT).file == "body.metal"
    assert time.monotonic() - start < 30


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(s) for s in (signal.SIGSEGV, signal.SIGFPE, signal.SIGURG)]
    calls: list[int] = []
    old = signal.signal(signal.SIGURG, lambda number, frame: calls.append(number))
    try:
        findings("y[1l << 40] = 1;", Mode.FAST)
        signal.raise_signal(signal.SIGURG)
        assert calls == [signal.SIGURG]
    finally:
        signal.signal(signal.SIGURG, old)
    assert [signal.getsignal(s) for s in (signal.SIGSEGV, signal.SIGFPE, signal.SIGURG)] == before


def test_alignment_of_a_slice_shows_what_a_wide_load_assumes() -> None:
    kernel, call = elementwise("y[i] = ((const device float2*)x)[i % 8].x;")
    call = replace(call, inputs=[np.zeros(67, np.float32)])
    assert {f.kind for f in kernel.launch(call, Settings(mode=Mode.CHECK, alignment=4)).findings} == {Kind.MISALIGNED}
    assert not kernel.launch(call, Settings(mode=Mode.CHECK, alignment=16)).findings


def test_subnormals_are_flushed_as_on_apple_gpus() -> None:
    kernel, call = elementwise("y[i] = (x[i] + 1) * 1e-20 * 1e-20;")
    assert not kernel.launch(call, Settings()).outputs[0].any()
    assert kernel.launch(call, Settings(flush_subnormals=False)).outputs[0].all()
