"""A composite as a backend takes it, and taken apart into smaller ops on the same backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quarrel.ops import ALL_OPS, EXTRA_OPS
from quarrel.ops.compare import errors
from quarrel.ops.contract import Case, Op
from quarrel.ops.registry import Implementation, Registry
from quarrel.ops.step import Backend

COMPOSITES = [op for op in {**ALL_OPS, **EXTRA_OPS}.values() if op.expand is not None]
CASES = [pytest.param(op, case, id=f"{op.name}-{i}") for op in COMPOSITES for i, case in enumerate(op.cases()[:2])]


def check_expansion(backend: Backend, op: Op, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways give the same within the contract's tolerance."""
    assert op.make is not None
    inputs = op.make(case, np.random.default_rng(0))
    whole = backend.run_op(op, case.spec, inputs, "float32")
    declined = []
    find = Registry.find

    def without(self: Registry, wanted: Op, spec: Any) -> tuple[Implementation | None, list[str]]:
        if wanted.name != op.name:
            return find(self, wanted, spec)
        declined.append(spec)
        return None, []

    with monkeypatch.context() as patch:
        patch.setattr(Registry, "find", without)
        parts = backend.run_op(op, case.spec, inputs, "float32")
    assert declined == [case.spec]
    found = errors(op, case.spec, whole, parts, case)
    assert max(found.values()) <= op.tolerance["float32"], found
