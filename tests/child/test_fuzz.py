"""A short run of `python -m fuzz.wire`."""

from __future__ import annotations

from fuzz.wire import fuzz


def test_frames_come_back_as_they_were_and_changed_ones_are_refused() -> None:
    refused, read = fuzz(60, 0)
    assert refused + read == 60
    assert refused > 0 < read
