"""The shares of a model, run in lockstep on the CPU backend, against the reference logits."""

from __future__ import annotations

import numpy as np
import pytest

from quarrel.cpu_backend.backend import CpuBackend
from quarrel.gguf import GGUFFile
from quarrel.models import Tensors, assemble
from quarrel.models.shard import Split, shard
from quarrel.ops.contract import rel_error
from quarrel.ops.step import Limits
from tests.models.test_reference_logits import chunk, limit, specify, wanted
from tests.parallel.lockstep import Member, together
from tests.paths import need_cases

CASES = [
    ("mistral", "q4_k_m", 2, "tensor"),
    ("qwen3", "q6_k", 2, "tensor"),
    ("llama32", "q4_0x", 4, "tensor"),
    ("llama32", "f16", 3, "auto"),
    ("llama32", "q4_0x", 2, "layers"),
    ("qwen2", "q4_0x", 2, "tensor"),
    ("phi3", "q4_0x", 2, "tensor"),
    ("gemma3", "q4_0x", 2, "tensor"),
    ("nemotron", "q4_0x", 2, "tensor"),
    ("mixtral", "q4_k_m", 2, "tensor"),
    ("qwen3moe", "q4_k_m", 2, "tensor"),
    ("gptoss_trunc", "mxfp4-f16", 2, "tensor"),
    ("gptoss_trunc", "mxfp4-f16", 2, "layers"),
    ("nemotron_h_moe", "q4_0x", 2, "tensor"),
    ("granitehybrid", "q4_k_m", 2, "tensor"),
    ("granitehybrid", "q4_0x", 2, "layers"),
    ("deepseek2", "q4_k_m", 2, "tensor"),
    ("gemma4_moe", "q4_0x", 2, "tensor"),
    ("gemma4_e", "q4_0x", 2, "tensor"),
    ("gemma4_e", "q4_0x", 3, "layers"),
    ("gemma3n", "q4_0x", 2, "tensor"),
    ("gemma3n", "q4_0x", 2, "layers"),
    ("glm47flash", "q4_0x", 2, "layers"),
    ("qwen35", "q4_0x", 2, "tensor"),
    ("qwen35moe", "q4_0x", 2, "tensor"),
    ("qwen3next", "q4_0x", 2, "tensor"),
    ("qwen3next", "q4_k_m", 2, "layers"),
    ("lfm2moe", "q4_0x", 2, "tensor"),
    ("falcon_h1", "q4_0x", 2, "tensor"),
    ("muse_glimmer", "q4_0x", 2, "tensor"),
    ("mamba", "q4_0x", 2, "tensor"),
    ("mamba2", "q4_k_m", 2, "tensor"),
    ("cohere2", "q4_k_m", 2, "tensor"),
    ("olmo3", "q4_0x", 2, "tensor"),
    ("glm4", "q4_0x", 2, "tensor"),
    ("granite_swa", "q4_0x", 2, "tensor"),
    ("minimax_m2", "q4_k_m", 2, "tensor"),
    ("llama4", "q4_k_m", 2, "tensor"),
    ("glm4moe", "q4_k_m", 2, "tensor"),
    ("hunyuan_dense", "q4_0x", 2, "layers"),
]


@pytest.mark.parametrize(("arch", "variant", "ranks", "split"), CASES)
def test_shares_add_up_to_the_model(arch: str, variant: str, ranks: int, split: Split) -> None:
    folder = need_cases(arch)
    ids = np.load(folder / "tokens.npy").reshape(-1).astype(np.int32)
    limits = Limits(max_tokens=len(ids), max_seqs=2, max_blocks_per_seq=8, n_blocks=8, block_size=16)
    with GGUFFile.open(folder / f"model-{variant}.gguf") as file:

        def member(group: Member) -> tuple[np.ndarray, int]:
            spec, tensors = shard(specify(file, folder, variant), Tensors(file), group.rank, ranks, split)
            backend = CpuBackend(threads=1)
            backend.join(group)
            step = backend.compile(assemble(spec, tensors), tensors, limits, "float32")
            pieces = [step(chunk(ids, a, z), "logits").logits for a, z in ((0, 9), (9, 10), (10, len(ids)))]
            weights = step.memory().weights
            step.close()
            backend.close()
            return np.concatenate(pieces), weights

        found = together(ranks, member)
    truth = wanted(folder, variant)
    for logits, _ in found:
        assert rel_error(logits[-len(truth) :], truth) < limit(arch, variant)
    assert all(np.array_equal(found[0][0], logits) for logits, _ in found)
