"""MLX programs with custom kernels run whole on Linux: MLX's ops on its CPU backend, the kernels emulated."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quarrel.errors import RequestError
from tests.metal_emulator.kernels import BLOCK_HEADER, MATVEC, quantised
from tools.metal_emulator import Call, Kind, MetalFindings, Mode, Settings, check, install, metal_kernel

mx = pytest.importorskip("mlx.core", reason="mlx is not installed")

WIDTH = 256


def layer(kernel: Any, weights: Any, h: Any) -> Any:
    normed = mx.fast.rms_norm(h, mx.ones((WIDTH,), h.dtype), 1e-5)
    (y,) = kernel(
        inputs=[weights, normed],
        template=[("T", h.dtype), ("ROWS", 2), ("GROUPS", 2)],
        grid=(WIDTH // 4 * 64, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[(WIDTH,)],
        output_dtypes=[h.dtype],
        stream=mx.gpu,
    )
    return h + y * mx.sigmoid(y)


def reference(values: Any, x: Any) -> Any:
    for _ in range(4):
        y = values @ (x / np.sqrt((x**2).mean() + 1e-5))
        x = x + y / (1 + np.exp(-y))
    return x


@pytest.mark.parametrize("mode", [Mode.FAST, Mode.CHECK])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("float16", 4e-3), ("bfloat16", 3e-2)])
def test_layers_of_mlx_and_emulated_kernels(dtype: str, tolerance: float, mode: Mode) -> None:
    raw, values = quantised(WIDTH, WIDTH)
    x = np.random.default_rng(4).standard_normal(WIDTH).astype(np.float32)
    with install(Settings(mode=mode)) as session:
        kernel = mx.fast.metal_kernel(
            name="matvec", input_names=["w", "x"], output_names=["y"], source=MATVEC, header=BLOCK_HEADER
        )
        h = mx.array(x).astype(getattr(mx, dtype))
        for _ in range(4):
            h = layer(kernel, mx.array(raw), h)
        assert h.dtype == getattr(mx, dtype)
        got = np.array(h.astype(mx.float32))
    expected = reference(values, x.astype(np.float64))
    assert np.abs(got - expected).max() < tolerance * np.abs(expected).max()
    assert [launch.name for launch in session.launches] == ["matvec"] * 4
    assert not any(launch.findings for launch in session.launches)


def test_everything_is_put_back() -> None:
    original = mx.fast.metal_kernel
    with install():
        assert mx.fast.metal_kernel is metal_kernel
    assert mx.fast.metal_kernel is original
    with contextlib.suppress(KeyError), install():
        raise KeyError
    assert mx.fast.metal_kernel is original
    calls: list[int] = []

    def counted(x: Any) -> Any:
        calls.append(1)
        return x + 1

    compiled = mx.compile(counted)
    mx.eval(compiled(mx.array(1.0)), compiled(mx.array(2.0)))
    assert len(calls) == 1


def kernel_and_call(**options: Any) -> tuple[metal_kernel, Call]:
    body = "uint i = thread_position_in_grid.x; y[i] = x[i * x_strides[0]];"
    kernel = metal_kernel("strided", ["x"], ["y"], body, **options)
    return kernel, Call([mx.arange(64).astype(mx.float32)], [(8,)], [mx.float32], (8, 1, 1), (8, 1, 1))


def test_strided_inputs_keep_their_strides_if_asked() -> None:
    column = mx.arange(64).astype(mx.float32).reshape(8, 8)[:, 3]
    for contiguous in (True, False):
        kernel, call = kernel_and_call(ensure_row_contiguous=contiguous)
        result = check(kernel, replace(call, inputs=[column]))
        assert not result.findings
        assert np.array(result.outputs[0]).tolist() == list(range(3, 64, 8))
    # A contiguous input would have been long enough for this.
    kernel, call = kernel_and_call(ensure_row_contiguous=False)
    broken = metal_kernel("strided", ["x"], ["y"], kernel.source.replace("i *", "(i + 1) *"), ensure_row_contiguous=False)
    assert {f.kind for f in check(broken, replace(call, inputs=[column])).findings} == {Kind.OUT_OF_BOUNDS}


def test_a_call_under_a_transformation_is_refused() -> None:
    kernel, call = kernel_and_call()

    def traced(x: Any) -> Any:
        return kernel.launch(replace(call, inputs=[x]), Settings()).outputs[0]

    with pytest.raises(RequestError, match=r"mx\.compile"):
        mx.eval(mx.compile(traced)(call.inputs[0]))


def test_findings_are_raised_or_kept() -> None:
    body = "y[thread_position_in_grid.x + 1] = x[0];"
    x = mx.zeros((8,))
    arguments = {"output_shapes": [(8,)], "output_dtypes": [mx.float32], "grid": (8, 1, 1), "threadgroup": (8, 1, 1)}
    with install(Settings(mode=Mode.CHECK)):
        kernel = mx.fast.metal_kernel("late", ["x"], ["y"], body)
        with pytest.raises(MetalFindings, match=r"late\.metal:1: out of bounds: write of 4 bytes at offset 32"):
            kernel(inputs=[x], **arguments)
    with install(Settings(mode=Mode.CHECK, raise_on_findings=False)) as session:
        kernel(inputs=[x], **arguments)
    assert [f.kind for f in session.launches[0].findings] == [Kind.OUT_OF_BOUNDS]


def test_threads_launch_one_after_another() -> None:
    kernel, call = kernel_and_call()
    kernel.launch(call, Settings())
    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda: results.append(kernel.launch(call, Settings(workers=2)).findings)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [()] * 4
