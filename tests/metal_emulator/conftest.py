"""The emulator's tests run wherever it can: Linux with the ziglang wheel or a clang++."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.metal_emulator import available


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = available()
    here = Path(__file__).parent
    for item in items:
        if reason and here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))
