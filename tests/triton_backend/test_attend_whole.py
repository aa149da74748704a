"""Whole prompts by PyTorch's attention: which steps it takes, that they match the reference, and what `explain` says."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch.nn.functional as F

from quarrel.ops.contract import rel_error
from quarrel.ops.kv import KVType
from quarrel.ops.step import AttentionChoice
from quarrel.triton_backend.attention import cudnn as attend_whole
from quarrel.triton_backend.attention.cudnn import prompts_of
from quarrel.triton_backend.backend import TritonBackend
from quarrel.triton_backend.step import TritonStep
from tests.triton_backend.test_step import LIMITS, PROGRAM, Reference, Weights, batch

HALF = 5e-3


@pytest.fixture(name="calls")
def _calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the queries that PyTorch has attended to, `[1, heads, rows, head_dim]`; small prompts count as long."""
    seen: list[tuple[int, ...]] = []
    given = F.scaled_dot_product_attention

    def spy(q, *rest, **options):  # type: ignore[no-untyped-def]
        seen.append(tuple(q.shape))
        return given(q, *rest, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    monkeypatch.setattr(attend_whole, "FROM", {"own": 0, "auto": 20, "cudnn": 9})
    monkeypatch.setattr(attend_whole, "ROUND", 16)
    return seen


def compiled(
    backend: TritonBackend, attention: AttentionChoice = "cudnn", deterministic: bool = False, kv: KVType = "auto"
) -> TritonStep:
    limits = dataclasses.replace(LIMITS, attention=attention, deterministic=deterministic, kv_cache=kv)
    return backend.compile(PROGRAM, Weights(), limits, "float16")


@pytest.mark.parametrize(("attention", "taken"), [("own", 0), ("auto", 1), ("cudnn", 2)])
def test_unasked_only_long_prompts_are_taken(
    backend: TritonBackend, calls: list[tuple[int, ...]], attention: AttentionChoice, taken: int
) -> None:
    step = compiled(backend, attention)
    for new in (19, 20):
        step(batch([(0, 0, new)], rows=[new - 1]), "hidden")
    assert len(calls) == 2 * taken  # two layers


def test_whole_prompts_match_the_reference(backend: TritonBackend, calls: list[tuple[int, ...]]) -> None:
    step, reference = compiled(backend), Reference()
    for parts, shapes in (
        ([(0, 0, 21)], [(1, 4, 32, 32)] * 2),  # rounded up
        ([(2, 0, 12), (6, 0, 20)], [(1, 4, 16, 32), (1, 4, 32, 32)] * 2),
        ([(0, 21, 1), (9, 0, 30), (2, 12, 1)], [(1, 4, 32, 32)]),  # the second layer has a window of 21
        ([(0, 22, 1), (2, 13, 4)], []),  # keys of a step before
        ([(12, 0, 12), (14, 0, 8)], []),  # one of them is short
    ):
        calls.clear()
        inputs = batch(parts, rows=list(range(sum(new for _, _, new in parts))), seed=len(parts))
        want = reference(inputs)
        assert rel_error(step(inputs, "hidden").hidden, want["hidden"]) < HALF  # type: ignore[arg-type]
        assert calls == shapes
    taken = [t for t in step.explain() if t.op == "attention"]
    assert [t.implementation for t in taken] == ["paged, split keys; whole prompts of 9 tokens and more by cuDNN"] * 2
    step.close()


def test_who_is_never_taken(backend: TritonBackend, calls: list[tuple[int, ...]]) -> None:
    for step in (compiled(backend, "own"), compiled(backend, deterministic=True), compiled(backend, kv="int8")):
        step(batch([(0, 0, 21)]), "hidden")
        assert not calls
        (declined,) = {t.declined for t in step.explain() if t.op == "attention"}
        wanted = step.limits.kv_cache == "int8"
        cudnn = "cuDNN: needs 16-bit arithmetic, and keys and values kept in it"
        assert [why for why in declined if why.startswith("cuDNN")] == ([cudnn] if wanted else [])
        step.close()


def test_prompts_of_a_batch() -> None:
    def found(new: list[int], kv: list[int], least: int = 4) -> tuple[tuple[int, int, int], ...]:
        return prompts_of(np.concatenate([[0], np.cumsum(new)]), np.array(kv), least)

    assert found([1, 5, 1, 4], [9, 5, 1, 4]) == ((1, 1, 5), (3, 7, 4))
    assert found([5, 4], [5, 5]) == ()
    assert found([5, 3], [5, 3]) == ()
    assert found([1, 1, 1, 1], [1, 2, 3, 4]) == ()
    assert found([5], [5], 0) == ()
