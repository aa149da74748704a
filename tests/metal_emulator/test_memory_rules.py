"""What orders two accesses, and what does not; and that no counter of the checker wraps around."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.metal_emulator.kernels import elementwise
from tools.metal_emulator import Finding, Kind, Mode, Settings, ThreadId, check

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


def findings(body: str, threads: int = 64, threadgroup: int = 64, seed: int = 0) -> tuple[Finding, ...]:
    kernel, call = elementwise(body, threads, threadgroup)
    return kernel.launch(call, Settings(mode=Mode.CHECK, seed=seed)).findings


def kinds(body: str, threads: int = 64, threadgroup: int = 64, seed: int = 0) -> set[Kind]:
    return {finding.kind for finding in findings(body, threads, threadgroup, seed)}


def test_a_simdgroup_barrier_joins_no_other_simdgroup() -> None:
    body = "threadgroup float t[64]; t[i] = x[i]; simdgroup_barrier(mem_flags::mem_threadgroup); y[i] = t[i ^ 32];"
    assert Kind.WEAK_BARRIER in kinds(body)


def test_lanes_of_one_simdgroup_race_too() -> None:
    assert kinds("threadgroup float t[64]; t[i] = x[i]; y[i] = t[i ^ 1];", threads=32) >= {Kind.RACE}


def test_a_simdgroup_operation_orders_no_memory() -> None:
    body = "threadgroup float t[64]; t[i] = x[i]; float s = simd_sum(1.0f); y[i] = t[i ^ 1] + s;"
    assert kinds(body, threads=32) == {Kind.RACE}


def test_no_barrier_joins_two_threadgroups() -> None:
    body = "y[i] = x[i]; threadgroup_barrier(mem_flags::mem_device); if (i >= 64) y[i] = y[i - 64];"
    found = findings(body, threads=128)
    assert {f.kind for f in found} == {Kind.RACE}
    assert found[0].threads == (ThreadId((1, 0, 0), 0), ThreadId((0, 0, 0), 0))


def test_atomics_order_no_other_memory() -> None:
    body = """
      threadgroup atomic_uint flag; threadgroup float data;
      if (i == 0) atomic_store_explicit(&flag, 0u, memory_order_relaxed);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (i == 0) { data = 1; atomic_store_explicit(&flag, 1u, memory_order_relaxed); }
      y[i] = atomic_load_explicit(&flag, memory_order_relaxed) ? data : 1;"""
    assert kinds(body) == {Kind.RACE}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("writer", [0, 31, 40, 95])
def test_a_write_after_readers_of_every_simdgroup(writer: int, seed: int) -> None:
    body = f"""threadgroup float t[1];
      if (i == 0) t[0] = 1;
      {BARRIER}
      y[i] = t[0];
      simdgroup_barrier(mem_flags::mem_threadgroup);
      if (i == {writer}) t[0] = 2;"""
    assert kinds(body, 96, 96, seed) & {Kind.RACE, Kind.WEAK_BARRIER}
    assert not kinds(body.replace("simdgroup_barrier", "threadgroup_barrier"), 96, 96, seed)


@pytest.mark.parametrize("racing", [False, True])
def test_more_barriers_than_sixteen_bits_count(racing: bool) -> None:
    rounds = (1 << 16) + 3
    body = f"""threadgroup float t[64];
      t[i] = x[i];
      for (int r = 0; r < {rounds}; r++) {BARRIER}
      y[i] = t[i ^ 32];
      {"" if racing else BARRIER}
      t[i] = 0;"""
    assert kinds(body) == ({Kind.RACE} if racing else set())


def test_a_barrier_count_that_repeats_in_sixteen_bits_hides_no_race() -> None:
    body = f"""threadgroup float t[64];
      for (int r = 0; r < {(1 << 16) - 1}; r++) {BARRIER}
      t[i] = x[i];
      threadgroup_barrier(mem_flags::mem_none);
      y[i] = t[i ^ 32];"""
    assert kinds(body) == {Kind.WEAK_BARRIER}


def test_more_threadgroups_than_the_checker_counts_are_refused() -> None:
    kernel, call = elementwise("y[0] = 1;", threads=1, threadgroup=1)
    (finding,) = kernel.launch(replace(call, grid=(1 << 29, 1, 1)), Settings(mode=Mode.CHECK)).findings
    assert finding.kind is Kind.EMULATOR_LIMIT
    assert "threadgroups" in finding.message


def test_outputs_that_depend_on_the_schedule() -> None:
    kernel, call = elementwise(
        "y[i] = atomic_fetch_add_explicit((device atomic_uint*)&y[64], 1u, memory_order_relaxed);", init_value=0
    )
    call = replace(call, output_shapes=[(65,)])
    assert [f.kind for f in check(kernel, call).findings] == [Kind.ORDER]
    assert not check(kernel, call, deterministic=False).findings


def test_variables_without_a_value_are_not_zero() -> None:
    kernel, call = elementwise("float v; if (x[0] > 1) v = 1; y[i] = v;")
    launch = kernel.launch(call, Settings(mode=Mode.CHECK))
    assert (launch.outputs[0] != launch.outputs[0]).all()


def test_outputs_never_written_are_nan() -> None:
    kernel, call = elementwise("if (i % 2) y[i] = 1;")
    out = check(kernel, call).outputs[0]
    assert (out[1::2] == 1).all()
    assert (out[::2] != out[::2]).all()


def test_a_finding_counts_and_names_its_threads() -> None:
    (finding,) = findings("\nif (i > 60) y[i + 64] = 1;")
    assert (finding.count, finding.file, finding.line) == (3, "body.metal", 2)
    assert finding.threads == (ThreadId((0, 0, 0), 61),)
    assert str(finding) == (
        "body.metal:2: out of bounds: write of 4 bytes at offset 500 of device 'y' of 256 bytes, "
        "by thread 61 (simdgroup 1 lane 29) of threadgroup (0, 0, 0) (3 times)"
    )


def test_a_finding_in_a_helper_names_its_callers() -> None:
    header = "METAL_FUNC float get(const device float* p, uint i) {\n  return p[i];\n}\n"
    kernel, call = elementwise("\ny[i] = get(x, i)\n + get(x, i + 250);", header=header)
    (finding,) = kernel.launch(call, Settings(mode=Mode.CHECK)).findings
    assert finding.where == "body.header:2"
    assert finding.calls == ("body.metal:3",)
