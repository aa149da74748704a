"""The backend runs on Metal where there is any, else its kernels run on the emulator, every access checked."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

from quarrel.mlx_backend.backend import MlxBackend, create
from tests.mlx_backend.emulated import CHECKED, installed


@pytest.fixture(name="backend")
def _backend() -> Iterator[MlxBackend]:
    if mx.metal.is_available():
        yield create()
        return
    with installed(CHECKED):
        yield create()
