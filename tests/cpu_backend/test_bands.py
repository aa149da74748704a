"""No kernel writes outside its buffers: bands round every buffer of the arena stay as they were."""

from __future__ import annotations

import numpy as np
import pytest

from quarrel.cpu_backend import run_op
from quarrel.cpu_backend.backend import CpuBackend
from quarrel.cpu_backend.plan import Arena, Plan, Slot
from quarrel.cpu_backend.step import Compiled
from quarrel.ops import ALL_OPS, EXTRA_OPS
from quarrel.ops.step import ComputeChoice

OPS = {**ALL_OPS, **EXTRA_OPS}
BAND = 1024
MARGIN = 256
"""Behind a value: vectors may be loaded from there, but nothing may be stored."""


class Bands:
    """Buffers with a band before and one behind, never used twice."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.places: list[tuple[int, int]] = []
        self.compiled: list[Compiled] = []
        self._of_value = False
        place = Plan.place

        def allocate(arena: Arena, size: int) -> Slot:
            begin = arena.size + BAND
            self.places.append((begin, begin + size - MARGIN * self._of_value))
            whole = -(-size // Arena.ALIGN) * Arena.ALIGN
            arena.size = begin + whole + BAND
            return Slot(begin, whole)

        def placing(plan: Plan, *args, **named):  # type: ignore[no-untyped-def]
            self._of_value = True
            try:
                return place(plan, *args, **named)
            finally:
                self._of_value = False

        def keeping(*args, **named):  # type: ignore[no-untyped-def]
            self.compiled.append(Compiled(*args, **named))
            return self.compiled[-1]

        patch.setattr(Arena, "allocate", allocate)
        patch.setattr(Arena, "free", lambda arena, slot: None)
        patch.setattr(Plan, "place", placing)
        patch.setattr(run_op, "Compiled", keeping)

    def broken(self) -> list[int]:
        """Where the last run wrote outside all buffers."""
        arena = self.compiled[-1].tables.arena
        outside = np.ones(len(arena), bool)
        for begin, end in self.places:
            outside[begin:end] = False
        return np.flatnonzero(outside & (arena != 0xFF)).tolist()


@pytest.mark.parametrize("compute", ["float32", "auto"])
@pytest.mark.parametrize("name", [name for name in OPS if name != "kv_append"])  # which writes to a cache alone
def test_bands_stay_as_they_were(
    backend: CpuBackend, name: str, compute: ComputeChoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = OPS[name]
    assert op.make is not None
    for case in op.cases()[:4]:
        with monkeypatch.context() as patch:
            bands = Bands(patch)
            backend.run_op(op, case.spec, op.make(case, np.random.default_rng(0)), compute)
            assert bands.places
            assert bands.broken() == [], case


def test_a_store_past_a_buffer_is_seen(backend: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    bands = Bands(monkeypatch)
    op = OPS["add"]
    case = op.cases()[0]
    backend.run_op(op, case.spec, op.make(case, np.random.default_rng(0)), "float32")  # type: ignore[misc]
    bands.compiled[-1].tables.arena[bands.places[0][1]] = 7
    assert bands.broken() == [bands.places[0][1]]
