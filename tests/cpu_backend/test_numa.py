"""Memory nodes: read from a tree like /sys's, threads spread over them and kept there, pages dealt out to all."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from quarrel.cpu_backend import backend as backend_module
from quarrel.cpu_backend.backend import CpuBackend
from quarrel.cpu_backend.runtime import features, numa
from quarrel.cpu_backend.runtime.numa import MemoryNode, Placement, memory_nodes, numbers
from quarrel.cpu_backend.runtime.pool import Pool
from tests.cpu_backend.test_pool import Ring

LINUX = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads are kept on cores on Linux only")


def tree(folder: Path, nodes: dict[int, str], with_memory: str) -> Path:
    """Nodes with the text of their cpulist."""
    for number, cores in nodes.items():
        (folder / f"node{number}").mkdir()
        (folder / f"node{number}" / "cpulist").write_text(f"{cores}\n")
    (folder / "has_memory").write_text(f"{with_memory}\n")
    return folder


def test_nodes_are_those_with_memory_and_cores_that_may_be_used(tmp_path: Path) -> None:
    root = tree(tmp_path, {0: "0-3,8-11", 1: "4-7,12-15", 2: "", 3: "16-17"}, "0-2")
    assert memory_nodes(range(16), root) == (
        MemoryNode(0, frozenset({0, 1, 2, 3, 8, 9, 10, 11})),
        MemoryNode(1, frozenset({4, 5, 6, 7, 12, 13, 14, 15})),
    )
    assert memory_nodes([1, 9], root) == (MemoryNode(0, frozenset({1, 9})),)


@pytest.mark.parametrize("with_memory", ["", "0-", "x", "0-1"])
def test_a_tree_that_cannot_be_read_has_no_nodes(with_memory: str, tmp_path: Path) -> None:
    assert memory_nodes([0], tree(tmp_path, {0: "0"}, with_memory)) == ()
    assert memory_nodes([0], tmp_path / "none") == ()


def test_ranges_are_read_as_the_kernel_writes_them() -> None:
    assert numbers("0-2,5,7-8") == [0, 1, 2, 5, 7, 8]
    assert numbers("") == []


@pytest.mark.parametrize(("threads", "expected"), [(4, [0, 0, 1, 1]), (3, [0, 0, 1]), (1, [0]), (5, [0, 0, 0, 1, 1])])
def test_threads_are_spread_evenly_and_neighbours_share_a_node(threads: int, expected: list[int]) -> None:
    placement = Placement((MemoryNode(0, frozenset({0})), MemoryNode(1, frozenset({1}))))
    nodes = [placement.node(i, threads) for i in range(threads)]
    assert [node.number for node in nodes if node] == expected


@LINUX
def test_workers_are_kept_on_their_node_and_the_caller_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    policies: list[tuple[str, list[int]]] = []
    monkeypatch.setattr(numa, "_interleave", lambda nodes: policies.append((threading.current_thread().name, nodes)))
    before = os.sched_getaffinity(0)
    cores = sorted(before)
    placement = Placement((MemoryNode(0, frozenset(cores[:1])), MemoryNode(5, frozenset(cores[-1:]))))
    pool = Pool(features.level(), 3, placement)
    work = Ring(pool, 6)
    work.header[0] = 9
    pool.run(work.table)
    assert (work.result[:9] == 6).all()
    kept = [os.sched_getaffinity(worker.native_id or 0) for worker in pool._workers]
    assert kept == [set(cores[:1]), set(cores[-1:])]
    assert os.sched_getaffinity(0) == before
    pool.close()
    assert sorted(policies) == [("quarrel-cpu-1", [0, 5]), ("quarrel-cpu-2", [0, 5])]


def test_pages_are_dealt_out_by_the_kernel_s_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def call(number: int, mode: int, mask: Any, bits: int) -> int:
        calls.append((number, mode, list(mask), bits))
        return 0

    monkeypatch.setattr(numa.platform, "machine", lambda: "x86_64")
    numa._interleave([0, 1, 66], call)
    assert calls == [(238, 3, [0b11, 0b100], 129)]
    with pytest.raises(OSError, match=r"."):
        numa._interleave([0], lambda *args: -1)
    monkeypatch.setattr(numa.platform, "machine", lambda: "riscv64")
    numa._interleave([0, 1], call)
    assert len(calls) == 1


@LINUX
def test_what_a_container_forbids_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(*args: object) -> None:
        raise PermissionError("no")

    monkeypatch.setattr(numa.os, "sched_setaffinity", forbid)
    Placement((MemoryNode(0, frozenset({0})), MemoryNode(1, frozenset({1})))).place(0, 2)


def test_the_backend_tells_of_several_nodes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = (MemoryNode(0, frozenset({0})), MemoryNode(1, frozenset({1})))
    monkeypatch.setattr(backend_module, "memory_nodes", lambda allowed: nodes)
    assert CpuBackend(threads=4).device().endswith("4 threads on 2 memory nodes")
    monkeypatch.setattr(backend_module, "memory_nodes", lambda allowed: nodes[:1])
    assert CpuBackend(threads=4).device().endswith("4 threads")
