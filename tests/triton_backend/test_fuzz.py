"""A short, repeatable run of `python -m fuzz.ops --backend triton` over ops that take the interpreter little time."""

from __future__ import annotations

import pytest

from fuzz.ops import OPS, fuzz_op
from quarrel.triton_backend.backend import TritonBackend


@pytest.mark.parametrize("name", ["norm", "linear", "route", "sample"])
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_random_shapes_agree_with_the_reference(backend: TritonBackend, name: str) -> None:
    fuzz_op(backend, OPS[name], "float32", 2, seed=3)
