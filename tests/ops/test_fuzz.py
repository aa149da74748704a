"""A short, repeatable run of the fuzzer over every op on the CPU; `python -m fuzz.fuzz_ops` goes on as long as asked."""

from __future__ import annotations

import numpy as np
import pytest

from fuzz.fuzz_ops import fuzz_op
from quarrel.ops import ALL_OPS, EXTRA_OPS
from quarrel.ops.compare import check_case
from quarrel.ops.contract import Case, Op
from quarrel.ops.linear import ADD, AddSpec
from quarrel.ops.registry import backend

OPS = [*ALL_OPS.values(), *EXTRA_OPS.values()]


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_random_shapes_agree_with_the_reference(op: Op) -> None:
    fuzz_op(backend("cpu"), op, "float32", examples=8, seed=1)


class Off:
    """A backend whose every result is one part in a thousand too large."""

    def run_op(self, op, spec, inputs, compute):  # type: ignore[no-untyped-def]
        return tuple(np.asarray(x) * 1.001 for x in op.reference(spec, *inputs))

    def compute_of(self, choice):  # type: ignore[no-untyped-def]
        return choice


def test_a_backend_that_is_slightly_off_is_caught() -> None:
    with pytest.raises(AssertionError, match=r"add\.y is off by 1\.00e-03"):
        check_case(Off(), ADD, Case(AddSpec(64), {"T": 3}), "float32")  # type: ignore[arg-type]
