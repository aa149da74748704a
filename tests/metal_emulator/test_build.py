"""Compilers, the cache, and refusals of calls that no kernel could run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quarrel.errors import BackendUnavailable, RequestError
from tests.metal_emulator.kernels import BLOCK_HEADER, MATVEC, attention, attention_call, elementwise, matvec, matvec_call
from tests.metal_emulator.test_divergence import PLAIN_HELPER
from tools.metal_emulator import (
    BFloat16Array,
    Call,
    Kind,
    MetalCompileError,
    Mode,
    Settings,
    available,
    build,
    check,
    kernel,
    metal_kernel,
    toolchain,
)
from tools.metal_emulator.cache import cached, content_key
from tools.metal_emulator.describe import RawFinding
from tools.metal_emulator.toolchain import CompilerError, find_toolchain, run_tool, system_toolchain


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "quarrel" / "metal_emulator"


def test_everything_is_built_once(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[str] = []

    def counted(command: Any) -> str:
        commands.append(str(command[-1]))
        return run_tool(command)

    monkeypatch.setattr(build, "run_tool", counted)
    monkeypatch.setattr(toolchain, "run_tool", counted)
    for expected in (True, False):
        body, call = elementwise("y[i] = 2 * x[i];")
        assert body.launch(call, Settings(mode=Mode.CHECK)).outputs[0][3] == 6
        assert bool(commands) is expected
        commands.clear()
    names = sorted(path.name for path in empty_cache.iterdir())
    assert [name.split("_")[0] for name in names] == ["body", "body", "names", "names", "runtime"]


def test_another_text_is_another_object(empty_cache: Path) -> None:
    for factor in (2, 3):
        body, call = elementwise(f"y[i] = {factor} * x[i];")
        assert body.launch(call, Settings()).outputs[0][3] == 3 * factor
    assert len(list(empty_cache.glob("body_fast_*.so"))) == 2


def test_a_failed_build_leaves_nothing(empty_cache: Path) -> None:
    def fails(path: Path) -> None:
        path.write_text("half")
        raise KeyError

    with pytest.raises(KeyError):
        cached("x", fails)
    assert list(empty_cache.iterdir()) == []


def test_keys_tell_parts_apart() -> None:
    assert content_key(["ab", "c"]) != content_key(["a", "bc"])


@pytest.fixture
def clang(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's clang++ in the place of the wheel's."""
    system = system_toolchain()
    if system is None:
        pytest.skip("no clang++ on this machine")
    monkeypatch.setattr(kernel, "find_toolchain", lambda: system)


@pytest.mark.usefixtures("clang")
def test_a_clang_of_the_system_does_as_well() -> None:
    assert not check(attention(), attention_call()).findings
    racing = attention(attention().source.replace("threadgroup_barrier", "simdgroup_barrier"))
    assert Kind.WEAK_BARRIER in {f.kind for f in check(racing, attention_call()).findings}
    body, call = elementwise("if (lane < 8) y[i] = total(1.0f);\nelse y[i] = total(1.0f);", header=PLAIN_HELPER)
    assert Kind.DIVERGENT_SIMD in {f.kind for f in check(body, call).findings}


def test_the_wheel_comes_first_and_nothing_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available() is None
    monkeypatch.setattr(toolchain, "zig_toolchain", lambda: None)
    monkeypatch.setattr(toolchain, "system_toolchain", lambda: None)
    with pytest.raises(BackendUnavailable, match="pip install ziglang"):
        find_toolchain()
    assert "needs clang" in (available() or "")


def test_without_mlx_its_names_are_there_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "mlx_include", lambda: None)
    source = MATVEC.replace("float total = ", "bfloat16_t b = exp(bfloat16_t(0.0f)); float total = (float(b) - 1) + ")
    call = matvec_call()
    weights, x = call.inputs
    given = replace(call, inputs=[weights, BFloat16Array.of(x).float32()])
    result = check(metal_kernel("matvec", ["w", "x"], ["y"], source, BLOCK_HEADER), given)
    assert not result.findings
    assert np.array_equal(result.outputs[0], matvec().launch(given, Settings()).outputs[0])


