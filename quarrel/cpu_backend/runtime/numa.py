"""Memory nodes: where threads run and where the pages that they touch first come to lie.

A core reads another node's memory at a fraction of its own node's bandwidth. Which thread reads which rows changes from
step to step, so no page has an owner: workers are spread over the nodes, each kept on the cores of its own, and the pages
that they touch first are dealt out to all nodes in turn. Then every node's memory is read at once. A file that was in the
page cache before stays where it lies.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger("quarrel")

ROOT = Path("/sys/devices/system/node")
INTERLEAVE = 3
"""MPOL_INTERLEAVE of linux/mempolicy.h."""
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
WORD = 64


@dataclass(frozen=True)
class MemoryNode:
    """A node with memory, and its cores that this process may use."""

    number: int
    cores: frozenset[int]


def memory_nodes(allowed: Sequence[int], root: Path = ROOT) -> tuple[MemoryNode, ...]:
    """The nodes whose cores may be used, in order; one at most where the system tells of none or they have no memory."""
    try:
        cores = {n: numbers(_read(root / f"node{n}" / "cpulist")) for n in numbers(_read(root / "has_memory"))}
    except (OSError, ValueError):
        return ()
    nodes = (MemoryNode(n, frozenset(own) & set(allowed)) for n, own in cores.items())
    return tuple(node for node in nodes if node.cores)


def numbers(text: str) -> list[int]:
    """Numbers and ranges such as `0-3,8`."""
    found: list[int] = []
    for part in text.split(",") if text else ():
        ends = [int(end) for end in part.split("-")]
        found += range(ends[0], ends[-1] + 1)
    return found


def _read(path: Path) -> str:
    return path.read_text("ascii").strip()


@dataclass(frozen=True)
class Placement:
    """The nodes over which a pool's threads are spread; with fewer than two, nothing is done."""

    nodes: tuple[MemoryNode, ...]

    def node(self, thread: int, threads: int) -> MemoryNode | None:
        """Of a thread: neighbours share a node, and nodes have as many threads as there are in all, give or take one."""
        return self.nodes[thread * len(self.nodes) // threads] if len(self.nodes) > 1 else None

    def place(self, thread: int, threads: int) -> None:
        """Keeps the calling thread on its node, and has the pages that it touches first dealt out to all nodes."""
        node = self.node(thread, threads)
        if node is None:
            return
        try:
            os.sched_setaffinity(0, node.cores)
            _interleave([n.number for n in self.nodes])
        except OSError as error:  # a container may forbid either; the thread runs anywhere then
            log.info("thread %d is not kept on memory node %d: %s", thread, node.number, error)


def _interleave(nodes: Sequence[int], call: Callable[..., int] | None = None) -> None:
    """Deals the pages that the calling thread touches first out to these nodes; OSError if the system refuses."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return
    words = max(nodes) // WORD + 1
    mask = (ctypes.c_uint64 * words)()
    for node in nodes:
        mask[node // WORD] |= 1 << node % WORD
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel counts one bit less than it is told.
    if (call or libc.syscall)(number, INTERLEAVE, mask, words * WORD + 1) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
