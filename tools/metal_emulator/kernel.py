"""`mx.fast.metal_kernel` on a CPU: the same arguments, numpy or MLX arrays in, the same kind out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quarrel.errors import RequestError
from tools.metal_emulator.arrays import KernelArray, empty_output, kernel_array, to_caller
from tools.metal_emulator.build import MetalSource, build_kernel
from tools.metal_emulator.errors import MetalFindings
from tools.metal_emulator.findings import Finding
from tools.metal_emulator.launcher import BoundBuffer, LoadedKernel, Statistics, load_kernel
from tools.metal_emulator.registers import too_many_threads
from tools.metal_emulator.session import Launch, current_session
from tools.metal_emulator.settings import Mode, Settings
from tools.metal_emulator.signature import KernelText, TemplateArgument, shape_parameters, write_kernel
from tools.metal_emulator.toolchain import find_toolchain
from tools.metal_emulator.typecheck import typecheck_source

_MAX_THREADS = 1024  # maxTotalThreadsPerThreadgroup of every Apple GPU since M1, registers permitting
_MAX_BUFFERS = 31  # [[buffer(n)]] ends at 30
_MATH_MODES = ("safe", "relaxed", "fast")

Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Call:
    """The arguments of one call: as mx.fast.metal_kernel's kernels take them. `grid` counts threads."""

    inputs: Sequence[Any]
    output_shapes: Sequence[Sequence[int]]
    output_dtypes: Sequence[Any]
    grid: Triple
    threadgroup: Triple
    template: Sequence[TemplateArgument] = ()
    init_value: float | None = None


