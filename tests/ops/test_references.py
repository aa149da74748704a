"""The NumPy bodies against PyTorch's own functions, which share no code with them."""

from __future__ import annotations

import numpy as np
import pytest

from quarrel.gguf import GGMLType, quantize
from quarrel.ops import ALL_OPS, EXTRA_OPS
from quarrel.ops.activation import GatedSpec, LargestSpec, gated_reference, largest_reference
from quarrel.ops.attention import AttentionSpec, attention_reference
from quarrel.ops.contract import Case, KVArrays, Op, RawWeight, rel_error
from quarrel.ops.draw import weight
from quarrel.ops.formats import WEIGHT_TYPES
from quarrel.ops.linear import LinearSpec, linear_reference
from quarrel.ops.norm import NormSpec, norm_reference
from quarrel.ops.reference import run_op
from quarrel.ops.rope import RopeSpec, rope_reference
from quarrel.ops.streams import MatchSpec, MixSpec, match_reference, mix_reference

torch = pytest.importorskip("torch")
F = torch.nn.functional

EVERY_CASE = [
    pytest.param(op, case, id=f"{op.name}-{i}")
    for op in {**ALL_OPS, **EXTRA_OPS}.values()
    for i, case in enumerate(op.cases())
]


def f32(values: np.ndarray) -> RawWeight:
    return RawWeight(GGMLType.F32, quantize(values.reshape(1, -1), GGMLType.F32), values.size)


@pytest.mark.parametrize(("op", "case"), EVERY_CASE)
def test_every_case_runs_and_fills_the_declared_axes(op: Op, case: Case) -> None:
    assert op.make is not None
    inputs = op.make(case, np.random.default_rng(1))
    results = run_op(op, case.spec, inputs)
    free: dict[str, int] = {}
    for param, given in zip(op.params(case.spec), inputs, strict=True):
        if isinstance(given, np.ndarray) and param.kind != "state":
            for axis, size in zip(param.dims(case.spec), given.shape, strict=True):
                assert free.setdefault(axis, size) == size if isinstance(axis, str) else axis == size
                if axis == "S1":
                    free.setdefault("S", size - 1)
    for param, got in zip(op.results(case.spec), results, strict=False):
        assert isinstance(got, np.ndarray)
        assert got.shape == tuple(free[a] if isinstance(a, str) else a for a in param.dims(case.spec))
        # An infinite logit has no probability, and one that is masked is infinite.
        assert np.isfinite(got).all() or case.dims.get("odd") or case.dims.get("masks")
    assert len(results) == len(op.results(case.spec)) + len(op.consumed)


@pytest.mark.parametrize("group", [1, 4])
def test_attention_without_extras_is_torch_sdpa(group: int) -> None:
    rng = np.random.default_rng(2)
    q_len, kv_len, n_kv, dim, size = 7, 45, 2, 64, 16
    spec = AttentionSpec(n_kv * group, n_kv, dim, 0.11)
    table = rng.permutation(6)[:3].astype(np.int32)[None]
    cache = KVArrays(*(rng.standard_normal((6, size, n_kv, dim), dtype=np.float32) for _ in range(2)))
    q = rng.standard_normal((q_len, spec.width), dtype=np.float32)
    (got,) = attention_reference(spec, q, np.array([0, q_len]), np.array([kv_len]), table, cache)
    keys, values = (torch.tensor(a[table[0]].reshape(-1, n_kv, dim)[:kv_len]).transpose(0, 1) for a in (cache.k, cache.v))
    mask = torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len)
    want = F.scaled_dot_product_attention(
        torch.tensor(q).view(q_len, -1, dim).transpose(0, 1), keys, values, mask, scale=spec.scale, enable_gqa=True
    )
    assert rel_error(got, want.transpose(0, 1).reshape(q_len, -1).numpy()) < 1e-6


def test_a_window_of_one_sees_only_itself() -> None:
    spec = AttentionSpec(2, 2, 16, 1.0, window=1)
    rng = np.random.default_rng(3)
    cache = KVArrays(*(rng.standard_normal((2, 16, 2, 16), dtype=np.float32) for _ in range(2)))
    q = rng.standard_normal((3, 32), dtype=np.float32)
    table = np.array([[1, 0]], np.int32)
    (got,) = attention_reference(spec, q, np.array([0, 3]), np.array([20]), table, cache)
    want = cache.v[table[0]].reshape(-1, 32)[17:20]
    assert rel_error(got, want) < 1e-6


def test_a_huge_sink_takes_all_the_weight() -> None:
    spec = AttentionSpec(1, 1, 16, 1.0, sinks=True)
    cache = KVArrays(np.ones((1, 16, 1, 16), np.float32), np.ones((1, 16, 1, 16), np.float32))
    args = (np.ones((1, 16), np.float32), np.array([0, 1]), np.array([9]), np.zeros((1, 1), np.int32), cache)
    assert abs(attention_reference(spec, *args, f32(np.array([1e4])))[0]).max() < 1e-6
    assert np.allclose(attention_reference(spec, *args, f32(np.array([-1e4])))[0], 1.0)


