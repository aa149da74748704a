"""One call of a kernel under everything the emulator knows: types, every access, several schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tools.metal_emulator.arrays import BFloat16Array, is_mlx
from tools.metal_emulator.diagnostics import as_findings
from tools.metal_emulator.errors import MetalCompileError, MetalFindings
from tools.metal_emulator.findings import Finding, Kind
from tools.metal_emulator.kernel import Call, metal_kernel
from tools.metal_emulator.launcher import Statistics
from tools.metal_emulator.settings import Mode, Settings


@dataclass(frozen=True)
class CheckResult:
    """`outputs` and `statistics` are those of the first seed; there are none if the kernel does not compile."""

    name: str
    outputs: tuple[Any, ...]
    findings: tuple[Finding, ...]
    statistics: Statistics

    def raise_findings(self) -> None:
        if self.findings:
            raise MetalFindings(self.name, self.findings)


def check(
    kernel: metal_kernel,
    call: Call,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    settings: Settings | None = None,
    deterministic: bool = True,
) -> CheckResult:
    """Every finding of a call, each place in the code once; raises nothing for them.

    `deterministic`: outputs whose bytes differ between two schedules are a finding (float atomics make them differ).
    """
    settings = replace(settings or Settings(), mode=Mode.CHECK, typecheck=False)
    try:
        findings = dict.fromkeys(kernel.typecheck(call))
        launches = [kernel.launch(call, replace(settings, seed=seed)) for seed in seeds]
    except MetalCompileError as error:
        return CheckResult(
            kernel.name, (), tuple(findings) + tuple(as_findings(Kind.DOES_NOT_COMPILE, error.diagnostics)), Statistics()
        )
    places = set()
    for launch in launches:
        for finding in launch.findings:
            if (finding.kind, finding.file, finding.line) not in places:
                places.add((finding.kind, finding.file, finding.line))
                findings[finding] = None
    first = launches[0]
    for i, name in enumerate(kernel.output_names if deterministic else ()):
        differing = [seed for seed, other in zip(seeds, launches) if _bytes(other.outputs[i]) != _bytes(first.outputs[i])]
        if differing:
            message = f"output '{name}' differs between the schedules {seeds[0]} and {differing[0]}"
            findings[Finding(Kind.ORDER, "", 0, message)] = None
    return CheckResult(kernel.name, first.outputs, tuple(findings), first.statistics)


def _bytes(output: Any) -> bytes:
    if isinstance(output, BFloat16Array):
        return output.bits.tobytes()
    if is_mlx(output):
        import mlx.core as mx

        return np.asarray(output.reshape(-1).view(mx.uint8)).tobytes()
    return np.asarray(output).tobytes()
