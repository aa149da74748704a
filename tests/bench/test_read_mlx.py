"""The read bandwidth under MLX."""

from __future__ import annotations

from quarrel.bench import bandwidth
from tests.mlx_backend.cases import running


def test_a_backend_on_metal_is_measured_by_mlx(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(bandwidth, "DEVICE_BYTES", 1 << 20)
    with running() as backend:
        median, speeds = bandwidth.read_bandwidth(backend, 3)
    assert len(speeds) == 3
    assert min(speeds) <= median <= max(speeds)
    assert min(speeds) > 0
