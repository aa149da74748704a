"""Metal text and C++ text have the same lines; what C++ cannot say is said otherwise, and nothing else is touched."""

from __future__ import annotations

import pytest

from quarrel.errors import RequestError
from tests.metal_emulator.kernels import elementwise
from tools.metal_emulator import Kind, check, typecheck
from tools.metal_emulator.rewrite import foreign, rewrite
from tools.metal_emulator.tokens import join, tokenise


def test_tokens_keep_every_line() -> None:
    text = "a /* x\ny */ b // c\n#define M(x) \\\n  x[[1]]\nfloat f = 1.5e-3h; t[a[1]]; \"// no\"; '\\''"
    tokens = tokenise(text)
    assert join(tokens).count("\n") == text.count("\n")
    assert "x" not in join(tokens).split("\n")[0]
    assert [t.text for t in tokens if t.kind == "number"][-2:] == ["1.5e-3h", "1"]
    assert '"// no"' in join(tokens)


@pytest.mark.parametrize(
    ("metal", "cpp"),
    [
        ("x = 1.5h + 2bf + 0x1h;", "x = (half(1.5f)) + (bfloat(2)) + 0x1h;"),
        ("vec<T, 4>(1, 2)", "msl_make_vec<T, 4>(1, 2)"),
        ("vec<T, 4> v = metal::vec<bool,2> (x);", "vec<T, 4> v = metal::msl_make_vec<bool,2> (x);"),
        ("constant bool a [[function_constant(3)]];", "constant bool a = true;"),
        ("const constant bool b = a && true;", "const constant bool b = a && true;"),
        ("{threadgroup float t[2][N + 1];}", "{MSL_THREADGROUP_VARIABLE(1, t, float [2][N + 1]);  }"),
        ("{threadgroup T a, b[3];}", "{MSL_THREADGROUP_VARIABLE(1, a, T); MSL_THREADGROUP_VARIABLE(2, b, T [3]);  }"),
        ("threadgroup float* p = t;", "threadgroup float* p = t;"),
        ("void f(threadgroup float* p [[threadgroup(0)]]);", "void f(threadgroup float* p );"),
        ("void f(const threadgroup T& x);", "void f(const threadgroup T& x);"),
    ],
)
def test_rewriting(metal: str, cpp: str) -> None:
    assert rewrite(metal, {"a": True}).text == cpp


def test_a_function_constant_without_a_value() -> None:
    with pytest.raises(RequestError, match="constant a has no value"):
        rewrite("constant bool a [[function_constant(3)]];")


@pytest.mark.parametrize(
    ("metal", "cpp"),
    [
        ("for (;;) x();", "MSL_LOOP for (;;) MSL_ROUND  x();"),
        ("while (a) { b(); }", "MSL_LOOP while (a) MSL_ROUND  { b(); }"),
        ("do { b(); } while (a);", "MSL_LOOP do { b(); } while (msl_rounds.next() && (a));"),
        ("do b(); while (a);", "MSL_LOOP do b(); while (msl_rounds.next() && (a));"),
        ("constexpr int f(int n) { for (;;) n++; }", "constexpr int f(int n) { for (;;) n++; }"),
        ("constexpr int n = 3; while (a) ;", "constexpr int n = 3; MSL_LOOP while (a) MSL_ROUND  ;"),
        ("\n#pragma unroll\nfor (;;) x();", "\n\nMSL_LOOP for (;;) MSL_ROUND  x();"),
        ('_Pragma("clang loop unroll(full)") for (;;) x();', " MSL_LOOP for (;;) MSL_ROUND  x();"),
        ("#define L for (;;) \\\n  x();", "#define L MSL_LOOP for (;;) MSL_ROUND  \\\n  x();"),
    ],
)
def test_loops_count_their_rounds(metal: str, cpp: str) -> None:
    assert rewrite(metal, count_rounds=True).text == cpp


KERNELS = """[[kernel]] void plain(
    device float* a [[buffer(0)]], constant int& n [[ buffer(2) ]],
    uint3 at [[thread_position_in_grid]]) {}
template <typename T, int N>
[[kernel, max_total_threads_per_threadgroup(64)]] void typed(
    device T* a, const device T* b, uint i [[thread_index_in_simdgroup]]) {}
template [[host_name("typed_half")]] [[kernel]]
decltype(typed<half, 3>) typed<half, 3>;
kernel void old(texture t [[texture(0)]], device float* o [[buffer(1), function_constant(has_o)]]) {}
"""


def test_kernels_and_their_parameters() -> None:
    rewritten = rewrite(KERNELS)
    attributes = {name: [p.attribute for p in parameters] for name, parameters in rewritten.kernels.items()}
    assert attributes == {
        "plain": ["buffer(0)", "buffer(2)", "thread_position_in_grid"],
        "typed": ["buffer(0)", "buffer(1)", "thread_index_in_simdgroup"],
        "old": ["texture(0)", "buffer(1)"],
    }
    assert rewritten.instances == {"typed_half": "typed<half, 3>"}
    assert "[[" not in rewritten.text
    assert rewritten.text.count("\n") == KERNELS.count("\n")


def test_loops_of_every_shape_still_compute_the_same() -> None:
    body = """
      float s = 0;
      for (int a = 0; a < 3; a++) for (int b = 0; b < 2; b++) if (b) s += 1; else s += 10;
      int n = 0;
      if (lane > 40) for (;;) break; else n = 1;
      do { n++; if (n == 3) continue; s += 100; } while (n < 5);
      while (n-- > 2) s += 1000;
      do s += 1e4; while (s < 3e4);
      y[i] = s;"""
    kernel, call = elementwise(body)
    result = check(kernel, call)
    assert not result.findings
    assert (result.outputs[0] == 33 + 300 + 3000 + 3e4).all()


def test_words_that_are_not_metal() -> None:
    text = '#line 7 "k.metal"\nint a; // std::max\nx = std::max(a, b);\nauto p = new int;\nint café;\n'
    assert [(file, line) for file, line, _ in foreign(text)] == [("k.metal", 8), ("k.metal", 9), ("k.metal", 10)]


def test_typecheck_of_a_text() -> None:
    source = (
        "using namespace metal;\nkernel void k(device float* x [[buffer(0)]]) {\n  threadgroup float t[4];\n  {line}\n}\n"
    )
    assert typecheck(source.replace("{line}", "x[0] = t[1] + float(bfloat16_t(1));")) == []
    (finding,) = typecheck(source.replace("{line}", "device float* p = t;"))
    assert (finding.kind, finding.where) == (Kind.TYPE, "kernel.metal:4")
    assert finding.message.startswith(
        "cannot initialize a variable of type 'device float *' with an lvalue of type 'threadgroup"
    )
