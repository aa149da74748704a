"""The custom operators from plain PyTorch: their results against the contracts' references, and under torch.compile."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from quarrel.errors import RequestError
from quarrel.gguf import GGMLType
from quarrel.interop import call, torch_ops
from quarrel.interop.call import Prepared
from quarrel.ops import draw
from quarrel.ops.attention import AttentionSpec, attention_reference
from quarrel.ops.contract import KVArrays, RawWeight, rel_error
from quarrel.ops.linear import LINEAR, LINEAR_ADD, LinearAddSpec, LinearSpec, linear_reference
from quarrel.ops.moe import ExpertDownSpec, ExpertUpSpec, expert_down_reference, expert_up_reference
from quarrel.triton_backend.attention.split_starts import split_starts
from quarrel.triton_backend.formats.pack import view
from quarrel.triton_backend.inputs import item_starts
from quarrel.triton_backend.runtime.launch import launch
from quarrel.triton_backend.runtime.site import Batch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ops = torch.ops.quarrel


def on(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(array)).to(DEVICE)


def packed(weight: RawWeight) -> torch.Tensor:
    return ops.pack(on(weight.raw), weight.type.name, weight.k)


class Linear(torch.nn.Module):
    """As a program that serves models with PyTorch holds one of its maps."""

    def __init__(self, weight: RawWeight, bias: np.ndarray | None = None) -> None:
        super().__init__()
        self.format, self.n = weight.type.name, len(weight.raw)
        self.register_buffer("weight", packed(weight))
        self.register_buffer("bias", None if bias is None else on(bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.linear(x, self.weight, self.format, self.n, self.bias)


@pytest.mark.parametrize("format", torch_ops.FORMATS_TAKEN)
def test_a_linear_map_in_every_format(format: str) -> None:
    rng = np.random.default_rng(1)
    weight = draw.weight(rng, GGMLType[format], 35, 256)
    x, bias = draw.activations(rng, 3, 256), rng.standard_normal(35).astype(np.float32)
    (want,) = linear_reference(LinearSpec(weight.type, 35, 256), x, weight)
    got = Linear(weight, bias)(on(x).view(1, 3, 256))
    assert got.shape == (1, 3, 35)
    assert rel_error(got[0].cpu().numpy() - bias, want) < 1e-5


def test_modules_compile_whole() -> None:
    rng = np.random.default_rng(2)
    up, down = draw.weight(rng, GGMLType.Q4_K, 256, 256), draw.weight(rng, GGMLType.Q6_K, 64, 256)
    gain = on(rng.standard_normal(256).astype(np.float32))
    first, second = Linear(up), Linear(down)

    def block(x: torch.Tensor) -> torch.Tensor:
        return second(torch.nn.functional.silu(first(ops.rms_norm(x, gain, 1e-5)))) * 2

    x = on(draw.activations(rng, 2, 256))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own, about Python and about itself
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
        for rows in (x, x.repeat(3, 1)):
            assert torch.equal(compiled(rows), block(rows))


def test_operators_and_their_fakes_agree() -> None:
    rng = np.random.default_rng(3)
    weight = draw.weight(rng, GGMLType.Q8_0, 32, 64)
    x = on(draw.activations(rng, 2, 64))
    for op, args in (
        (ops.linear, (x, packed(weight), "Q8_0", 32)),
        (ops.rms_norm, (x, on(np.ones(64, np.float32)), 1e-6)),
        (ops.pack, (on(weight.raw), "Q8_0", 64)),
    ):
        torch.library.opcheck(op.default, args, test_utils=("test_schema", "test_faketensor"))


def test_experts() -> None:
    rng = np.random.default_rng(4)
    up = ExpertUpSpec(GGMLType.Q8_0, 4, 2, 64, 96, "silu")
    down = ExpertDownSpec(GGMLType.Q5_0, 4, 2, 96, 64)
    gates, ups, downs = (draw.weight(rng, s.type, s.rows, s.k) for s in (up, up, down))
    x = draw.activations(rng, 3, 96)
    ids = np.stack([rng.permutation(4)[:2] for _ in range(3)]).astype(np.int32)
    weights = rng.random((3, 2), dtype=np.float32)
    (y,) = expert_up_reference(up, x, ids, gates, ups)
    (want,) = expert_down_reference(down, y, ids, weights, downs)
    tensors = [packed(w) for w in (gates, ups, downs)]
    got = ops.experts(on(x), on(ids), on(weights), *tensors, "Q8_0", "Q5_0", 4, 64)
    assert rel_error(got.cpu().numpy(), want) < 1e-5


def test_paged_attention() -> None:
    rng = np.random.default_rng(5)
    spec = AttentionSpec(4, 2, 32, 0.2)
    cache = KVArrays(*(rng.standard_normal((24, 16, 2, 32), dtype=np.float32) for _ in range(2)))
    k_cache, v_cache = (on(a.transpose(0, 2, 1, 3)) for a in (cache.k, cache.v))
    table, kv_len = rng.permutation(24).reshape(2, 12).astype(np.int32), np.array([190, 37], np.int32)
    q = rng.standard_normal((2, 4, 32), dtype=np.float32)
    starts = np.array([0, 1, 2], np.int32)
    (want,) = attention_reference(spec, q.reshape(2, -1), starts, kv_len, table, cache)
    got = ops.attention_decode(on(q), k_cache, v_cache, on(table), on(kv_len), 0.2)
    assert rel_error(got.cpu().numpy().reshape(2, -1), want) < 1e-5
    q = rng.standard_normal((8, 4, 32), dtype=np.float32)
    starts = np.array([0, 1, 8], np.int32)
    (want,) = attention_reference(spec, q.reshape(8, -1), starts, kv_len, table, cache)
    got = ops.attention_prefill(on(q), k_cache, v_cache, on(table), on(starts), on(np.repeat(kv_len, 2))[::2], 0.2)
    assert rel_error(got.cpu().numpy().reshape(8, -1), want) < 1e-5
    for name, wrong in (
        ("query_start", (table, starts, kv_len[:1])),
        ("query_start", (table, starts[:2], kv_len)),
        ("block_table", (table[:1], starts, kv_len)),
    ):
        with pytest.raises(RequestError, match=f"^{name} is torch.int32"):
            ops.attention_prefill(on(q), k_cache, v_cache, *map(on, wrong), 0.2)
    with pytest.raises(RequestError, match=r"kv_len is torch.int32 \[1\], wanted \[2\]"):
        ops.attention_decode(on(q[:2]), k_cache, v_cache, on(table), on(kv_len[:1]), 0.2)
    with pytest.raises(RequestError, match="heads a multiple of n_kv"):
        ops.attention_decode(on(q[:2, :3]), k_cache, v_cache, on(table), on(kv_len), 0.2)


@pytest.mark.parametrize("format", ["Q8_0", "F16", "Q4_K"])
def test_products_of_many_rows_in_e4m3(format: str) -> None:
    rng = np.random.default_rng(7)
    weight = draw.weight(rng, GGMLType[format], 48, 256)
    x, bias, residual = draw.activations(rng, 300, 256), *(draw.activations(rng, n, 48) for n in (1, 300))
    (plain,) = linear_reference(LinearSpec(weight.type, 48, 256), x, weight)
    batch = Batch(300, 0, 0, False, True, 1)
    held = view(weight.type, 48, 256, packed(weight))
    half, added = on(x).half(), on(residual)
    for op, spec, given, arrays, want in (
        (LINEAR, LinearSpec(weight.type, 48, 256), (None, held), (half,), plain),
        (
            LINEAR_ADD,
            LinearAddSpec(LinearSpec(weight.type, 48, 256, bias=True), 0.5),
            (None, None, held, on(bias[0])),
            (added, half),
            residual + 0.5 * (plain + bias),
        ),
    ):
        built = Prepared(op, spec, given, "float16", half.device, float8=True)
        (first,), (second,) = built(arrays, batch), built(arrays, batch)  # the second finds the weight rounded
        assert torch.equal(first, second)
        error = rel_error(first.view(300, 48).float().cpu().numpy(), want)
        # The interpreter cuts where a GPU rounds.
        assert 5e-3 < error < 1e-1


def test_the_first_kernel_of_a_call_waits_for_what_ran_before_it() -> None:
    """On a GPU it would read tables and weights that the kernel ahead may still be writing."""
    told: list[bool | None] = []

    def recorded(kernel: Any, grid: Any, *args: Any, early: bool | None = None, **options: Any) -> None:
        told.append(early)
        launch(kernel, grid, *args, early=False, **options)

    weight = draw.weight(np.random.default_rng(9), GGMLType.Q8_0, 16, 64)
    held = view(weight.type, 16, 64, packed(weight))
    x = torch.ones(1, 64, device=DEVICE, dtype=torch.float16)
    built = Prepared(LINEAR, LinearSpec(weight.type, 16, 64), (None, held), "float16", x.device, launcher=recorded)
    built.generation = 9  # of devices where kernels start early
    for _ in range(2):
        built((x,), Batch(1, 0, 0, True, False, 1))
    assert told == [False, True] * 2  # the row is halved, then multiplied


def test_what_does_not_fit_is_refused() -> None:
    weight = packed(draw.weight(np.random.default_rng(6), GGMLType.Q4_K, 8, 256))
    x = torch.zeros(1, 256, device=DEVICE)
    with pytest.raises(RequestError, match="as torch.ops.quarrel.pack makes them of 9 rows"):
        ops.linear(x, weight, "Q4_K", 9)
    with pytest.raises(RequestError, match="activations are torch.float64"):
        ops.linear(x.double(), weight, "Q4_K", 8)
    with pytest.raises(RequestError, match=r"wanted uint8 \[n, 144\]"):
        ops.pack(weight.view(1, -1), "Q4_K", 256)
    with pytest.raises(RequestError, match=r"the bias is torch.float32 \[7\], wanted \[8\]"):
        ops.linear(x, weight, "Q4_K", 8, x[0, :7])
    with pytest.raises(RequestError, match=r"the weight is torch.float32 \[255\], wanted \[256\]"):
        ops.rms_norm(x, x[0, 1:], 1e-5)
    with pytest.raises(RequestError, match=r"weights is torch.float32 \[1, 3\], wanted \[1, 2\]"):
        ops.experts(x, torch.zeros(1, 2, dtype=torch.int32, device=DEVICE), x[:, :3], *[weight] * 3, "Q4_K", "Q4_K", 4, 2)


def test_what_is_built_stays_with_its_weight_and_goes_with_it() -> None:
    rng = np.random.default_rng(8)
    one, other = (draw.weight(rng, GGMLType.Q8_0, 16, 64) for _ in range(2))
    x = on(draw.activations(rng, 2, 64))
    held, bias = packed(one), torch.zeros(16, device=DEVICE, dtype=torch.float16)
    before = len(call._MADE)
    first = ops.linear(x, held, "Q8_0", 16, bias)
    assert torch.equal(ops.linear(x[:1], held, "Q8_0", 16, bias), first[:1])
    bias += 1  # read anew each time, as its type is not the kernels'
    assert torch.equal(ops.linear(x, held, "Q8_0", 16, bias), first + 1)
    assert len(call._MADE[held].by_use) == 1
    held.data = packed(other)  # the same tensor, elsewhere
    (want,) = linear_reference(LinearSpec(other.type, 16, 64), x.cpu().numpy(), other)
    assert rel_error(ops.linear(x, held, "Q8_0", 16).cpu().numpy(), want) < 1e-5
    (built,) = call._MADE[held].by_use.values()
    assert len(call._MADE) == before + 1
    del held
    assert len(call._MADE) == before
    assert not built._launches


@pytest.mark.parametrize("seqs", [1, 3, 40, 70])
def test_splits_are_found_on_the_device_as_on_the_host(seqs: int) -> None:
    lengths = np.random.default_rng(seqs).integers(1, 200_000, seqs).astype(np.int32)
    lengths[0] = (1, 128, 8192, 8193)[seqs % 4]
    starts, query_start = split_starts(on(lengths))
    each = np.arange(seqs + 1, dtype=np.int32)
    assert query_start.tolist() == each.tolist()
    assert starts.tolist() == item_starts(each, lengths).tolist()
