"""Linear maps of few outputs with float32 weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from quarrel.gguf import GGMLType
from quarrel.ops import draw
from quarrel.ops.linear import LINEAR, LinearSpec
from quarrel.triton_backend.backend import TritonBackend
from quarrel.triton_backend.experts import route
from quarrel.triton_backend.linear import narrow
from quarrel.triton_backend.linear.kernels import ByRows
from quarrel.triton_backend.linear.maps import UNLIMITED
from quarrel.triton_backend.runtime.arrays import Slot
from tests.triton_backend.cases import error_on
from tests.triton_backend.test_linear_kernels import Recorder, one, packed


@pytest.mark.parametrize(("n", "rows", "bias"), [(1, 1, False), (1, 6, True), (7, 3, False), (2, 130, False)])
def test_results_are_the_references(backend: TritonBackend, n: int, rows: int, bias: bool) -> None:
    """To float16's rounding of the result: weights are not rounded."""
    rng = np.random.default_rng(n)
    spec = LinearSpec(GGMLType.F32, n, 200, bias)
    x = draw.activations(rng, rows, 200).astype(np.float16).astype(np.float32)
    vectors = [draw.weight(rng, GGMLType.F32, 1, n, 1.0)] if bias else []
    given = (x, draw.weight(rng, GGMLType.F32, n, 200), *vectors)
    assert error_on(backend, LINEAR, spec, given, "float16") < 5e-4


def test_which_maps_it_takes() -> None:
    site = Recorder()
    assert ByRows(site, one(packed(1, 2048, "F32"))).describe() == "float32 rows from 1 rows"
    assert ByRows(site, one(packed(64, 2048, "F32"))).describe() == "float32 rows 1 to 128, exact tiles from 129 rows"
    assert narrow.declines(site, one(packed(513, 2048, "F32"))) == "needs at most 512 outputs, got 513"
    assert narrow.declines(site, one(packed(1, 2048, "F32"), residual=Slot(torch.empty(0)))) is not None
    # The same bits for any number of rows: only where one kernel takes them all.
    exact = replace(site, deterministic=True)
    assert narrow.declines(exact, one(packed(4, 2048, "F32"))) is None
    assert narrow.build(exact, one(packed(4, 2048, "F32"))).most == UNLIMITED
    assert narrow.declines(exact, one(packed(5, 2048, "F32"))) is not None
    for refused in (replace(site, compute="float32"), site):
        format = "F32" if refused is not site else "F16"
        assert narrow.declines(refused, one(packed(1, 2048, format))) is not None
    assert narrow.ROUTED == route.ROUTED
