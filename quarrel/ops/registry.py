"""Which implementation takes which op: decided once, when a program is compiled, with reasons.

A backend registers an `Implementation` per op. `accepts(spec)` returns None to take the spec or a sentence to decline it,
such as "needs head_dim 128, got 80". A declined composite is expanded on the same backend; a declined primitive raises
`UnsupportedOp`. Nothing ever moves to another backend.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quarrel.errors import BackendUnavailable, UnsupportedOp, installing
from quarrel.ops.contract import Op
from quarrel.ops.null import expand
from quarrel.ops.program import Node, Program

if TYPE_CHECKING:
    from quarrel.ops.step import Backend


def takes_all(spec: Any) -> str | None:
    """The `accepts` of an implementation that covers its whole contract."""
    return None


@dataclass(frozen=True)
class Implementation:
    """One way of computing `op`. `build` is called by the owning backend only; its signature is that backend's affair."""

    op: Op
    name: str
    build: Callable[..., Any]
    accepts: Callable[[Any], str | None] = takes_all


class Registry:
    """The implementations of one backend, best first for each op."""

    def __init__(self, backend: str, implementations: Iterable[Implementation]) -> None:
        self.backend = backend
        self._by_op: dict[str, list[Implementation]] = {}
        for implementation in implementations:
            self._by_op.setdefault(implementation.op.name, []).append(implementation)

    def find(self, op: Op, spec: Any) -> tuple[Implementation | None, list[str]]:
        """The first implementation that accepts, and why the ones before it did not."""
        reasons: list[str] = []
        for implementation in self._by_op.get(op.name, []):
            reason = implementation.accepts(spec)
            if reason is None:
                return implementation, reasons
            reasons.append(f"{implementation.name}: {reason}")
        return None, reasons

    def ops(self) -> list[str]:
        """Names of the ops that have an implementation."""
        return sorted(self._by_op)


@dataclass(frozen=True)
class Choice:
    """Who computes one node, and what declined before."""

    node: Node
    implementation: Implementation
    declined: tuple[str, ...]


def lower(program: Program, registry: Registry) -> list[Choice]:
    """Chooses an implementation for every node, expanding the composites that the backend declines."""
    next_id = 1 + max((v.id for n in program.nodes for v in n.outputs), default=0)
    next_id = max(next_id, 1 + max((v.id for v in program.inputs.values()), default=0))
    choices: list[Choice] = []
    pending = list(reversed(program.nodes))
    trail: dict[str, list[str]] = {}
    while pending:
        node = pending.pop()
        implementation, reasons = registry.find(node.op, node.spec)
        if implementation is not None:
            choices.append(Choice(node, implementation, tuple(trail.get(node.path, []) + reasons)))
        elif node.op.expand is not None:
            body, next_id = expand(node, next_id)
            trail.setdefault(node.path, []).extend(f"{node.op.name}: {r}" for r in reasons)
            pending.extend(reversed(body))
        else:
            raise UnsupportedOp(registry.backend, node.op.name, node.spec, reasons)
    return choices


def missing_driver(name: str) -> str | None:
    """Why a backend cannot run here, where that can be said without importing its framework, which takes time."""
    if name == "triton":
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            return "backend triton cannot run on this machine: there is no NVIDIA driver (libcuda)"
    if name == "mlx" and sys.platform != "darwin":
        return "backend mlx cannot run on this machine: Metal is there on Apple silicon Macs only"
    return None


BACKENDS: Mapping[str, str] = {
    "cpu": "quarrel.cpu_backend.backend",
    "triton": "quarrel.triton_backend.backend",
    "mlx": "quarrel.mlx_backend.backend",
}
"""Backend name -> module whose `create()` makes it. The module is imported on first use only."""


def backend(name: str, threads: int | None = None) -> Backend:
    """The backend of this name, or `BackendUnavailable` with what is missing. `threads` is the CPU backend's."""
    if name not in BACKENDS:
        raise BackendUnavailable(f"no backend is called {name!r}: use auto, cpu, triton (NVIDIA GPUs) or mlx (Apple GPUs)")
    try:
        module = importlib.import_module(BACKENDS[name])
    except ImportError as error:
        if (error.name or "").startswith("quarrel."):
            raise BackendUnavailable(f"backend {name} is not part of this version of Quarrel") from error
        raise BackendUnavailable(f"backend {name} cannot be imported ({error}): {_HINT[name]}") from error
    made: Backend = module.create(threads) if name == "cpu" else module.create()
    return made


_HINT = {
    "cpu": "reinstall quarrel, llvmlite is one of its own dependencies",
    "triton": f"{installing('cuda')}, on a machine with an NVIDIA GPU",
    "mlx": f"{installing('metal')}, on an Apple silicon Mac",
}
