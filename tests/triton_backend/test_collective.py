"""What members of a group do together: every case of the contract, and a model whose shares add up to it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quarrel.gguf import GGUFFile
from quarrel.models import ModelSpec, Tensors, assemble, read_spec
from quarrel.models.shard import shard
from quarrel.ops.collective import GROUP_OPS
from quarrel.ops.contract import Case, Compute, Op, rel_error
from quarrel.ops.step import Limits
from quarrel.triton_backend.backend import TritonBackend, create
from quarrel.triton_backend.collective import one_shot
from tests.models.test_reference_logits import chunk
from tests.parallel.lockstep import Member, together
from tests.paths import need_cases
from tests.triton_backend.cases import COMPUTES, error_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [
    pytest.param(op, case, COMPUTES[i % len(COMPUTES)], id=f"{op.name}-{i}")
    for op in GROUP_OPS.values()
    for i, case in enumerate(op.cases())
]


@pytest.mark.parametrize(("op", "case", "compute"), CASES)
def test_case_matches_the_reference(backend: TritonBackend, op: Op, case: Case, compute: Compute) -> None:
    assert error_of(backend, op, case, compute) <= op.tolerance[compute]


@pytest.mark.parametrize("add", [False, True])
def test_sums_in_one_launch(add: bool) -> None:
    """The other member is played: its values lie in its memory, and its signal is there."""
    rng, size = np.random.default_rng(3), 2500
    memory = [torch.zeros(one_shot.words(2), dtype=torch.int32, device=DEVICE) for _ in range(2)]
    made = one_shot.OneShot(0, memory)
    flags = 2 * one_shot.PROGRAMS
    start = flags + one_shot.PROGRAMS
    for turn in range(3):
        x, other, h = (torch.from_numpy(rng.standard_normal(size).astype(np.float32)).to(DEVICE) for _ in range(3))
        place = start + turn % 2 * one_shot.MOST
        memory[1].view(torch.float32)[place : place + size] = other
        memory[0][1 : 2 * 3 : 2] = 1  # programs 0 to 2, member 1
        out = torch.empty_like(x)
        made.sum(out, x, h if add else None, 0.5)
        assert torch.equal(out, h + 0.5 * (x + other) if add else x + other)
        assert torch.equal(memory[0].view(torch.float32)[place : place + size], x)
        assert memory[0][:flags].sum() == 0
        assert memory[1][:flags].tolist() == [1, 0] * 3 + [0] * (flags - 6)
        memory[1][:flags] = 0


def test_shares_add_up_to_the_model() -> None:
    folder = need_cases("zoo")
    ids = np.load(folder / "tokens.npy").reshape(-1).astype(np.int32)[:2]
    limits = Limits(max_tokens=8, max_seqs=2, max_blocks_per_seq=2, n_blocks=2, block_size=16)
    with GGUFFile.open(folder / "model-q8_0.gguf") as file:

        def member(group: Member) -> np.ndarray:
            spec = read_spec(file)
            assert isinstance(spec, ModelSpec)
            spec, tensors = shard(spec, Tensors(file), group.rank, 2, "tensor")
            backend = create()
            backend.join(group)
            step = backend.compile(assemble(spec, tensors), tensors, limits, "float32")
            logits = step(chunk(ids, 0, len(ids)), "logits").logits
            assert logits is not None
            return logits

        first, second = together(2, member, in_turn=True)
    assert rel_error(first, np.load(folder / "logits_q8_0_deq.npy")[: len(ids)]) < 1e-5
    assert np.array_equal(first, second)