class metal_kernel:
    """A kernel; calling it executes it. `settings` None: those of the enclosing `install`, else the defaults.

    `compile_options` is accepted for its math_mode, which the emulator does not imitate: it computes exactly as safe.
    """

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
        compile_options: Mapping[str, str] | None = None,
        settings: Settings | None = None,
    ) -> None:
        if not source:
            raise RequestError(f"Metal kernel {name} has no source; give the body of its function")
        math_mode = (compile_options or {}).get("math_mode", "safe")
        if math_mode not in _MATH_MODES:
            raise RequestError(f"Metal kernel {name}: math_mode is {math_mode!r}; use one of {', '.join(_MATH_MODES)}")
        self.name = name
        self.input_names, self.output_names = tuple(input_names), tuple(output_names)
        self.source, self.header = source, header
        self.ensure_row_contiguous, self.atomic_outputs = ensure_row_contiguous, atomic_outputs
        self.settings = settings
        self._built: dict[tuple[str, Mode], LoadedKernel] = {}
        self._typechecked: dict[str, tuple[Finding, ...]] = {}

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[Any],
        grid: Triple,
        threadgroup: Triple,
        template: Sequence[TemplateArgument] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> list[Any]:
        """The outputs. Raises MetalCompileError, and MetalFindings if the settings say so. `stream` has no meaning here."""
        del stream
        call = Call(inputs, output_shapes, output_dtypes, grid, threadgroup, tuple(template or ()), init_value)
        if verbose:
            print(f"Generated source code for `{self.name}`:\n```\n{self.text(call).text}\n```")
        session = current_session()
        settings = self.settings or session.settings
        launch = self.launch(call, settings)
        session.launches.append(Launch(launch.name, (), launch.findings, launch.statistics))
        if launch.findings and settings.raise_on_findings:
            raise MetalFindings(self.name, launch.findings)
        return list(launch.outputs)

    def text(self, call: Call) -> KernelText:
        """The Metal text that MLX would compile for a call."""
        return self._text(call, self._inputs(call))

    def typecheck(self, call: Call) -> tuple[Finding, ...]:
        """Address spaces, and C++ that is not Metal."""
        text = self.text(call)
        source = text.with_places()
        if source not in self._typechecked:
            found = typecheck_source(MetalSource(self.name, source, text.entry), find_toolchain())
            self._typechecked[source] = tuple(found)
        return self._typechecked[source]

    def launch(self, call: Call, settings: Settings) -> Launch:
        """Executes a call and raises nothing for its findings. In TYPECHECK mode the outputs hold no results."""
        inputs = self._inputs(call)
        self._validate_launch(call)
        findings: tuple[Finding, ...] = ()
        if settings.typecheck or settings.mode is Mode.TYPECHECK:
            findings = self.typecheck(call) + self._threads(call)
        outputs = [empty_output(s, d, call.init_value) for s, d in zip(call.output_shapes, call.output_dtypes)]
        statistics = Statistics()
        if settings.mode is not Mode.TYPECHECK:
            kernel = self._build(self._text(call, inputs), settings.mode)
            buffers, keep = self._buffers(inputs, outputs, call.init_value is not None)
            found, statistics = kernel.launch(buffers, call.grid, call.threadgroup, settings)
            del keep
            findings += tuple(found)
        mlx = any(array.from_mlx for array in inputs)
        results = tuple(to_caller(out, dtype, mlx) for out, dtype in zip(outputs, call.output_dtypes))
        return Launch(self.name, results, findings, statistics)

    def _inputs(self, call: Call) -> list[KernelArray]:
        for what, got, names in (
            ("inputs", len(call.inputs), self.input_names),
            ("output_shapes", len(call.output_shapes), self.output_names),
            ("output_dtypes", len(call.output_dtypes), self.output_names),
        ):
            if got != len(names):
                raise RequestError(f"Metal kernel {self.name} got {got} {what} for {len(names)} names; give one for each")
        return [kernel_array(value, self.ensure_row_contiguous) for value in call.inputs]

    def _text(self, call: Call, inputs: Sequence[KernelArray]) -> KernelText:
        named = list(zip(self.input_names, inputs))
        outputs = list(zip(self.output_names, call.output_dtypes))
        return write_kernel(self.name, self.header, self.source, named, outputs, call.template, self.atomic_outputs)

    def _validate_launch(self, call: Call) -> None:
        for what, size in (("grid", call.grid), ("threadgroup", call.threadgroup)):
            if len(size) != 3 or not all(isinstance(n, int) and 0 < n < 2**32 for n in size):
                raise RequestError(f"Metal kernel {self.name}: {what} is {size}, but must be three positive integers")
        threads = math.prod(min(g, t) for g, t in zip(call.grid, call.threadgroup))
        if threads > _MAX_THREADS:
            raise RequestError(
                f"Metal kernel {self.name}: a threadgroup of {threads} threads is over the {_MAX_THREADS} that Metal allows"
            )

    def _threads(self, call: Call) -> tuple[Finding, ...]:
        text = self.text(call)
        threads = math.prod(min(g, t) for g, t in zip(call.grid, call.threadgroup))
        return tuple(too_many_threads(MetalSource(self.name, text.with_places(), text.entry), threads))

    def _build(self, text: KernelText, mode: Mode) -> LoadedKernel:
        source = text.with_places()
        if (source, mode) not in self._built:
            path = build_kernel(MetalSource(self.name, source, text.entry), mode, find_toolchain())
            self._built[source, mode] = load_kernel(path)
        return self._built[source, mode]

    def _buffers(
        self, inputs: Sequence[KernelArray], outputs: Sequence[np.ndarray[Any, Any]], initialised: bool
    ) -> tuple[list[BoundBuffer], list[np.ndarray[Any, Any]]]:
        """In the signature's order; the second list keeps their memory alive."""
        buffers: list[BoundBuffer] = []
        keep: list[np.ndarray[Any, Any]] = []
        for name, array in zip(self.input_names, inputs):
            buffers.append(BoundBuffer(name, array.address, array.memory_bytes, name.startswith("into_"), True))
            for what in shape_parameters(name, array, self.source):
                if what == "shape":
                    value = np.array(array.shape, np.int32)
                elif what == "strides":
                    value = np.array(array.element_strides, np.int64)
                else:
                    value = np.array([array.data.ndim], np.int32)
                keep.append(value)
                buffers.append(BoundBuffer(f"{name}_{what}", value.ctypes.data, value.nbytes, False, True))
        for name, out in zip(self.output_names, outputs):
            buffers.append(BoundBuffer(name, out.ctypes.data, out.nbytes, True, initialised))
        if len(buffers) > _MAX_BUFFERS:
            raise RequestError(
                f"Metal kernel {self.name}: {len(buffers)} buffers (inputs, their shapes, outputs) are over the "
                f"{_MAX_BUFFERS} that Metal allows"
            )
        return buffers, keep
