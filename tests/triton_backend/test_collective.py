"""What members of a group do together: every case of the contract, and a model whose shares add up to it."""

from __future__ import annotations

import numpy as np
import pytest

from quarrel.gguf import GGUFFile
from quarrel.models import ModelSpec, Tensors, assemble, read_spec
from quarrel.models.shard import shard
from quarrel.ops.collective import GROUP_OPS
from quarrel.ops.contract import Case, Compute, Op, rel_error
from quarrel.ops.step import Limits
from quarrel.triton_backend.backend import TritonBackend, create
from tests.models.test_reference_logits import chunk
from tests.parallel.lockstep import Member, together
from tests.paths import need_cases
from tests.triton_backend.cases import COMPUTES, error_of

CASES = [
    pytest.param(op, case, COMPUTES[i % len(COMPUTES)], id=f"{op.name}-{i}")
    for op in GROUP_OPS.values()
    for i, case in enumerate(op.cases())
]


@pytest.mark.parametrize(("op", "case", "compute"), CASES)
def test_case_matches_the_reference(backend: TritonBackend, op: Op, case: Case, compute: Compute) -> None:
    assert error_of(backend, op, case, compute) <= op.tolerance[compute]


def test_shares_add_up_to_the_model() -> None:
    """Attention, a mixer whose norm gathers, experts with a shared one, tied output."""
    folder = need_cases("granitehybrid")
    ids = np.load(folder / "tokens.npy").reshape(-1).astype(np.int32)[:4]
    limits = Limits(max_tokens=8, max_seqs=2, max_blocks_per_seq=2, n_blocks=2, block_size=16)
    with GGUFFile.open(folder / "model-q4_0x.gguf") as file:

        def member(group: Member) -> np.ndarray:
            spec = read_spec(file)
            assert isinstance(spec, ModelSpec)
            spec, tensors = shard(spec, Tensors(file), group.rank, 2, "tensor")
            backend = create()
            backend.join(group)
            step = backend.compile(assemble(spec, tensors), tensors, limits, "float32")
            return np.concatenate([step(chunk(ids, a, z), "logits").logits for a, z in ((0, 3), (3, 4))])  # type: ignore[arg-type]

        first, second = together(2, member, in_turn=True)
    assert rel_error(first, np.load(folder / "logits_hf.npy")[: len(ids)]) < 1e-5
    assert np.array_equal(first, second)
