"""The Metal emulator in MLX's place."""

from __future__ import annotations

from contextlib import AbstractContextManager

from tools.metal_emulator import Mode, Settings, install
from tools.metal_emulator.session import Session

CHECKED = Settings(mode=Mode.CHECK, typecheck=True)
"""Types, races, bounds, what was never written, divergence; a finding is raised."""
FAST = Settings(mode=Mode.FAST)


def installed(settings: Settings) -> AbstractContextManager[Session]:
    """Kernels called inside run under these settings."""
    return install(settings)
