"""The text that MLX writes around a kernel body, byte for byte (tests compare it with MLX's own).

Source: mlx/backend/common/metal_kernel.cpp of MLX 0.32. A parameter exists for every input and output, for the
shape, strides and ndim of an input whose names occur in the body, and for every attribute whose name occurs in it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tools.metal_emulator.arrays import KernelArray, metal_name

_ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}

# Inputs smaller than this come in the constant address space.
_CONSTANT_BELOW = 8

TemplateArgument = tuple[str, Any]


@dataclass(frozen=True)
class KernelText:
    """The parts of a kernel's Metal text, and its name there."""

    name: str
    entry: str  # the function; the host name of its instance if it is a template
    header: str
    opening: str  # template<...> and the signature, up to the body's brace
    body: str
    closing: str

    @property
    def text(self) -> str:
        """What MLX would compile."""
        return self.header + self.opening + self.body + self.closing

    def with_places(self) -> str:
        """The same, with line numbers that count in the header and in the body as the caller wrote them."""
        return (
            f'#line 1 "{self.name}.header"\n{self.header}\n#line 1 "{self.name}.signature"\n{self.opening}'
            f'\n#line 1 "{self.name}.metal"\n{self.body}\n#line 1 "{self.name}.end"\n{self.closing}'
        )


def shape_parameters(name: str, array: KernelArray, body: str) -> list[str]:
    """Which of shape, strides and ndim of an input the kernel gets."""
    if array.data.ndim == 0:
        return []
    return [what for what in ("shape", "strides", "ndim") if f"{name}_{what}" in body]


def write_kernel(
    name: str,
    header: str,
    body: str,
    inputs: Sequence[tuple[str, KernelArray]],
    outputs: Sequence[tuple[str, Any]],
    template: Sequence[TemplateArgument],
    atomic_outputs: bool,
) -> KernelText:
    arguments = _template_arguments(template)
    entry = "custom_kernel_" + name
    if template:
        entry += "_" + re.sub("[<>-]|, ", "_", arguments)[:-1]
    for _, array in inputs:
        suffix = "s" if array.data.ndim == 0 else "c" if array.data.size < _CONSTANT_BELOW else ""
        entry += f"_{array.metal_type}{suffix}"
    for _, dtype in outputs:
        entry += f"_{metal_name(dtype)}"

    parameters: list[str] = []

    def buffer(declaration: str) -> None:
        parameters.append(f"  {declaration} [[buffer({len(parameters)})]]")

    for input_name, array in inputs:
        space = "constant" if array.data.size < _CONSTANT_BELOW else "device"
        buffer(f"const {space} {array.metal_type}{'&' if array.data.ndim == 0 else '*'} {input_name}")
        for what in shape_parameters(input_name, array, body):
            kind = {"shape": "int*", "strides": "int64_t*", "ndim": "int&"}[what]
            buffer(f"const constant {kind} {input_name}_{what}")
    for output_name, dtype in outputs:
        element = metal_name(dtype)
        buffer(f"device {f'atomic<{element}>' if atomic_outputs else element}* {output_name}")
    parameters += [f"  {kind} {attribute} [[{attribute}]]" for attribute, kind in _ATTRIBUTES.items() if attribute in body]

    opening = f"template <{', '.join(map(_template_parameter, template))}>\n" if template else ""
    opening += f"[[kernel]] void {entry}(\n" + ",\n".join(parameters) + ") {\n"
    instance = f'\ntemplate [[host_name("{entry}")]] [[kernel]] decltype({entry}{arguments}) {entry}{arguments};\n'
    return KernelText(name, entry, header, opening, body, "\n}\n" + (instance if template else ""))


def _template_parameter(argument: TemplateArgument) -> str:
    name, value = argument
    return ("bool " if isinstance(value, bool) else "int " if isinstance(value, int) else "typename ") + name


def _template_arguments(template: Sequence[TemplateArgument]) -> str:
    def one(value: Any) -> str:
        return str(int(value)) if isinstance(value, int) else metal_name(value)

    return "<" + ", ".join(one(value) for _, value in template) + ">" if template else ""
