"""The trial of a layer in one launch (`bench/persistent.py`), so that it is right when a device is there to time it."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(name="bench")
def _bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("persistent")


@pytest.fixture(name="state")
def _state(bench: ModuleType) -> object:
    """A layer with v and down in Q6_K, and a gain behind it."""
    shape = bench.Shape(256, 256, 4, 1, 64, size=16, keys=64, words=8, programs=9, per=2)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return bench.State(shape, bench.layers_of(shape, 1, device), 37, device)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_layer_a_phase_at_a_time(bench: ModuleType, state: object) -> None:
    """The barriers between phases need programs that run at once; what lies between them does not."""
    calls = bench.calls_of(state, "layer", "the layer in five launches")
    assert [call.grid for call in calls] == [(8,), (6,), (4,), (8,), (4,), (8,)]
    want = bench.reference(state)
    bench.run(state, calls)
    assert bench.off(state, want) <= bench.LIMIT
    state.layers[0].gains[1][5] *= 2.0  # type: ignore[attr-defined]
    assert bench.off(state, bench.reference(state)) > bench.LIMIT


def test_every_way_can_be_named_before_a_device_is_there(bench: ModuleType, state: object) -> None:
    calls = bench.distinct(state)
    assert {c.kernel.__name__ for c in calls} >= {"layer", "enter", "attend_one", "matvec3", "gate_up", "matvec"}
    for call in calls:
        assert len(call.args) + len(call.constants) == len(call.kernel.arg_names), call.kernel.__name__
