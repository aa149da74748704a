"""The pool: stages in order, every chunk once, whatever the number of threads; sleep and waking; closing."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from quarrel.cpu_backend.runtime import features, runner
from quarrel.cpu_backend.runtime.abi import Fields, KernelDef
from quarrel.cpu_backend.runtime.ir import F32, I64, Kernel, Val
from quarrel.cpu_backend.runtime.pool import Pool, StageTable


def ring(name: str = "test/ring") -> KernelDef:
    """Chunk c: dst[c] = src[(c + 1) mod n] + 1: wrong at once if a stage starts before its predecessor is done."""

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        n = a.live_n
        k.store(k.load(a.src + ((chunk + 1) % n << 3), I64) + 1, a.dst + (chunk << 3))

    return KernelDef(name, ("live_n", "src", "dst"), body)


class Ring:
    """Stages that pass a vector round; the number of chunks stands in the header."""

    def __init__(self, pool: Pool, stages: int) -> None:
        kernel = ring()
        self.buffers = [np.zeros(64, np.int64) for _ in range(2)]
        self.header = np.zeros(8, np.int64)
        live, ends = int(self.header.ctypes.data), [int(b.ctypes.data) for b in self.buffers]
        blocks = [kernel.pack({"live_n": live, "src": ends[i % 2], "dst": ends[1 - i % 2]}) for i in range(stages)]
        address = kernel.address(pool.level)
        jobs = np.array([[address, b.ctypes.data, 0, 1, 1] for b in blocks], np.int64)
        self.table = StageTable(np.array([[i, 1] for i in range(stages)], np.int64), jobs, self.header, 64, tuple(blocks))
        self.result = self.buffers[stages % 2]


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_stages_run_in_order_and_chunks_once(threads: int) -> None:
    pool = Pool(features.level(), threads)
    work = Ring(pool, 50)
    for n in (1, 3, 33):
        work.header[0] = n
        for buffer in work.buffers:
            buffer[:] = 0
        for step in range(40):
            pool.run(work.table)
            assert (work.result[:n] == 50 * (step + 1)).all(), (threads, n, step)
    pool.close()


def test_workers_sleep_when_idle_and_wake_again() -> None:
    pool = Pool(features.level(), 2)
    work = Ring(pool, 4)
    work.header[0] = 5
    for step in range(3):
        pool.run(work.table)
        assert (work.result[:5] == 4 * (step + 1)).all()
        deadline = time.monotonic() + 30
        while not pool._asleep.any() and time.monotonic() < deadline:
            time.sleep(0.001)
        assert pool._asleep.any(), "a worker with nothing to do must not keep a core"
    pool.close()


def test_stages_without_chunks_are_passed_over() -> None:
    pool = Pool(features.level(), 2)
    work = Ring(pool, 6)
    work.header[0] = 0
    pool.run(work.table)
    assert (work.result == 0).all()
    pool.close()


def test_jobs_of_one_stage_share_its_chunks() -> None:
    pool = Pool(features.level(), 2)
    kernel, header = ring(), np.array([4], np.int64)
    source, targets = np.arange(8, dtype=np.int64), [np.full(8, -1, np.int64) for _ in range(3)]
    common = {"live_n": int(header.ctypes.data), "src": int(source.ctypes.data)}
    blocks = [kernel.pack({**common, "dst": int(t.ctypes.data)}) for t in targets]
    # The second job has half as many chunks, the third none.
    rules = [(0, 1, 1), (0, 2, 1), (0, 1, 0)]
    jobs = np.array([[kernel.address(pool.level), b.ctypes.data, *r] for b, r in zip(blocks, rules, strict=True)], np.int64)
    pool.run(StageTable(np.array([[0, 3]], np.int64), jobs, header, 64, tuple(blocks)))
    assert targets[0][:4].tolist() == [2, 3, 4, 1]
    assert targets[1].tolist() == [2, 3] + [-1] * 6
    assert targets[2].tolist() == [-1] * 8
    pool.close()


def held_up() -> KernelDef:
    """Every chunk counts itself; the thread that counts first stands still, as one without its core does, until all others
    are counted or it has looked some billion times."""

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        others, looks = a.live_n - 1, k.var(k.i64(1 << 32))
        with k.when(runner._atomic_add(k, a.count, 1).eq(0)):
            with k.loop_while(lambda: k.select(runner._atomic_load(k, a.count) <= others, looks.v, 0) > 0):
                looks.v = looks.v - 1
            k.store(looks.v, a.left)

    return KernelDef("test/held_up", ("live_n", "count", "left"), body)


def test_a_thread_that_stands_still_holds_up_its_own_chunk_alone() -> None:
    pool = Pool(features.level(), 2)
    kernel, header = held_up(), np.array([40], np.int64)
    count, left = np.zeros(8, np.int64), np.zeros(8, np.int64)
    block = kernel.pack({"live_n": header.ctypes.data, "count": count.ctypes.data, "left": left.ctypes.data})
    jobs = np.array([[kernel.address(pool.level), block.ctypes.data, 0, 1, 1]], np.int64)
    for _ in range(3):
        count[0] = 0
        pool.run(StageTable(np.array([[0, 1]], np.int64), jobs, header, 64, (block,)))
        assert count[0] == 40
        assert left[0] > 0, "the others' chunks waited for the thread that stood still"
    pool.close()


def test_two_callers_take_turns() -> None:
    pool = Pool(features.level(), 2)
    works = [Ring(pool, 20) for _ in range(2)]

    def go(work: Ring) -> None:
        work.header[0] = 9
        for _ in range(60):
            pool.run(work.table)

    callers = [threading.Thread(target=go, args=(work,)) for work in works]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all((work.result[:9] == 1200).all() for work in works)
    pool.close()


def test_closing_ends_the_workers() -> None:
    before = set(threading.enumerate())
    pool = Pool(features.level(), 4)
    # Threads of others, earlier tests' among them, may begin and end meanwhile.
    workers = [t for t in set(threading.enumerate()) - before if t.name.startswith("quarrel-cpu-")]
    assert len(workers) == 3
    pool.close()
    assert not any(t.is_alive() for t in workers)


def test_a_ticket_holds_what_a_step_needs() -> None:
    assert runner.COUNT_BITS + runner.STAGE_BITS < 64
    assert runner.STAGE_MASK > 100_000


@pytest.mark.skipif(features.ARCH not in ("x86_64", "aarch64"), reason="only these have a mode to set")
def test_subnormal_results_are_zero_in_every_thread_and_the_caller_s_mode_comes_back() -> None:
    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        at = chunk << 2
        k.store(k.load(a.x + at, F32) * k.load(a.y + at, F32), a.out + at)

    kernel = KernelDef("test/subnormal", ("x", "y", "out"), body)
    pool = Pool(features.level(), 3)
    n = 3000
    x, y = np.full(n, 1e-30, np.float32), np.full(n, 1e-10, np.float32)
    # A product that is subnormal, an operand that is, and one that is neither.
    x[1::3], y[1::3], x[2::3] = 1e-40, 1.0, 1.0
    out = np.full(n, np.nan, np.float32)
    block = kernel.pack({name: int(array.ctypes.data) for name, array in (("x", x), ("y", y), ("out", out))})
    jobs = np.array([[kernel.address(pool.level), block.ctypes.data, 0, 1, 1]], np.int64)
    table = StageTable(np.array([[0, 1]], np.int64), jobs, np.array([n], np.int64), 64, (block,))
    for _ in range(5):
        pool.run(table)
        assert (out[0::3] == 0).all()
        assert (out[1::3] == 0).all()
        assert (out[2::3] == np.float32(1e-10)).all()
        assert (x[:1] * y[:1]).view(np.int32)[0] != 0, "the caller's own arithmetic keeps subnormal numbers"
    pool.close()
