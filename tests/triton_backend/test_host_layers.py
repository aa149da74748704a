"""Layers on the host beside the device's: what crosses arrives, and the logits are the model's."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from quarrel.cpu_backend.backend import CpuBackend
from quarrel.gguf import GGUFFile
from quarrel.models import Tensors, assemble
from quarrel.models.stages import borders, two_stages
from quarrel.ops.contract import rel_error
from quarrel.ops.step import Limits
from quarrel.parallel.host_layers import compile_stages
from quarrel.triton_backend.backend import TritonBackend
from tests.models.test_reference_logits import chunk, limit, specify
from tests.paths import need_cases


@pytest.mark.parametrize(("arch", "cuts"), [("llama32", (0, 3, 4)), ("gemma4_e", (0, 2))])
def test_the_host_hands_its_layers_results_to_the_device(backend: TritonBackend, arch: str, cuts: tuple[int, ...]) -> None:
    folder = need_cases(arch)
    ids = np.load(folder / "tokens.npy").reshape(-1).astype(np.int32)[: cuts[-1]]
    limits = Limits(max_tokens=16, max_seqs=2, max_blocks_per_seq=8, n_blocks=8, block_size=16)
    host = CpuBackend(threads=1)
    with GGUFFile.open(folder / "model-q4_0x.gguf") as file:
        tensors = Tensors(file)
        program = assemble(specify(file, folder, "q4_0x"), tensors)
        step = compile_stages(two_stages(program, borders(program)[-2]), host, backend, tensors, limits, "float32")
        whole = host.compile(program, tensors, limits, "float32")
        for inputs in (chunk(ids, a, z) for a, z in pairwise(cuts)):
            found, want = step(inputs, "logits").logits, whole(inputs, "logits").logits
            assert rel_error(found, want) < limit(arch, "q4_0x")  # type: ignore[arg-type]
        step.close()
    host.close()
