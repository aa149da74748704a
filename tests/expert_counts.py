"""How often each expert of a reference model is chosen, by the references and by a step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quarrel.gguf import FORMATS, GGUFFile
from quarrel.models import Tensors, assemble, read_spec
from quarrel.ops.contract import RawWeight, WeightRef
from quarrel.ops.moe import ROUTE
from quarrel.ops.reference import empty_cache, run_program
from quarrel.ops.step import Backend, CountsExperts, KeepsStates, Limits
from tests.models.test_reference_logits import chunk
from tests.paths import need_cases


class NoNumbers:
    """The weights of a file, but for one token's embedding in Q4_0, whose scales are NaN."""

    def __init__(self, tensors: Tensors, token: int) -> None:
        self._tensors, self._token = tensors, token

    def raw(self, ref: WeightRef) -> RawWeight:
        weight = self._tensors.raw(ref)
        if ref.name != "token_embd.weight":
            return weight
        rows = weight.raw.copy()
        rows[self._token].view(np.float16)[:: FORMATS[weight.type].nbytes // 2] = np.nan
        return RawWeight(weight.type, rows, weight.k)


def check_counts(backend: Backend, architecture: str) -> None:
    """A prompt, then one token: every layer's counts are those of the references' choices. Then a token without numbers:
    the states of its sequence are not finite, those of others are."""
    folder = need_cases(architecture, "model-q4_0x.gguf").parent
    ids = np.load(folder / "tokens.npy").reshape(-1).astype(np.int32)[:8]
    unused = next(id for id in range(100) if id not in ids)
    with GGUFFile.open(folder / "model-q4_0x.gguf") as file:
        tensors = Tensors(file)
        program = assemble(read_spec(file), tensors)
        routes = [n for n in program.nodes if n.op is ROUTE]
        caches = [empty_cache(c, 2, 16) for c in program.caches]
        states = [np.zeros((2, *s.shape), np.float32) for s in program.states]
        wants = replace(program, outputs={n.path: n.outputs[0] for n in routes})
        chosen = run_program(wants, tensors, caches, chunk(ids, 0, len(ids)), states)
        want = {n.path: np.bincount(chosen[n.path].reshape(-1), minlength=n.spec.n_experts) for n in routes}
        step = backend.compile(program, NoNumbers(tensors, unused), Limits(8, 2, 2, 2, 16), "float32")
        assert isinstance(step, CountsExperts)
        assert not any(counts.any() for counts in step.expert_counts().values())
        step(chunk(ids, 0, 7), "logits")
        step(chunk(ids, 7, 8), "logits")
        found = step.expert_counts()
        assert found.keys() == want.keys()
        for path, counts in found.items():
            assert counts.dtype == np.int64
            assert counts.tolist() == want[path].tolist(), path
        assert isinstance(step, KeepsStates)
        assert step.finite_states(1)
        step(chunk(np.array([unused], np.int32), 0, 1), "logits")
        assert step.finite_states(0)
        assert step.finite_states(1) == (not program.states)
        step.close()
