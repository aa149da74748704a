"""Which lanes an operation joins: sums over the active lanes, and a finding whenever lanes that are alive miss it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from tests.metal_emulator.kernels import elementwise
from tools.metal_emulator import Kind, Mode, Settings, check

LOOSE = Settings(strict=False)
PLAIN_HELPER = "float total(float v) { return simd_sum(v); }\n"
INLINED_HELPER = "METAL_FUNC float total(float v) { return simd_sum(v); }\n"
OUTER_HELPER = PLAIN_HELPER + "float outer(float v) { return total(v); }\n"


def run(body: str, mode: Mode, header: str = "", threads: int = 32, threadgroup: int = 64) -> npt.NDArray[np.float32]:
    kernel, call = elementwise(body, threads, threadgroup, header)
    launch = kernel.launch(call, replace(LOOSE, mode=mode))
    assert not launch.findings
    return launch.outputs[0]  # type: ignore[no-any-return]


def kinds(body: str, header: str = "", threads: int = 64) -> set[Kind]:
    kernel, call = elementwise(body, threads, 64, header)
    return {finding.kind for finding in check(kernel, call).findings}


@pytest.mark.parametrize("mode", [Mode.FAST, Mode.CHECK])
@pytest.mark.parametrize(
    ("header", "body"),
    [
        ("", "if (lane < 8) y[i] = simd_sum(1.0f); else y[i] = simd_sum(1.0f);"),
        ("", "y[i] = lane < 8 ? simd_sum(1.0f) : simd_sum(1.0f);"),
        (PLAIN_HELPER, "if (lane < 8) y[i] = total(1.0f);\nelse y[i] = total(1.0f);"),
        (INLINED_HELPER, "if (lane < 8) y[i] = total(1.0f);\nelse y[i] = total(1.0f);"),
        (OUTER_HELPER, "if (lane < 8) y[i] = outer(1.0f); else y[i] = outer(1.0f);"),
        ("", "float s; switch (lane / 8) { case 0: s = simd_sum(1.0f); break; default: s = simd_sum(1.0f); } y[i] = s;"),
    ],
    ids=["if", "conditional", "helper", "inlined helper", "helper of a helper", "switch"],
)
def test_the_same_call_in_two_branches_stays_two_calls(mode: Mode, header: str, body: str) -> None:
    assert run(body, mode, header).tolist() == [8] * 8 + [24] * 24
    assert Kind.DIVERGENT_SIMD in kinds(body, header)


ROUNDS = "for (uint r = 0; r < 3; r++) { if (r == 1 && lane < 8) continue; s += simd_sum(1.0f); }"
SKIPPED = {
    "for": ROUNDS,
    "for without braces": "for (uint r = 0; r < 3; r++) if (r != 1 || lane >= 8) s += simd_sum(1.0f);",
    "while": "uint r = 0; while (r < 3) { r++; if (r == 2 && lane < 8) continue; s += simd_sum(1.0f); }",
    "do": "uint r = 0; do { r++; if (r == 2 && lane < 8) continue; s += simd_sum(1.0f); } while (r < 3);",
    "unrolled": "\n#pragma unroll\n" + ROUNDS,
    "nested": "for (uint o = 0; o < 1; o++) { " + ROUNDS + " }",
}


@pytest.mark.parametrize("loop", SKIPPED)
def test_lanes_that_skip_a_round_do_not_meet_the_next_one(loop: str) -> None:
    body = f"float s = 0; {SKIPPED[loop]} y[i] = s;"
    assert run(body, Mode.CHECK).tolist() == [64] * 8 + [88] * 24
    assert Kind.DIVERGENT_SIMD in kinds(body)


def test_a_skipped_round_is_reported_even_if_the_lane_then_returns() -> None:
    assert Kind.DIVERGENT_SIMD in kinds("y[i] = 0; for (uint r = 0; r < 2; r++) if (r || lane < 8) y[i] += simd_sum(1.0f);")


@pytest.mark.parametrize("mode", [Mode.FAST, Mode.CHECK])
def test_a_loop_is_left_by_some_lanes_earlier(mode: Mode) -> None:
    body = "float s = 0; for (uint r = 0; r < lane % 3 + 1; r++) s += simd_sum(1.0f); y[i] = s + 100 * simd_sum(1.0f);"
    rounds = [32, 32 + 21, 32 + 21 + 10]
    assert run(body, mode).tolist() == [rounds[lane % 3] + 3200 for lane in range(32)]


def test_lanes_that_have_returned_are_not_missed() -> None:
    body = "if (lane >= 20) return; y[i] = simd_sum(1.0f);"
    assert run(body, Mode.FAST)[:20].tolist() == [20] * 20
    assert not kinds(body)


def test_a_branch_that_a_simdgroup_takes_as_one_is_no_divergence() -> None:
    assert not kinds(
        "float s; if (simdgroup_index_in_threadgroup == 0) s = simd_sum(1.0f); else s = simd_sum(2.0f); y[i] = s;"
    )


@pytest.mark.parametrize(("threads", "last"), [(50, 18), (100, 4)])
def test_ragged_grids_have_smaller_simdgroups(threads: int, last: int) -> None:
    body = "y[i] = simd_sum(1.0f) + 1000 * threads_per_threadgroup.x;"
    y = run(body, Mode.FAST, threads=threads)
    assert y[0] == 32 + 1000 * min(threads, 64)
    assert y[-1] == last + 1000 * (threads if threads < 64 else threads - 64)
    assert not kinds(body, threads=threads)


def test_a_barrier_in_different_rounds_is_divergent() -> None:
    body = """
    y[i] = 0;
    for (uint r = 0; r < 3; r++) {
      if (r == 1 && simdgroup_index_in_threadgroup == 0) continue;
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }"""
    assert Kind.DIVERGENT_BARRIER in kinds(body)


def test_a_simdgroup_operation_while_others_wait_at_a_barrier() -> None:
    body = "if (lane < 8) threadgroup_barrier(mem_flags::mem_none); y[i] = simd_sum(1.0f);"
    assert Kind.DIVERGENT_SIMD in kinds(body)


def test_private_rounds_before_an_operation_are_no_divergence() -> None:
    assert not kinds("float s = 0; for (uint r = 0; r < lane; r++) s += 1; while (s > 40) s -= 1; y[i] = simd_sum(s);")
