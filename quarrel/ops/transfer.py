"""Cache blocks and recurrent states on their way out of a step and into another, in one form for all backends.

    keys, then values, of each layer   [n, block_size, n_kv, bytes of a head]  uint8
    each recurrent state               [n, ...]                                float32

A head's bytes are its values, or its codes with their float32 scale behind them (`ops/kv.py`), little endian.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from quarrel.ops.contract import Array


@dataclass(frozen=True)
class CacheForm:
    """What must be equal where blocks of one step are put into another."""

    kind: str
    """float32, float16, bfloat16, int8, fp8 or fp8_e5m2."""
    block_size: int
    layers: tuple[tuple[int, int, int], ...]
    """Of each: heads, bytes of a head's key, bytes of its value."""
    states: tuple[tuple[int, ...], ...] = ()
    window_groups: int = 0
    window: int = 0
    """Of those: how many keys back they read."""

    def blocks(self, tokens: int) -> int:
        """So many tokens have."""
        return -(-tokens // self.block_size)

    def window_blocks(self, tokens: int) -> int:
        """Of those, the last so many that a group with a window has beside them."""
        first = max(0, tokens + 1 - self.window) // self.block_size
        return self.blocks(tokens) - first if self.window_groups else 0

    def block_shapes(self, n: int) -> list[tuple[int, ...]]:
        """Of what `n` blocks are read as."""
        return [(n, self.block_size, heads, width) for heads, *widths in self.layers for width in widths]

    def state_shapes(self) -> list[tuple[int, ...]]:
        """Of what one slot of states is read as."""
        return [(1, *shape) for shape in self.states]


@runtime_checkable
class Transfers(Protocol):
    """A step whose cache the host can read and write, behind the launches so far and before those that come."""

    def form(self) -> CacheForm: ...

    def read_blocks(self, blocks: Sequence[int], into: Sequence[Array] = ()) -> list[Array]:
        """Copies, as the module says, in these arrays or new ones; they are there when they have been `transferred`."""

    def write_blocks(self, blocks: Sequence[int], arrays: Sequence[Array], layer: int = 0) -> None:
        """Puts what `read_blocks` gave, there or elsewhere, into these: of this layer, and as many behind it as there are
        arrays for. Those stay as they are until they have been `transferred`."""

    def transferred(self) -> Callable[[], None]:
        """What waits, on any thread, for all that was read and written so far."""

    def pin(self, memory: Array) -> Callable[[], None]:
        """Has a device copy from this memory and to it by itself, if it can; what is returned ends that. On any thread."""

    def read_states(self, slots: Sequence[int]) -> list[Array]:
        """Copies, as the module says; waits for the launches."""

    def write_states(self, slots: Sequence[int], arrays: Sequence[Array]) -> None:
        """Puts what `read_states` gave into these slots."""


def placed(found: Iterable[Array], into: Sequence[Array]) -> list[Array]:
    """What was read, in these arrays if there are any: `read_blocks` of steps whose caches are the host's."""
    if not into:
        return list(found)
    for given, made in zip(into, found, strict=True):
        given[...] = made
    return list(into)


def nothing() -> None:
    """What a step without a device of its own returns of `transferred` and `pin`."""
