"""HEAD_LINEAR of one token: whole rows of K, the splits of attention, and nothing of another head."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quarrel.gguf import GGMLType
from quarrel.ops.contract import Case, Compute
from quarrel.ops.heads import HEAD_LINEAR, HeadLinearSpec
from quarrel.triton_backend.attention.records import Partial
from quarrel.triton_backend.backend import TritonBackend
from quarrel.triton_backend.formats.int8x2 import words
from quarrel.triton_backend.formats.table import NATIVE
from quarrel.triton_backend.linear.heads import head_rows, rows_alone
from quarrel.triton_backend.runtime.arrays import Planes
from quarrel.triton_backend.runtime.launch import INTERPRETED, cdiv, launch
from tests.triton_backend.cases import COMPUTES, DEVICE, error_of

NAN = float("nan")


@pytest.mark.parametrize("type", NATIVE, ids=lambda t: t.name)
def test_every_format_decodes_whole_rows(backend: TritonBackend, type: GGMLType) -> None:
    """Of 70 rows, so that the last program has few; three blocks of 256 columns are padded to four."""
    case = Case(HeadLinearSpec(type, 2, 70, 768), {"T": 1})
    assert error_of(backend, HEAD_LINEAR, case, "float16") <= HEAD_LINEAR.tolerance["float16"]


@pytest.mark.parametrize(
    ("type", "n", "k", "rest"),
    [
        (GGMLType.Q8_0, 70, 192, 64),  # padded to 256
        (GGMLType.F16, 33, 192, 16),
        (GGMLType.F32, 5, 80, 7),  # no whole blocks of 32
        (GGMLType.Q4_0, 1, 32, 0),
        (GGMLType.F16, 3, 2304, 0),  # two rows to a program
    ],
)
@pytest.mark.parametrize("compute", [c for c in COMPUTES if c != "float32"])
def test_a_head_reads_nothing_of_another(
    backend: TritonBackend, type: GGMLType, n: int, k: int, rest: int, compute: Compute
) -> None:
    spec = HeadLinearSpec(type, 3, n, k, rest)
    assert HEAD_LINEAR.make is not None
    x, weight = HEAD_LINEAR.make(Case(spec, {"T": 1}), np.random.default_rng(1))
    broken = np.array(x).reshape(3, k + rest)
    broken[[0, 2]] = NAN
    (right,) = backend.run_op(HEAD_LINEAR, spec, (x, weight), compute)
    (got,) = backend.run_op(HEAD_LINEAR, spec, (broken.reshape(1, -1), weight), compute)
    right, got = (np.asarray(y).reshape(3, rest + n) for y in (right, got))
    assert np.array_equal(got[1], right[1])
    assert np.isnan(got[[0, 2]]).all()
    limit = HEAD_LINEAR.tolerance[compute]
    assert error_of(backend, HEAD_LINEAR, Case(spec, {"T": 1}), compute) <= limit


@pytest.mark.parametrize("splits", [1, 2, 3, 8, 9, 17, 64])
@pytest.mark.parametrize("form", ["plain", "both"])
def test_rows_add_the_splits_of_their_head(splits: int, form: str) -> None:
    """Those of items 3 and on; what is around them is NaN."""
    heads, n, k, first = 3, 96, 64, 3
    rng = np.random.default_rng(splits)
    top, total = rng.normal(size=(splits, heads)) * 3, rng.uniform(1, 30, (splits, heads))
    sums = rng.normal(size=(splits, heads, k)) * total[..., None]
    w = rng.normal(size=(heads, n, k)).astype(np.float16)
    weight = np.exp2(top - top.max(0))
    x = (sums * weight[..., None]).sum(0) / (total * weight).sum(0)[:, None]  # [heads, k]
    all_sums = np.full((first + splits + 70, heads, k), NAN, np.float32)
    all_tops = np.full((first + splits + 70, heads, 2), NAN, np.float32)
    all_sums[first : first + splits] = sums
    all_tops[first : first + splits] = np.stack([top, total], -1)
    given = x if splits == 1 else np.full_like(x, NAN)

    def there(a: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(a)).to(DEVICE)

    y = there(np.full(heads * n, NAN, np.float16))
    to = torch.full((words(heads * n),), -1, dtype=torch.int32, device=DEVICE)
    starts = there(np.array([first, first + splits], np.int32))
    planes, rounds = Planes(*(there(w),) * 4), form == "both"
    rows, blocks, warps = rows_alone(k, rounds)
    launch(
        head_rows, (cdiv(n, rows), heads), y, to, there(given.astype(np.float16)), planes,
        Partial(there(all_sums), there(all_tops), starts), starts, N=n, K=k, HEADS=heads, REST=0, WIDE_REST=1, FORMAT="F16",
        COMBINES=True, FORM=form, BN=rows, NB=blocks, warps=warps, early=not INTERPRETED,
    )  # fmt: skip
    want = np.einsum("hnk,hk->hn", w.astype(np.float64), x.astype(np.float16).astype(np.float64)).ravel()
    got = y.cpu().numpy().astype(np.float64)
    assert np.abs(got - want).max() < 2e-3 * np.abs(want).max()
    if rounds:
        blocks = heads * n // 32
        codes = to.cpu().numpy()[: 4 * 4 * blocks].view(np.int8).reshape(2, 2, blocks, 16)  # part, high or low, block
        scales = to.cpu().numpy()[16 * blocks : 17 * blocks].view(np.float32)
        values = (codes[:, 0] * 128.0 + codes[:, 1]) * scales[:, None]  # [part, block, 16]
        assert np.abs(values.transpose(1, 0, 2).ravel() - got).max() < 1e-4 * np.abs(got).max()


def test_programs_of_one_token() -> None:
    assert rows_alone(192, False) == (32, 8, 4)
    assert rows_alone(512, False) == (16, 16, 4)
    assert rows_alone(512, True) == (32, 16, 8)
    assert rows_alone(2304, False) == (2, 128, 4)
