"""Sums of a few rows over GPUs that reach each other's memory, in one launch: each member writes its part where all can
read it, signals the others, waits for theirs, and adds all parts in the order of ranks.

    y = sum over members of x, or residual + scale * that; float32, BLOCK values a program

A member's memory: a flag for each program and member, a parity for each program, and two places for its values. A program
waits for its own kind only. It flips its parity with every sum: values are written over two sums later, when the signal of
the sum between has told that they were read. Neither needs a number from the host, so graphs may hold it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quarrel.triton_backend.runtime.launch import Launcher, cdiv, launch

BLOCK, PROGRAMS = 1024, 128
MOST = BLOCK * PROGRAMS
"""Values of the largest sum: 512 KiB, up to which a launch of NCCL's takes twice as long (18 to 22 us on two H200s)."""


def words(members: int) -> int:
    """int32s of a member's memory."""
    return PROGRAMS * members + PROGRAMS + 2 * MOST


@triton.jit
def add_members(
    out, residual, x, peers, size, scale, RANK: tl.constexpr, MEMBERS: tl.constexpr, ADD: tl.constexpr,
    PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """peers: int64 `[MEMBERS]`, where each member's memory begins."""
    program = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    at = program * BLOCK + lane
    ok = at < size
    FLAGS: tl.constexpr = PROGRAMS * MEMBERS
    own = tl.load(peers + RANK).to(tl.pointer_type(tl.int32))
    p_parity = own + FLAGS + program
    parity = tl.load(p_parity)
    place = FLAGS + PROGRAMS + (parity * PROGRAMS + program) * BLOCK
    value = tl.load(x + at, mask=ok, other=0.0)
    tl.store(own.to(tl.pointer_type(tl.float32)) + place + lane, value, mask=ok)
    tl.debug_barrier()
    tl.store(p_parity, 1 - parity)
    for r in tl.static_range(MEMBERS):
        if r != RANK:
            p_flag = tl.load(peers + r).to(tl.pointer_type(tl.int32)) + program * MEMBERS + RANK
            while tl.atomic_cas(p_flag, 0, 1, sem="release", scope="sys") != 0:
                pass
    for r in tl.static_range(MEMBERS):
        if r != RANK:
            p_flag = own + program * MEMBERS + r
            while tl.atomic_cas(p_flag, 1, 0, sem="acquire", scope="sys") != 1:
                pass
    tl.debug_barrier()
    total = tl.zeros([BLOCK], tl.float32)
    for r in tl.static_range(MEMBERS):
        if r == RANK:
            total += value
        else:
            p_part = tl.load(peers + r).to(tl.pointer_type(tl.float32)) + place
            total += tl.load(p_part + lane, mask=ok, other=0.0, cache_modifier=".cv")
    if ADD:
        total = tl.load(residual + at, mask=ok, other=0.0) + scale * total
    tl.store(out + at, total, mask=ok)


class OneShot:
    """This member's memory, and that of the others as this process sees it: int32 `[words]` each, by rank."""

    most = MOST
    words = staticmethod(words)

    def __init__(self, rank: int, memory: list[torch.Tensor], launcher: Launcher = launch) -> None:
        self.rank, self.memory, self._launch = rank, memory, launcher
        own = memory[rank]
        self._peers = torch.tensor([m.data_ptr() for m in memory], dtype=torch.int64, device=own.device)
        self._flags = PROGRAMS * len(memory)

    def sum(self, out: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None = None, scale: float = 1.0) -> None:
        """`out` may be `x`. At most MOST values, as many for every member."""
        self._launch(
            add_members, (cdiv(x.numel(), BLOCK),), out, out if residual is None else residual, x, self._peers, x.numel(),
            scale, RANK=self.rank, MEMBERS=len(self.memory), ADD=residual is not None, PROGRAMS=PROGRAMS, BLOCK=BLOCK,
            warps=4, stages=1,
        )  # fmt: skip

    def release(self) -> None:
        """Gives the signals that a member which is gone cannot give, once: to be repeated while the device waits."""
        for rank, memory in enumerate(self.memory):
            memory[: self._flags].fill_(int(rank == self.rank))
