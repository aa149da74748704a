"""The linear kernels in order: which rows and which fusions each takes, or the sentence with which it declines.

A weight's way from the file to a launch: `Weights.matrix` (`weights.py`) reads its raw blocks, `formats/<type>.py` splits
them into planes and has the Metal text that decodes them, this table chooses the kernel, and `matvec.py` or `matmul.py`
writes its text around that and launches it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from quarrel.env import read_environment
from quarrel.mlx_backend.linear.dense import LEAST_ROWS, dense
from quarrel.mlx_backend.linear.matmul import matmul
from quarrel.mlx_backend.linear.matvec import matvec
from quarrel.mlx_backend.linear.product import Product
from quarrel.mlx_backend.linear.quantized import EXACT, quantized
from quarrel.mlx_backend.runtime.kernel import generation
from quarrel.mlx_backend.runtime.launch import RowsFunction
from quarrel.ops.linear import LinearAddSpec, LinearSpec, NormGateUpSpec, NormLinearSpec
from quarrel.ops.norm import NormSpec

Phase = Literal["decode", "prefill"]
"""Rows of sequences that bring one row to the step, and rows of sequences that bring several."""

_MOST_MAPS = 4
_NEURAL = 17
"""The generation whose GPUs have matrix units beside their lanes: M5."""


@dataclass(frozen=True)
class Fusion:
    """What one launch should compute: maps of the same row, the norm before them, and whether two are gate and up."""

    maps: tuple[LinearSpec, ...]
    norm: NormSpec | None = None
    gated: bool = False


def fusion_of(spec: Any) -> Fusion | None:
    """Of the spec of a linear op; None for the spec of another op."""
    match spec:
        case LinearSpec():
            return Fusion((spec,))
        case LinearAddSpec():
            return Fusion((spec.linear,))
        case NormLinearSpec():
            return Fusion(spec.linears, spec.norm)
        case NormGateUpSpec():
            return Fusion((spec.gate, spec.up), spec.norm, gated=True)
    return None


def _matvec_declines(f: Fusion) -> str | None:
    if f.norm is not None and (f.norm.kind != "rms" or f.norm.groups != 1):
        return f"needs one rms norm of the row, got {f.norm.kind} norm in {f.norm.groups} groups"
    if len(f.maps) > _MOST_MAPS:
        return f"needs at most {_MOST_MAPS} maps, got {len(f.maps)}"
    return None


def _matmul_declines(f: Fusion) -> str | None:
    if f.norm is not None:
        return "needs normalised rows, which MLX's rms_norm makes in a launch of its own"
    if len(f.maps) > 1 and not f.gated:
        return f"needs one map, or gate and up, got {len(f.maps)}"
    return None


def _quantized_declines(f: Fusion) -> str | None:
    if f.norm is not None and (f.norm.kind != "rms" or f.norm.groups != 1):
        return f"needs one rms norm of the row, got {f.norm.kind} norm in {f.norm.groups} groups"
    others = [m.type.name for m in f.maps if m.type not in EXACT]
    if others:
        return (
            f"needs a format that mx.quantized_matmul holds exactly ({', '.join(t.name for t in EXACT)}), got {others[0]}"
        )
    return None


@dataclass(frozen=True)
class LinearKernel:
    """`declines(fusion)` is None where the kernel takes it; `build(product)` makes `(x, residual=None) -> results`."""

    name: str
    phase: Phase
    declines: Callable[[Fusion], str | None]
    build: Callable[[Product], RowsFunction]


KERNELS = (
    LinearKernel("matvec", "decode", _matvec_declines, matvec),
    LinearKernel("matmul", "prefill", _matmul_declines, matmul),
)

OF_MLX = tuple(LinearKernel("mx.quantized_matmul", phase, _quantized_declines, quantized) for phase in get_args(Phase))
"""Ahead of ours where QUARREL_METAL is mlx: to compare with."""

OF_M5 = (LinearKernel(f"mx.matmul from {LEAST_ROWS} rows on", "prefill", _matmul_declines, dense),)
"""Ahead of ours where the GPU has matrix units beside its lanes."""


def find(phase: Phase, fusion: Fusion) -> tuple[LinearKernel | None, list[str]]:
    """The first kernel for these rows that takes the fusion, and why the ones before it do not."""
    reasons = []
    first = (*(OF_MLX if read_environment().metal == "mlx" else ()), *(OF_M5 if generation() >= _NEURAL else ()))
    for kernel in (*first, *KERNELS):
        if kernel.phase == phase:
            reason = kernel.declines(fusion)
            if reason is None:
                return kernel, reasons
            reasons.append(f"{kernel.name}: {reason}")
    return None, reasons


def declined(spec: Any) -> list[str]:
    """Why kernels for rows of prompts leave parts of an op to launches of their own, as `explain` prints it."""
    fusion = fusion_of(spec)
    if fusion is None:
        return []
    taken, reasons = find("prefill", fusion)
    if taken in OF_M5:
        return [*reasons, f"{taken.name}, for this GPU has matrix units"]
    return reasons if taken not in OF_MLX else [*reasons, f"QUARREL_METAL=mlx: {taken.name} in place of our kernels"]
