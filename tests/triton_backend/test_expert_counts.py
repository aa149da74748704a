"""Load statistics of experts, counted on the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from quarrel.gguf import GGMLType
from quarrel.ops.contract import RawWeight
from quarrel.ops.moe import ROUTE, RouteSpec
from quarrel.triton_backend.backend import TritonBackend
from quarrel.triton_backend.experts import choose, route
from quarrel.triton_backend.formats.int8x2 import int8x2_rows, words
from quarrel.triton_backend.runtime.launch import INTERPRETED, launch
from tests.expert_counts import check_counts
from tests.triton_backend.cases import EVERYTHING


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # the interpreter's largest of nothing but NaN
@pytest.mark.parametrize("architecture", ["granitehybrid", *(["nemotron_h_moe"] if EVERYTHING else [])])
def test_every_choice_is_counted(backend: TritonBackend, architecture: str) -> None:
    check_counts(backend, architecture)


def test_rows_that_pad_a_batch_are_not_counted() -> None:
    device = "cpu" if INTERPRETED else "cuda"
    ids, counts = (torch.zeros(8 if d is torch.int32 else 5, dtype=d, device=device) for d in (torch.int32, torch.int64))
    weights, real_tokens = torch.zeros(8, device=device), torch.tensor([3], dtype=torch.int32, device=device)
    logits = torch.arange(20, dtype=torch.float32, device=device).remainder(7)
    shape = choose.Shape(5, 2, "softmax", True, False, 1, 1, False)
    launch(
        route.route_rows, (1,), choice=choose.Choice(ids, weights, counts), real_tokens=real_tokens, logits=logits,
        PDL=False, bias=logits, gains=logits, tokens=4, scale=1.0, S=shape, PADDED=True, G=1, E=8, R=4,
    )  # fmt: skip
    assert int(counts.sum()) == 6
    assert counts.tolist() == np.bincount(ids[:6].cpu().numpy(), minlength=5).tolist()


@pytest.mark.parametrize(
    ("normed", "rated", "columns"),
    [(False, False, 64), (True, False, 64), (False, True, 96), (True, True, 96), (True, True, 160)],
    ids=["normed before", "normed beside", "one logit more", "both", "some of a tile"],
)
@pytest.mark.parametrize(
    "spec",
    [
        RouteSpec(256, 8, "sigmoid", scale=2.5, bias=True, n_groups=8, groups_used=4),
        RouteSpec(24, 5, "softmax_topk"),
    ],
)
def test_one_row_chooses_in_the_launch_that_makes_its_logits(
    spec: RouteSpec, normed: bool, rated: bool, columns: int
) -> None:
    """`rated`: a logit that takes no part, though it is the largest."""
    device = "cpu" if INTERPRETED else "cuda"
    rng = np.random.default_rng(3)
    gate = rng.normal(size=(spec.n_experts, columns)).astype(np.float32)
    gate[5] = gate[17]  # the lower one of equals is first
    gate[9] = 0.0
    x, bias = rng.normal(size=columns).astype(np.float32), rng.normal(size=spec.n_experts).astype(np.float32)
    bias[5] = bias[17] = 2.0
    logits, arrived, counts, ids, weights = (
        torch.zeros(n, dtype=dtype, device=device)
        for n, dtype in (
            (spec.n_experts, torch.float32), (1, torch.int32), (spec.n_experts, torch.int64), (spec.used, torch.int32),
            (spec.used, torch.float32),
        )
    )  # fmt: skip
    given = {"x": x, "gate": gate, "bias": bias}
    beside, rate = 100 * x, torch.full((1,), torch.nan, device=device)
    gain = rng.normal(size=columns).astype(np.float32)
    scaled = x * gain / np.sqrt((x.astype(np.float64) ** 2).mean() + 0.25)
    to, plain = torch.zeros(words(columns), dtype=torch.int32, device=device), torch.zeros(columns, device=device)
    launch(
        route.route_one, (spec.n_experts + normed + rated,), choice=choose.Choice(ids, weights, counts), logits=logits,
        arrived=arrived, gate_bias=logits, gains=logits, scale=spec.scale, K=columns, GATE_BIAS=False, W=64, PDL=False,
        warps=1,
        normed=route.Normed(to, plain, torch.from_numpy(gain).to(device), 0.25), ROUNDS=True, NORM=normed,
        rate=route.Rate(torch.from_numpy(beside).to(device), rate), RATED=rated,
        CHOOSES=True, **{name: torch.from_numpy(v).to(device) for name, v in given.items()}, **route._constants(spec),
    )  # fmt: skip
    np.testing.assert_allclose(logits.cpu().numpy(), gate @ (scaled if normed else x), rtol=1e-4, atol=1e-4)
    if rated:
        np.testing.assert_allclose(rate.cpu().numpy(), [beside @ (scaled if normed else x)], rtol=1e-4)
    if normed:
        np.testing.assert_allclose(plain.cpu().numpy(), scaled, rtol=1e-5)
        both = torch.zeros_like(to)
        launch(int8x2_rows, (1, 1), both, plain, K=columns, B=8, PDL=False)
        assert torch.equal(to, both)
    vectors = [RawWeight(GGMLType.F32, bias[None].view(np.uint8), spec.n_experts)] if spec.bias else []
    wanted_ids, wanted = ROUTE.reference(spec, logits.cpu().numpy()[None], *vectors)
    np.testing.assert_array_equal(ids.cpu().numpy(), wanted_ids[0])
    np.testing.assert_allclose(weights.cpu().numpy(), wanted[0], rtol=1e-6)
    assert counts.tolist() == np.bincount(wanted_ids[0], minlength=spec.n_experts).tolist()
    assert not arrived.any()


def _chosen_by_logits(found, left, S: tl.constexpr, E: tl.constexpr, USED: tl.constexpr):
    ids = choose.best_experts(left, S, USED)
    for j in tl.static_range(USED):
        tl.store(found + j, ids[j])
    for j in range(USED):
        tl.store(found + USED + j, choose.expert_at(left, j, S))
    choose.choose_left(left, S, 1, E)


@pytest.mark.parametrize(
    "spec",
    [
        RouteSpec(24, 5, "softmax_topk"),
        RouteSpec(8, 2, "softmax", scale=2.5),
        RouteSpec(100, 7, "sigmoid", True, 2.5, bias=True),
        RouteSpec(200, 8, "softmax"),
        RouteSpec(40, 4, "sigmoid"),
    ],
    ids=lambda s: f"{s.gate}{s.n_experts}",
)
@pytest.mark.parametrize("odd", [0.0, float("nan"), float("-inf")], ids=str)
def test_experts_that_choose_themselves_find_what_is_stored(spec: RouteSpec, odd: float) -> None:
    assert route.may_leave(spec)
    device, n = "cpu" if INTERPRETED else "cuda", spec.n_experts
    z = np.random.default_rng(7).normal(size=n).astype(np.float32)
    z[[2, 6]], z[1] = 4.0, odd  # the lower one of equals is first
    bias = np.random.default_rng(8).uniform(-0.1, 0.1, n).astype(np.float32)
    bias[[2, 6]] = 0.2
    found, ids = (torch.zeros(count, dtype=torch.int32, device=device) for count in (2 * spec.used, spec.used))
    weights, counts = torch.zeros(spec.used, device=device), torch.zeros(n, dtype=torch.int64, device=device)
    logits, shift = (torch.from_numpy(v).to(device) for v in (z, bias))
    left = choose.Left(logits, choose.Choice(ids, weights, counts), shift, logits, spec.scale)
    constants = route._constants(spec)
    kernel = InterpretedFunction(_chosen_by_logits) if INTERPRETED else triton.jit(_chosen_by_logits)
    launch(kernel, (1,), found, left, S=constants["S"], E=constants["E"], USED=spec.used, warps=1)
    assert torch.equal(found, ids.repeat(2))
    assert ids[:2].tolist() == [2, 6]
    assert odd == 0.0 or 1 not in ids.tolist()
    assert counts.tolist() == np.bincount(ids.cpu().numpy(), minlength=n).tolist()
    if np.isfinite(odd):
        vectors = [RawWeight(GGMLType.F32, bias[None].view(np.uint8), n)] if spec.bias else []
        wanted_ids, wanted = ROUTE.reference(spec, z[None], *vectors)
        np.testing.assert_array_equal(ids.cpu().numpy(), wanted_ids[0])
        np.testing.assert_allclose(weights.cpu().numpy(), wanted[0], rtol=1e-6)
