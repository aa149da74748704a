"""How fast a CUDA device reads its memory: a Triton loop that loads and adds, and writes next to nothing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 8192
"""Words that a program has in flight at once, in 16-byte loads: 32 KB, and two to four programs share a multiprocessor."""
PROGRAMS = 4
"""Of each multiprocessor."""


@triton.jit
def _read(p_data, p_out, n_blocks, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], dtype=tl.int32)
    for i in range(tl.program_id(0), n_blocks, tl.num_programs(0)):
        total += tl.load(p_data + i.to(tl.int64) * BLOCK + tl.arange(0, BLOCK))
    tl.store(p_out + tl.program_id(0), tl.sum(total))


def read_speeds(nbytes: int, rounds: int) -> list[float]:
    """Bytes a second, a few times."""
    n_blocks = nbytes // (4 * BLOCK)
    data = torch.ones(n_blocks * BLOCK, dtype=torch.int32, device="cuda")
    programs = PROGRAMS * torch.cuda.get_device_properties(data.device).multi_processor_count
    out = torch.empty(programs, dtype=torch.int32, device="cuda")
    speeds = []
    for _ in range(rounds + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        _read[(programs,)](data, out, n_blocks, BLOCK=BLOCK, num_warps=8)
        end.record()
        end.synchronize()
        speeds.append(4 * data.numel() / (start.elapsed_time(end) * 1e-3))
    if int(out.sum()) != data.numel():
        raise RuntimeError("the measurement of the read bandwidth did not read every word")
    return speeds[2:]