def test_norms_are_torchs() -> None:
    rng = np.random.default_rng(4)
    x, gain, bias = (rng.standard_normal(s, dtype=np.float32) for s in ((5, 96), (96,), (96,)))
    (rms,) = norm_reference(NormSpec("rms", 96, 1e-5), x, f32(gain))
    assert rel_error(rms, F.rms_norm(torch.tensor(x), [96], torch.tensor(gain), 1e-5).numpy()) < 1e-6
    (layer,) = norm_reference(NormSpec("layer", 96, 1e-5), x, f32(gain), f32(bias))
    assert (
        rel_error(layer, F.layer_norm(torch.tensor(x), [96], torch.tensor(gain), torch.tensor(bias), 1e-5).numpy()) < 1e-6
    )


def test_activations_are_torchs_and_never_overflow() -> None:
    gate, up = (np.random.default_rng(5).standard_normal((3, 50), dtype=np.float32) * 10 for _ in range(2))
    gate[0, :4] = [1e30, -1e30, 0.0, -745.0]
    with np.errstate(over="raise", invalid="raise"):
        (silu,) = gated_reference(GatedSpec("silu", 50), gate, np.ones_like(up))
    assert rel_error(silu, F.silu(torch.tensor(gate)).numpy()) < 1e-6
    (gelu,) = gated_reference(GatedSpec("gelu_tanh", 50), gate[1:], up[1:])
    assert rel_error(gelu, (F.gelu(torch.tensor(gate[1:]), approximate="tanh") * torch.tensor(up[1:])).numpy()) < 1e-6


@pytest.mark.parametrize("style", ["norm", "neox"])
def test_rope_keeps_lengths_and_relative_angles(style: str) -> None:
    spec = RopeSpec(style, 1, 8, 6)  # type: ignore[arg-type]
    freq = np.array([1.0, 0.3, 0.01], np.float32)
    rng = np.random.default_rng(6)
    q, k = (rng.standard_normal(8).astype(np.float32) for _ in range(2))

    def dot(p: int, r: int) -> float:
        (a,), (b,) = (rope_reference(spec, v[None], np.array([n]), freq) for v, n in ((q, p), (k, r)))
        assert np.allclose(a[0, 6:], q[6:])
        assert np.isclose(np.linalg.norm(a), np.linalg.norm(q), rtol=1e-6)
        return float(a[0] @ b[0])

    assert np.isclose(dot(0, 5), dot(12, 17), rtol=1e-5)
    assert not np.isclose(dot(0, 5), dot(0, 6), rtol=1e-3)


@pytest.mark.parametrize("type", WEIGHT_TYPES, ids=lambda t: t.name)
def test_linear_uses_the_formats_exact_values(type: GGMLType) -> None:
    rng = np.random.default_rng(7)
    w = weight(rng, type, 9, 512)
    dense = w.dense()
    assert 0.02 < dense.std() < 0.15, "drawn weights should look like weights"
    (got,) = linear_reference(LinearSpec(type, 9, 512), np.eye(512, dtype=np.float32)[:40], w)
    assert np.array_equal(got, dense[:, :40].T)


def test_streams_mix_as_gemma3n_predicts_and_corrects_and_the_largest_gates_are_torchs() -> None:
    rng = np.random.default_rng(3)
    rows, n, e = 5, 4, 48
    h, coefs, c = (rng.standard_normal(shape, dtype=np.float32) for shape in ((rows, n * e), (rows, n * n), (rows, e)))
    streams = torch.tensor(h).reshape(rows, n, e).permute(1, 0, 2)  # as transformers has them, [n, rows, e]
    by = torch.tensor(coefs).reshape(rows, n, n).permute(0, 2, 1)
    predicted = (streams.permute(1, 2, 0) @ by).permute(2, 0, 1) + streams
    (got,) = mix_reference(MixSpec(e, n, n), h, h, coefs)
    assert rel_error(got, predicted.permute(1, 0, 2).reshape(rows, -1).numpy()) < 1e-6
    changed = torch.tensor(c) - predicted[0]
    corrected = predicted + changed[None] * (torch.tensor(coefs[:, :n]) + 1.0).T[:, :, None]
    (got,) = mix_reference(MixSpec(e, n, 1, offset=1.0), got, changed.numpy(), coefs[:, :n])
    assert rel_error(got, corrected.permute(1, 0, 2).reshape(rows, -1).numpy()) < 1e-6
    (got,) = match_reference(MatchSpec(e, n, 1e-5), h[:, :e], 2 * h[:, e:])
    sizes = torch.tensor(got).reshape(rows, n, e).norm(dim=2)
    assert torch.allclose(sizes, sizes[:, :1])
    x = torch.tensor(h)
    bound = x.mean(1, keepdim=True) + 1.6448535 * x.std(1, keepdim=True, unbiased=False)
    assert rel_error(largest_reference(LargestSpec(n * e, 1.6448535), h)[0], F.relu(x - bound).numpy()) < 1e-6
