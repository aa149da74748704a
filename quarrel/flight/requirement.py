"""Whether pyarrow is there, and new enough to trust with what strangers send."""

from __future__ import annotations

import importlib.metadata
import re

from quarrel.errors import BackendUnavailable, installing

LEAST = (23, 0, 1)
"""The first release without CVE-2026-25087 in its IPC reader."""
WANTED = f"pyarrow 23.0.1 or newer: {installing('flight')}"


def need_arrow() -> None:
    """Raises BackendUnavailable with what to install."""
    try:
        version = importlib.metadata.version("pyarrow")
    except importlib.metadata.PackageNotFoundError:
        raise BackendUnavailable(f"Arrow is not installed; Flight, Parquet and Arrow files need {WANTED}") from None
    if tuple(int(n) for n in re.findall(r"\d+", version)[:3]) < LEAST:
        raise BackendUnavailable(f"pyarrow is {version}, which reads hostile streams unsafely; wanted {WANTED}")
