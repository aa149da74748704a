"""Whole prompts by PyTorch's attention: which steps it takes, that they match the reference, and what `explain` says."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch.nn.functional as F

from quarrel.gguf import GGMLType
from quarrel.ops.contract import WeightRef, rel_error
from quarrel.ops.embedding import embedding, gather_rows
from quarrel.ops.kv import KVType
from quarrel.ops.linear import add, linear, linear_add, norm_gate_up
from quarrel.ops.moe import ExpertDownSpec, ExpertUpSpec, RouteSpec, expert_down, expert_up, route
from quarrel.ops.norm import NormSpec, norm
from quarrel.ops.null import Builder
from quarrel.ops.program import Program
from quarrel.ops.step import AttentionChoice
from quarrel.triton_backend.attention import cudnn as attend_whole
from quarrel.triton_backend.attention.cudnn import LEAST_VALUES, prompts_of, tokens_from
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
    monkeypatch.setattr(attend_whole, "LEAST_VALUES", 0)
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


@pytest.mark.parametrize(("attention", "taken"), [("auto", 0), ("cudnn", 2)])
def test_prompts_of_a_model_with_little_work_a_launch_are_graphs(
    backend: TritonBackend,
    calls: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    attention: AttentionChoice,
    taken: int,
) -> None:
    """No graph holds a step with cuDNN: 4096 tokens of Granite-4-h-tiny waited for the host's 1,000 launches."""
    monkeypatch.setattr(attend_whole, "LEAST_VALUES", LEAST_VALUES)
    step = compiled(backend, attention)
    step(batch([(0, 0, 21)], rows=[20]), "hidden")
    assert len(calls) == taken
    step.close()


LAYERS = {
    # hidden width, width of a layer's dense maps, then experts, how many are used, and their width
    "Granite-4-h-tiny": (1536, 1024, 64, 6, 512, 0),
    "SmolLM2-135M": (576, 1536, 0, 0, 0, 0),
    "TinyLlama": (2048, 5632, 0, 0, 0, 4096),
    "Mistral-7B": (4096, 14336, 0, 0, 0, 4096),
    "Mixtral": (4096, 1024, 8, 2, 14336, 4096),
}


@pytest.mark.parametrize("name", LAYERS)
def test_cudnn_takes_4096_rows_where_the_device_is_slower_than_the_host(name: str) -> None:
    """By what a node multiplies; steps that are no graphs anyway, and whoever asks, have it."""
    nodes = layer(*LAYERS[name]).nodes
    assert tokens_from("auto", nodes, captured=True) == LAYERS[name][-1]
    assert tokens_from("auto", nodes, captured=False) == 4096
    assert tokens_from("cudnn", nodes, captured=True) == 2048
    assert tokens_from("own", nodes, captured=False) == 0


def layer(width: int, ff: int, experts: int, used: int, each: int, _: int) -> Program:
    """What follows attention, in nodes for all that a token's vector passes."""
    b, four, pre = Builder(), GGMLType.Q4_K, NormSpec("rms", width, 1e-5)
    h = embedding(b, b.input("ids"), WeightRef("embd", four, 1 << 18, width))
    gains = [WeightRef("gain", GGMLType.F32, 1, width)]
    gate, up = (WeightRef(n, four, ff, width) for n in ("gate", "up"))
    y = norm_gate_up(b, pre, h, gains, (gate, None), (up, None), "silu")
    h = linear_add(b, h, y, WeightRef("down", four, width, ff))
    if experts:
        x = norm(b, pre, h, gains[0])
        logits = linear(b, x, WeightRef("router", GGMLType.F32, experts, width), out="f32")
        ids, weights = route(b, RouteSpec(experts, used, "softmax_topk"), logits)
        gates, ups = (WeightRef(n, four, experts * each, width) for n in ("gates", "ups"))
        y = expert_up(b, ExpertUpSpec(four, experts, used, each, width, "silu"), x, ids, gates, ups)
        downs = WeightRef("downs", four, experts * width, each)
        h = add(b, h, expert_down(b, ExpertDownSpec(four, experts, used, width, each), y, ids, weights, downs))
    return b.program(hidden=gather_rows(b, h, b.input("out_rows")))


def test_steps_are_graphs_where_cudnn_takes_no_layer(backend: TritonBackend, calls: list[tuple[int, ...]]) -> None:
    """Of a model with sinks, say: whether it takes prompts at all is known when the step is made."""
    for step, taken in ((compiled(backend), 9), (compiled(backend, kv="int8"), 0)):
        assert step._cudnn_from == taken
        step.close()


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
