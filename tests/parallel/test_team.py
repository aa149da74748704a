"""Two processes over gloo: the same logits and tokens as one, and what becomes of requests when one dies."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

from quarrel.cpu_backend.backend import CpuBackend
from quarrel.errors import EngineFault
from quarrel.gguf import GGUFFile
from quarrel.models import read_spec
from quarrel.ops.contract import rel_error
from quarrel.ops.step import Limits
from quarrel.parallel import Team, Work
from tests.models.test_reference_logits import chunk, wanted
from tests.paths import need_cases

pytest.importorskip("torch.distributed")


@pytest.mark.parametrize(("arch", "variant"), [("granitehybrid", "q4_k_m")])
def test_two_processes_give_the_logits_of_one_and_their_end_is_told(arch: str, variant: str) -> None:
    folder = need_cases(arch)
    path = folder / f"model-{variant}.gguf"
    ids = np.load(folder / "tokens.npy").reshape(-1).astype(np.int32)
    limits = Limits(max_tokens=len(ids), max_seqs=2, max_blocks_per_seq=8, n_blocks=8, block_size=16)
    backend = CpuBackend(threads=1)
    team = Team(Work((path,), "cpu", "float32", 2, "tensor", threads=1))
    with GGUFFile.open(path) as file:
        step = team.compile(backend, read_spec(file), file, limits, 64)
        logits = np.concatenate([step(chunk(ids, a, z), "logits").logits for a, z in ((0, 9), (9, 10), (10, len(ids)))])
        truth = wanted(folder, variant)
        assert rel_error(logits[-len(truth) :], truth) < 1e-5
        (other,) = team.members
        os.kill(other.process.pid, signal.SIGKILL)
        with pytest.raises(EngineFault, match="device 1 is lost"):
            while True:
                step(chunk(ids, 0, 9), "logits")
        step.close()
        assert other.process.poll() is not None
        assert not team.folder.exists()
        backend.close()
