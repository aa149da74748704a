"""A backend for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quarrel.cpu_backend.backend import CpuBackend


@pytest.fixture(name="backend", scope="module")
def _backend() -> Iterator[CpuBackend]:
    backend = CpuBackend(threads=2)
    yield backend
    backend.close()
