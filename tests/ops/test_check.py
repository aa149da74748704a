"""QUARREL_CHECK: a sound backend passes, and a wrong op is named with its place and its error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import quarrel
from quarrel.engine import SamplingParams
from quarrel.errors import QuarrelError, UnsupportedOp
from quarrel.llm import LLM
from quarrel.ops import reference
from quarrel.ops.check import CheckedStep
from quarrel.ops.contract import Concrete, KVArrays, Op
from quarrel.ops.step import ComputeChoice
from tests.paths import need_cases
from tests.reference_backend import ReferenceBackend

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


class OpByOp(ReferenceBackend):
    """Takes primitives only, and gets one op wrong by a factor."""

    def __init__(self, wrong: str = "", factor: float = 1.0, shift: int = 0) -> None:
        super().__init__()
        self.wrong, self.factor, self.shift = wrong, factor, shift
        self.ran: set[str] = set()

    def run_op(
        self, op: Op, spec: object, inputs: Sequence[Concrete], compute: ComputeChoice = "auto"
    ) -> tuple[Concrete, ...]:
        if op.expand is not None:
            raise UnsupportedOp(self.name, op.name, spec, ["primitives only"])
        self.ran.add(op.name)
        results = reference.run_op(op, spec, inputs)
        return tuple(self._spoil(r) for r in results) if op.name == self.wrong else results

    def _spoil(self, result: Concrete) -> Concrete:
        if isinstance(result, KVArrays):
            return KVArrays(result.k * np.float32(self.factor), result.v)
        assert isinstance(result, np.ndarray)
        if result.dtype.kind == "i":
            return result + np.int32(self.shift)
        spoiled: Any = result * np.float32(self.factor)
        return spoiled


@pytest.fixture(autouse=True)
def _checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARREL_CHECK", "1")


def load(backend: ReferenceBackend, arch: str = "llama32") -> LLM:
    return quarrel.load(need_cases(arch, "model-q4_0x.gguf"), backend=backend, n_ctx=64, max_seqs=2)


@pytest.mark.parametrize("arch", ["llama32", "granitehybrid"])
def test_a_sound_backend_passes_and_gives_the_same_tokens(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(OpByOp(), arch) as llm:
        assert isinstance(llm._loop.engine and llm._loop.engine.step, CheckedStep)
        assert len(llm.explain().choices) > 10  # though nothing has run
        result = llm.generate([5, 6, 7], GREEDY)
        again = llm.generate([5, 6, 7, *result.token_ids], GREEDY)
        assert llm._loop.engine is not None
        assert llm._loop.engine.step.explain()
        assert llm._loop.engine.step.memory().cache > 0
    monkeypatch.delenv("QUARREL_CHECK")
    with load(OpByOp(), arch) as llm:
        wanted = llm.generate([5, 6, 7], GREEDY)
        assert wanted.token_ids == result.token_ids
        assert llm.generate([5, 6, 7, *result.token_ids], GREEDY).token_ids == again.token_ids


def test_composites_that_are_declined_are_expanded() -> None:
    backend = OpByOp()
    with load(backend) as llm:
        llm.generate([5], GREEDY)
    assert {"norm", "linear", "rope", "kv_append", "attention", "sample"} <= backend.ran
    assert not any(op in backend.ran for op in ("norm_linear", "rope_append"))


@pytest.mark.parametrize(
    ("op", "place"),
    [("linear", r"blk\.0\.attn"), ("norm", r"blk\.0\.attn"), ("kv_append", r"blk\.0\.attn"), ("gated", r"blk\.0\.ffn")],
)
def test_a_wrong_op_is_named_where_it_first_goes_wrong(op: str, place: str) -> None:
    with load(OpByOp(op, 1.001)) as llm, pytest.raises(QuarrelError) as found:
        llm.generate([5, 6, 7], GREEDY)
    text = str(found.value)
    assert found.match(
        rf"^{place}.*: {op} on reference is 0\.00\d+ away from its reference, allowed 2e-06 in float32, for "
    )
    assert "Spec(" in text


def test_an_error_within_the_tolerance_passes() -> None:
    with load(OpByOp("linear", 1 + 1e-6)) as llm:
        assert llm.generate([5, 6, 7], GREEDY).finish_reason == "length"


def test_a_wrong_draw_is_found() -> None:
    for params in (GREEDY, SamplingParams(temperature=1.0, seed=1)):
        with (
            load(OpByOp("sample", shift=1)) as llm,
            pytest.raises(QuarrelError, match="output: sample on reference is inf away"),
        ):
            llm.generate([5, 6, 7], params)


def test_an_op_that_nobody_takes_is_said() -> None:
    class Without(OpByOp):
        def run_op(
            self, op: Op, spec: object, inputs: Sequence[Concrete], compute: ComputeChoice = "auto"
        ) -> tuple[Concrete, ...]:
            if op.name == "attention":
                raise UnsupportedOp(self.name, op.name, spec, ["no"])
            return super().run_op(op, spec, inputs, compute)

    with load(Without()) as llm, pytest.raises(QuarrelError, match="no implementation of attention"):
        llm.generate([5], GREEDY)
