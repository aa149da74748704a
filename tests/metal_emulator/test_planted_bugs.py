"""Every planted bug is reported with its kind, at a line of the Metal source that says the given words."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.metal_emulator.kernels import (
    ATTENTION,
    BLOCK_HEADER,
    MATVEC,
    attention,
    attention_call,
    elementwise,
    matvec,
    matvec_call,
    with_keys,
)
from tools.metal_emulator import BFloat16Array, Call, Finding, Kind, bfloat16, check, metal_kernel

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
PAST_THE_END = "(&parts[0][0])[group * D + lane * E + i + 1]"
TOTAL = "float total = simd_sum(sums[r]);"


@dataclass(frozen=True)
class Bug:
    """`old` becomes `new` in a correct kernel; a finding of kind `kind` must stand at a line that holds `at`."""

    name: str
    kind: Kind
    at: str
    old: str
    new: str


ATTENTION_BUGS = [
    Bug("barrier removed", Kind.RACE, "tops[g]", BARRIER, ""),
    Bug("barrier for no memory", Kind.WEAK_BARRIER, "tops[g]", "mem_flags::mem_threadgroup", "mem_flags::mem_none"),
    Bug("barrier for other memory", Kind.WEAK_BARRIER, "tops[g]", "mem_flags::mem_threadgroup", "mem_flags::mem_device"),
    Bug("barrier for one simdgroup only", Kind.WEAK_BARRIER, "tops[g]", "threadgroup_barrier(", "simdgroup_barrier("),
    Bug("threadgroup variable never written", Kind.UNINITIALISED, "sums[g]", "sums[group] = sum;", ""),
    Bug("index one past the end", Kind.UNDEFINED, "i + 1]", "parts[group][lane * E + i]", "parts[group][lane * E + i + 1]"),
    Bug("pointer one past the end", Kind.OUT_OF_BOUNDS, "&parts", "parts[group][lane * E + i]", PAST_THE_END),
    Bug("barrier for half of the simdgroups", Kind.MISSED_BARRIER, "group < 2", BARRIER, f"if (group < 2) {BARRIER}"),
    Bug("return before the barrier", Kind.MISSED_BARRIER, "return;", BARRIER, f"if (group == 3) return; {BARRIER}"),
    Bug("a barrier in each branch", Kind.DIVERGENT_BARRIER, BARRIER, BARRIER, f"if (group < 2) {BARRIER}\nelse {BARRIER}"),
    Bug("simd_sum for some lanes", Kind.DIVERGENT_SIMD, "lane < 20", "score = simd", "if (lane < 20) score = simd"),
    Bug("simd_sum in a loop shorter for some", Kind.DIVERGENT_SIMD, "simd_sum", "t < keys;", "t < keys - int(lane > 7);"),
    Bug("too much threadgroup memory", Kind.THREADGROUP_MEMORY, "10240", "tops[GROUPS]", "tops[10240]"),
    Bug("two threadgroups write one element", Kind.RACE, "out[j]", "out[head * D + j]", "out[j]"),
]
WEIGHTS = "float4 weights"
WIDE_LOAD = "float4(*(const device char4*)((const device char*)block + 2 + part))"
MATVEC_BUGS = [
    Bug("wrong block stride", Kind.OUT_OF_BOUNDS, "block->", "blocks * 34) + b", "blocks * 36) + b"),
    Bug("a wide load from two bytes off", Kind.MISALIGNED, "char4", "four_weights(block->quants + part)", WIDE_LOAD),
    Bug("every lane writes the result", Kind.RACE, "y[first + r]", "lane == 0 && first + r < rows", "first + r < rows"),
    Bug("an output read before a write", Kind.UNINITIALISED, "y[first", "static_cast<T>(total)", "T(total) + y[first + r]"),
    Bug("a shuffle from no lane", Kind.ABSENT_LANE, "simd_shuffle", TOTAL, f"{TOTAL} total += simd_shuffle(total, 40);"),
    Bug("double", Kind.DOES_NOT_COMPILE, "double", WEIGHTS, f"double unused = 1; {WEIGHTS}"),
    Bug("max of a float and an int", Kind.DOES_NOT_COMPILE, "max(", "simd_sum(sums[r])", "max(simd_sum(sums[r]), 0)"),
    Bug("a write to an input", Kind.WRITE_TO_INPUT, "float*)x", TOTAL, f"{TOTAL} ((device float*)x)[lane] = total;"),
    Bug("simd_sum of 64 bits", Kind.DOES_NOT_COMPILE, "simd_sum", "simd_sum(sums[r])", "float(simd_sum(long(sums[r])))"),
    Bug("the C++ library", Kind.NOT_METAL, "std::max", TOTAL, f"{TOTAL} total = std::max(total, total);"),
    Bug("a shift by the width", Kind.UNDEFINED, "1 <<", WEIGHTS, f"int bit = 1 << (int(lane) + 8); {WEIGHTS}"),
    Bug("a private array past its end", Kind.UNDEFINED, "sums[r + ", "(sums[r])", "(sums[r + int(x[0] * 0) + 1])"),
    Bug("an integer divided by zero", Kind.UNDEFINED, "7 / b", WEIGHTS, f"int unused = 7 / b; {WEIGHTS}"),
    Bug("a float that no int holds", Kind.UNDEFINED, "1e20", WEIGHTS, f"int unused = int(x[0] * 0 + 1e20); {WEIGHTS}"),
]

DEVICE_HELPER = "METAL_FUNC float first(const device float* p) { return p[0]; }\n"
BARE_HELPER = "METAL_FUNC float first(const float* p) { return p[0]; }\n"
ADDRESS_SPACE_BUGS = {
    "a helper with a bare pointer": (BARE_HELPER, "y[i] = first(x);", "first(x)"),
    "a device pointer in a threadgroup pointer": ("", "threadgroup float t[4];\nthreadgroup float* p = x;", "p = x"),
    "a bare pointer to device memory": ("", "const float* p = x; y[i] = p[0];", "p = x"),
    "a device helper on threadgroup memory": (DEVICE_HELPER, "threadgroup float t[4];\ny[i] = first(t);", "first(t)"),
    "a cast to device memory": ("", "threadgroup float t[4];\ny[i] = *(device float*)t;", "(device float*)t"),
    "a product of 32 bits": ("", "int row = int(x[0]) * x_shape[0];\ny[row] = 0.0f;", "* x_shape[0]"),
    "an address of 32 bits": ("", "uint row = uint(x[0]);\nrow *= 8192;\ny[row] = 0.0f;", "row *= 8192"),
}


def assert_reported(findings: tuple[Finding, ...], kernel: metal_kernel, kind: Kind, at: str) -> None:
    texts = {f"{kernel.name}.metal": kernel.source.split("\n"), f"{kernel.name}.header": kernel.header.split("\n")}
    said = "\n".join(map(str, findings)) or "nothing"
    for finding in findings:
        places = [finding.where, *finding.calls]
        lines = [texts[file][int(line) - 1] for file, line in (p.split(":") for p in places if ":" in p) if file in texts]
        if finding.kind is kind and any(at in line for line in lines):
            assert finding.message
            return
    pytest.fail(f"no finding of kind {kind.value} at a line with {at!r}; reported:\n{said}")


def planted(text: str, bug: Bug) -> str:
    assert bug.old in text, f"the kernel has no {bug.old!r} to spoil"
    return text.replace(bug.old, bug.new)


@pytest.mark.parametrize("bug", ATTENTION_BUGS, ids=lambda bug: bug.name)
def test_bug_in_attention(bug: Bug) -> None:
    kernel = attention(planted(ATTENTION, bug))
    assert_reported(check(kernel, attention_call()).findings, kernel, bug.kind, bug.at)


@pytest.mark.parametrize("bug", MATVEC_BUGS, ids=lambda bug: bug.name)
def test_bug_in_matvec(bug: Bug) -> None:
    kernel = matvec(planted(MATVEC, bug))
    assert_reported(check(kernel, matvec_call()).findings, kernel, bug.kind, bug.at)


@pytest.mark.parametrize("name", ADDRESS_SPACE_BUGS)
def test_bug_in_address_spaces(name: str) -> None:
    header, body, at = ADDRESS_SPACE_BUGS[name]
    kernel, call = elementwise(body, threads=1, threadgroup=1, header=header)
    assert_reported(kernel.typecheck(call), kernel, Kind.TYPE, at)


def test_guards_of_the_ragged_end_dropped() -> None:
    source = MATVEC.replace("if (first >= rows) return;", "").replace("if (first + r >= rows) break;", "")
    kernel = matvec(source.replace("lane == 0 && first + r < rows", "lane == 0"))
    assert_reported(check(kernel, matvec_call()).findings, kernel, Kind.OUT_OF_BOUNDS, "block->")


def test_cache_shorter_than_its_length() -> None:
    kernel = attention()
    findings = check(kernel, with_keys(attention_call(), keys=131)).findings
    assert_reported(findings, kernel, Kind.OUT_OF_BOUNDS, "k[at + i]")


def test_float_stored_as_bfloat_without_a_cast() -> None:
    kernel = matvec(MATVEC.replace("static_cast<T>(total)", "total"))
    call = matvec_call()
    weights, x = call.inputs
    template = (("T", bfloat16), *call.template[1:])
    call = Call([weights, BFloat16Array.of(x)], call.output_shapes, [bfloat16], call.grid, call.threadgroup, template)
    assert_reported(check(kernel, call).findings, kernel, Kind.DOES_NOT_COMPILE, "= total")


def test_plain_access_beside_an_atomic_one() -> None:
    kernel, call = elementwise(
        "if (lane == 0) atomic_fetch_add_explicit(&y[0], 1.0f, memory_order_relaxed);\n"
        "else if (((device float*)y)[0] > 1e9) atomic_store_explicit(&y[1], 1.0f, memory_order_relaxed);",
        atomic_outputs=True,
        init_value=0,
    )
    assert_reported(check(kernel, call).findings, kernel, Kind.RACE, "(device float*)y")


def test_a_pointer_past_a_private_array() -> None:
    header = "METAL_FUNC float at(thread float* p, uint i) { return p[i]; }\n"
    kernel, call = elementwise("float own[4] = {1, 2, 3, 4};\ny[i] = at(own, i);", header=header)
    assert_reported(check(kernel, call).findings, kernel, Kind.UNDEFINED, "p[i]")


def test_a_static_assert_of_the_block_layout() -> None:
    kernel = matvec(header=BLOCK_HEADER.replace("half scale;", "float scale;"))
    assert_reported(check(kernel, matvec_call()).findings, kernel, Kind.DOES_NOT_COMPILE, "static_assert")
