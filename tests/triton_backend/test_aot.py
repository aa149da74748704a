"""Every kernel compiles for GPUs that are not here, spills nothing and fits their shared memory.

The default run compiles every fourth variant of the largest kernels, for one generation where two differ in nothing but
their name; QUARREL_TEST_ALL=1 compiles everything.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.forked import Forked
from tests.triton_backend.cases import EVERYTHING
from tests.triton_compiler import MAIN, compiler

pytestmark = pytest.mark.timeout(900)
"""Half a minute of both cores where nothing else runs, and many where much does."""


@pytest.fixture(scope="module", name="process")
def _process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forked]:
    with compiler(tmp_path_factory.mktemp("aot")) as process:
        yield process


def compiled(process: Forked, *arguments: str) -> dict[str, object]:
    done = process.run(MAIN, *arguments)
    assert done.stdout, done.stderr[-2000:]
    report: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    assert report["faults"] == []
    assert done.returncode == 0, done.stderr[-2000:]
    return report


@pytest.mark.skipif(EVERYTHING, reason="the whole table is compiled instead")
@pytest.mark.parametrize(
    ("targets", "formats", "computes", "kernels", "least"),
    [
        ("sm_90", "Q4_K,Q6_K,F16", "float16", "batch_tiles", 5),
        ("sm_120", "Q4_K,MXFP4", "float16", "grouped_tiles", 2),
        ("sm_120", "Q3_K,F32", "float32", "linear_tiles", 3),
        ("sm_90", "F16", "float16", "attend", 4),
        ("sm_80", "F16", "float32", "draw", 1),
        ("sm_90", "Q4_K", "float16", "matvec", 2),
        ("sm_90", "Q8_0", "float16", "warpgroup_three", 1),
        ("sm_90", "Q4_K", "float16", "ring", 4),
        ("sm_90", "Q8_0", "float16", "head_norms", 1),
        ("sm_90", "Q8_0", "float16", "rope_rows", 1),
        ("sm_90", "Q8_0", "float16", "gated_conv", 1),
        ("sm_90", "Q4_K", "float16", "gated_matvec", 1),
        ("sm_90", "Q8_0", "float16", "norm_matvec", 1),
    ],
    ids=[
        "linear sm_90",
        "experts",
        "linear float32",
        "attention",
        "sample",
        "matvec",
        "warpgroups",
        "ring",
        "norms of heads",
        "rotation",
        "gates",
        "own gate",
        "own norm",
    ],
)
def test_kernels_compile_without_spills(
    process: Forked, targets: str, formats: str, computes: str, kernels: str, least: int
) -> None:
    report = compiled(
        process, "--targets", targets, "--formats", formats, "--computes", computes, "--kernels", kernels,
        "--quick", "--each", "4",
    )  # fmt: skip
    assert report["compiled"] >= least  # type: ignore[operator]


@pytest.mark.parametrize(("kernels", "least"), [("route_one", 5), ("with_shared", 6)], ids=["router", "shared expert"])
def test_experts_of_one_row_compile_without_spills(process: Forked, kernels: str, least: int) -> None:
    """With a gate of the shared expert, and without."""
    report = compiled(
        process, "--targets", "sm_90", "--formats", "Q4_K", "--computes", "float16", "--kernels", kernels, "--quick"
    )
    assert report["compiled"] >= least  # type: ignore[operator]


@pytest.mark.parametrize(
    ("kernels", "each"),
    [("attend_latent_one", "1"), ("attend_latent_head", "1"), ("head_tiles", "10"), ("head_rows", "1")],
)
def test_decode_over_compressed_keys_compiles_without_spills(process: Forked, kernels: str, each: str) -> None:
    report = compiled(
        process, "--targets", "sm_90", "--formats", "Q4_K", "--computes", "float16", "--kernels", kernels, "--quick",
        "--each", "1" if EVERYTHING else each,
    )  # fmt: skip
    assert report["compiled"] >= 2  # type: ignore[operator]


@pytest.mark.parametrize("kv", ["auto", "int8", "fp8"] if EVERYTHING else ["fp8"])
def test_the_ring_of_attention_compiles_without_spills(process: Forked, kv: str) -> None:
    report = compiled(
        process, "--targets", "sm_90", "--formats", "F16", "--computes", "float16", "--kernels", "attend_ring",
        "--kv-cache", kv, "--quick", "--each", "1" if EVERYTHING else "3",
    )  # fmt: skip
    assert report["compiled"] >= 1  # type: ignore[operator]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not EVERYTHING, reason="QUARREL_TEST_ALL is not set")
def test_every_kernel_compiles_for_every_target_without_spills(process: Forked) -> None:
    assert compiled(process)["compiled"] > 300  # type: ignore[operator]


def test_the_gate_fails_on_a_spill_and_on_too_much_shared_memory(process: Forked) -> None:
    done = process.run(
        "def fault(**k): return a.Report(**dict(dict(kernel='k', compute='float16', label='', target='sm_120', registers=1,"
        " stack=0, spills=0, shared=0, wide_loads=0, matrix_ops=0, seconds=0.0), **k)).fault()\n"
        "print([fault(), fault(stack=16, spills=4), bool(fault(stack=24)), bool(fault(shared=102000)),"
        " fault(shared=102000, target='sm_90')])"
    )
    assert done.stdout.strip() == "[None, None, True, True, None]", done.stderr