def test_compile_errors_name_the_lines_of_body_and_header() -> None:
    body, call = elementwise("\ny[i] = nothing;", header="float f() {\n  return other;\n}\n")
    with pytest.raises(MetalCompileError) as raised:
        body.launch(call, Settings())
    assert raised.value.diagnostics == (
        "body.header:2: error: use of undeclared identifier 'other'",
        "body.metal:2: error: use of undeclared identifier 'nothing'",
    )


def test_a_tool_that_fails_says_why() -> None:
    with pytest.raises(CompilerError, match="no such file or directory"):
        run_tool([*find_toolchain().kernel_compiler, "-c", "absent.cpp", "-o", "absent.o"])


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"inputs": []}, "0 inputs for 1 names"),
    ({"output_shapes": []}, "0 output_shapes for 1 names"),
    ({"output_dtypes": [np.float32, np.float32]}, "2 output_dtypes for 1 names"),
    ({"output_dtypes": [np.float64]}, "no type for float64"),
    ({"inputs": [np.zeros(4, np.complex64)]}, "no type for complex64"),
    ({"inputs": [np.zeros(16, np.float32)[::-1]]}, "backwards"),
    ({"grid": (0, 1, 1)}, "grid is"),
    ({"threadgroup": (64, 1)}, "threadgroup is"),
    ({"grid": (2048, 1, 1), "threadgroup": (2048, 1, 1)}, "2048 threads is over the 1024"),
]


@pytest.mark.parametrize(("change", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_refused_calls(change: dict[str, Any], reason: str) -> None:
    body, call = elementwise("y[i] = x[i];")
    body.ensure_row_contiguous = False
    with pytest.raises(RequestError, match=reason):
        body.launch(replace(call, **change), Settings())


def test_refused_settings_and_kernels() -> None:
    for wrong in ({"seed": -1}, {"alignment": 3}, {"workers": -1}, {"timeout_s": 0.0}):
        with pytest.raises(RequestError):
            Settings(**wrong)
    with pytest.raises(RequestError, match="no source"):
        metal_kernel("empty", [], ["y"], "")
    with pytest.raises(RequestError, match="math_mode"):
        metal_kernel("mode", [], ["y"], "y[0] = 1;", compile_options={"math_mode": "wild"})


def test_typecheck_mode_executes_nothing() -> None:
    body, call = elementwise("device float* p = y; p[i] = 1;\nthreadgroup float* q = y;")
    launch = body.launch(call, Settings(mode=Mode.TYPECHECK))
    assert [(f.kind, f.line) for f in launch.findings] == [(Kind.TYPE, 2)]
    assert np.isnan(launch.outputs[0]).all()


HEADERS_ALONE = "#include <metal_stdlib>\n#include <mlx_names.h>\n"


@pytest.mark.parametrize("define", ["-DMSL_EXECUTED", "-DMSL_AS"])
def test_headers_compile_without_warnings(define: str, tmp_path: Path) -> None:
    (tmp_path / "headers.cpp").write_text(HEADERS_ALONE)
    strict = ("-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", define)
    run_tool([*find_toolchain().kernel_compiler, *strict, *build.header_flags(False), tmp_path / "headers.cpp"])


def test_kinds_have_the_order_of_the_runtime() -> None:
    api = (Path(build.__file__).parent / "runtime" / "api.h").read_text()
    names = [line.split(",")[0].strip() for line in api.split("enum msl_kind")[1].split("}")[0].splitlines()[1:]]
    assert [f"MSL_{kind.name}" for kind in list(Kind)[: len([n for n in names if n])]] == [n for n in names if n]
    assert RawFinding.offset.size == 8


def test_verbose_prints_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    body, call = elementwise("y[i] = x[i];", threads=8, threadgroup=8)
    arguments = {name: getattr(call, name) for name in call.__dataclass_fields__}
    body(**arguments, verbose=True)
    assert "[[kernel]] void custom_kernel_body_float_float(" in capsys.readouterr().out


def test_more_buffers_than_metal_has_are_refused() -> None:
    names = [f"x{i}" for i in range(31)]
    kernel = metal_kernel("wide", names, ["y"], "y[0] = x0[0] + x30[0];")
    x = np.zeros(8, np.float32)
    call = Call([x] * 31, [(1,)], [np.float32], (1, 1, 1), (1, 1, 1))
    with pytest.raises(RequestError, match=r"32 buffers .* are over the 31 that Metal allows"):
        kernel.launch(call, Settings(mode=Mode.FAST))
