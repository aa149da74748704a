"""The native loop that every thread of the pool runs: claims chunks of the current stage until the step is done.

A step is a list of *stages* that run one after another; a stage is a list of jobs (kernel, argument block, chunk rule)
whose chunks may all run at once. The whole state that threads share is one word, the ticket:

    epoch (20 bits) | stage (20 bits) | chunks not yet claimed (24 bits)

A thread claims a chunk by compare-and-swap of the ticket. Whoever finishes the last chunk of a stage opens the next. So no
thread is ever waited for unless it holds a chunk, a late thread just finds a newer ticket, and which thread computes what
has no influence on the result.
"""

from __future__ import annotations

import time
from typing import Any

from llvmlite import ir

from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import I32, I64, Kernel, Val

COUNT_BITS, STAGE_BITS = 24, 20
COUNT_MASK, STAGE_MASK = (1 << COUNT_BITS) - 1, (1 << STAGE_BITS) - 1
IDLE = STAGE_MASK
"""The stage number that means that no step is under way."""

# Byte offsets in the pool's shared block; what threads write lies on cache lines of its own.
TICKET, PENDING = 0, 128
STAGES, JOBS, HEADER, COUNT, YIELD, CLOCK, TIMES = (256 + 8 * i for i in range(7))
POOL_BYTES = 384
# Byte offsets in each thread's own block.
SCRATCH, ASLEEP, THREAD_BYTES = 0, 8, 128
STAGE_WORDS, JOB_WORDS = 2, 5
"""A stage: its first job and how many. A job: kernel, arguments, and chunks = ceil(header[live] / every) * times."""

SPINS = 200
"""Polls with a pause instruction (about 10 us) before a waiting thread offers its core to others."""
IDLE_YIELDS = 20000
"""Offers of the core before a worker goes to sleep between steps: some 3 ms on an idle machine, longer than the gap between
two steps of decoding."""


def _atomic_load(k: Kernel, at: Val) -> Val:
    return Val(k, k.b.load_atomic(k.b.inttoptr(at.v, I64.as_pointer()), "seq_cst", 8, typ=I64))


def _atomic_store(k: Kernel, value: Val, at: Val) -> None:
    k.b.store_atomic(value.v, k.b.inttoptr(at.v, I64.as_pointer()), "seq_cst", 8)


def _atomic_add(k: Kernel, at: Val, amount: int) -> Val:
    """The value before."""
    return Val(k, k.b.atomic_rmw("add", k.b.inttoptr(at.v, I64.as_pointer()), k.i64(amount).v, "seq_cst"))


def _claim(k: Kernel, pool: Val, ticket: Val) -> Val:
    pair = k.b.cmpxchg(k.b.inttoptr(pool.v, I64.as_pointer()), ticket.v, (ticket - 1).v, "seq_cst", "seq_cst")
    return Val(k, k.b.extract_value(pair, 1))


_FLUSH = 0x8040
"""MXCSR bits: subnormal results and operands count as zero. Each one would cost a hundred cycles or more."""
_FLUSH_ARM = 1 << 24
"""The bit of FPCR that does the same."""


def _control(k: Kernel, name: str, slot: Val) -> None:
    pointer = k.b.inttoptr(slot.v, ir.IntType(8).as_pointer())
    k.call_raw(f"llvm.x86.sse.{name}", ir.VoidType(), [pointer])


def _flush_subnormals(k: Kernel, level: Level) -> Val | None:
    """Turns subnormal numbers off for this thread; returns where the former control word is, or that word itself on Arm."""
    if level.arch == "aarch64":
        word = k.call("llvm.aarch64.get.fpcr", I64)
        k.call_raw("llvm.aarch64.set.fpcr", ir.VoidType(), [(word | _FLUSH_ARM).v])
        return word
    if level.arch != "x86_64":
        return None
    before, now = k.stack(4), k.stack(4)
    _control(k, "stmxcsr", before)
    k.store(k.load(before, I32) | _FLUSH, now)
    _control(k, "ldmxcsr", now)
    return before


def _restore(k: Kernel, level: Level, before: Val | None) -> None:
    if level.arch == "aarch64" and before is not None:
        k.call_raw("llvm.aarch64.set.fpcr", ir.VoidType(), [before.v])
    elif before is not None:
        _control(k, "ldmxcsr", before)


def _pause(k: Kernel, level: Level) -> None:
    if level.arch == "x86_64":
        k.call_raw("llvm.x86.sse2.pause", ir.VoidType(), [])
    elif level.arch == "aarch64":
        k.call_raw("llvm.aarch64.hint", ir.VoidType(), [ir.Constant(I32, 1)])


def _call_address(k: Kernel, address: Val, result: ir.Type, args: list[Val]) -> Any:
    type = ir.FunctionType(result, [a.type for a in args])
    return k.b.call(k.b.inttoptr(address.v, type.as_pointer()), [a.v for a in args])


def _chunks(k: Kernel, header: Val, job: Val) -> Val:
    live, every, times = (k.load(job, I64, 8 * i, align=8) for i in (2, 3, 4))
    return (k.load(header + (live << 3), I64, align=8) + every - 1).udiv(every) * times


