"""An entry of a table of kernels that compute the same, best first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from quarrel.triton_backend.runtime.site import Site

M = TypeVar("M")
"""What is to be computed."""
S = TypeVar("S")
"""A launch, and which sizes it serves."""


@dataclass(frozen=True)
class Kernel(Generic[M, S]):
    """`declines` returns None to take maps on a device, or a sentence; `build` makes the launch."""

    name: str
    declines: Callable[[Site, M], str | None]
    build: Callable[[Site, M], S]


def choose(kernels: Sequence[Kernel[M, S]], site: Site, maps: M) -> tuple[list[tuple[str, S]], list[str]]:
    """Name and launch of each kernel that takes the maps, in order, and a sentence for each that does not."""
    taken: list[tuple[str, S]] = []
    declined: list[str] = []
    for kernel in kernels:
        reason = kernel.declines(site, maps)
        if reason is None:
            taken.append((kernel.name, kernel.build(site, maps)))
        else:
            declined.append(f"{kernel.name}: {reason}")
    return taken, declined