def _open_next(k: Kernel, pool: Val, ticket: Val, stage: Val) -> None:
    """Opens the first stage after `stage` that has chunks, or ends the step; notes when, if the step is timed."""
    stages, jobs, header, count, times = (k.load(pool, I64, o, align=8) for o in (STAGES, JOBS, HEADER, COUNT, TIMES))
    at, total, now = k.var(stage + 1), k.var(k.i64(0)), k.stack(16)
    timed = times.ne(0)
    with k.when(timed):
        _call_address(k, k.load(pool, I64, CLOCK, align=8), I32, [k.lift(time.CLOCK_MONOTONIC, I32), now])

    def note() -> None:
        with k.when(timed):
            for word in (0, 8):
                k.store(k.load(now, I64, word), times + (at.v << 4), word)

    with k.loop_while(lambda: k.select(at.v < count, total.v, 1).eq(0)):
        note()
        entry = stages + at.v * (8 * STAGE_WORDS)
        first = jobs + k.load(entry, I64, align=8) * (8 * JOB_WORDS)
        with k.range(0, k.load(entry, I64, 8, align=8)) as j:
            total.v = total.v + _chunks(k, header, first + j * (8 * JOB_WORDS))
        at.v = at.v + 1
    epoch = ticket & ~((1 << (COUNT_BITS + STAGE_BITS)) - 1)
    with k.either(total.v > 0) as (more, over):
        with more:
            _atomic_store(k, total.v, pool + PENDING)
            _atomic_store(k, epoch | (at.v - 1 << COUNT_BITS) | total.v, pool + TICKET)
        with over:
            note()
            _atomic_store(k, epoch | IDLE << COUNT_BITS, pool + TICKET)


def _run_chunk(k: Kernel, pool: Val, stage: Val, left: Val, thread: Val) -> None:
    """Runs one chunk of a stage that had `left` unclaimed ones; the first chunk is claimed first."""
    stages, jobs, header = (k.load(pool, I64, o, align=8) for o in (STAGES, JOBS, HEADER))
    entry = stages + stage * (8 * STAGE_WORDS)
    first, count = jobs + k.load(entry, I64, align=8) * (8 * JOB_WORDS), k.load(entry, I64, 8, align=8)
    chunk = k.var(-left)
    with k.range(0, count) as j:
        chunk.v = chunk.v + _chunks(k, header, first + j * (8 * JOB_WORDS))
    job = k.var(first)
    n = k.var(_chunks(k, header, first))
    with k.loop_while(lambda: chunk.v >= n.v):
        chunk.v = chunk.v - n.v
        job.v = job.v + 8 * JOB_WORDS
        n.v = _chunks(k, header, job.v)
    args = k.load(job.v, I64, 8, align=8)
    _call_address(k, k.load(job.v, I64, align=8), ir.VoidType(), [args, chunk.v, k.load(thread, I64, SCRATCH, align=8)])


def emit_start(k: Kernel) -> None:
    """`start(pool)`: begins the step that the pool's block describes."""
    (pool,) = k.params
    ticket = _atomic_load(k, pool + TICKET)
    epoch = (ticket >> COUNT_BITS + STAGE_BITS) + 1 << COUNT_BITS + STAGE_BITS
    _open_next(k, pool, epoch, k.i64(-1))
    k.finish()


def emit_run(level: Level, k: Kernel) -> None:
    """`run(pool, thread, worker)`: computes until the step is over (caller) or nothing came for a while (worker)."""
    pool, thread, worker = k.params
    before = _flush_subnormals(k, level)
    offer = k.load(pool, I64, YIELD, align=8)
    going, spins, offers = k.var(k.i64(1)), k.var(k.i64(0)), k.var(k.i64(0))
    with k.loop_while(lambda: going.v.ne(0)):
        ticket = _atomic_load(k, pool + TICKET)
        count, stage = ticket & COUNT_MASK, ticket >> COUNT_BITS & STAGE_MASK
        with k.either(count > 0) as (some, none):
            with some, k.when(_claim(k, pool, ticket)):
                _run_chunk(k, pool, stage, count, thread)
                with k.when(_atomic_add(k, pool + PENDING, -1).eq(1)):
                    _open_next(k, pool, ticket, stage)
                spins.v = k.i64(0)
                offers.v = k.i64(0)
            with none:
                with k.when(stage.eq(IDLE) & worker.eq(0)):
                    going.v = k.i64(0)
                spins.v = spins.v + 1
                with k.either(spins.v < SPINS) as (soon, later):
                    with soon:
                        _pause(k, level)
                    with later:
                        _call_address(k, offer, I32, [])
                        offers.v = k.select(stage.eq(IDLE), offers.v + 1, 0)
                with k.when(k.select(offers.v > IDLE_YIELDS, worker, 0).ne(0)):
                    # Asleep is announced first and the ticket looked at again, so that no start can slip between.
                    _atomic_store(k, k.i64(1), thread + ASLEEP)
                    offers.v = k.i64(0)
                    with k.either((_atomic_load(k, pool + TICKET) & COUNT_MASK).eq(0)) as (sleep, work):
                        with sleep:
                            going.v = k.i64(0)
                        with work:
                            _atomic_store(k, k.i64(0), thread + ASLEEP)
    _restore(k, level, before)
    k.finish()
