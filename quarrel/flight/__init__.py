"""Arrow Flight: vectors to and from a Longbow store, bytes from process to process. Needs the extra `flight`."""

from __future__ import annotations

from quarrel.flight.requirement import need_arrow

need_arrow()

from quarrel.flight.client import LongbowClient  # noqa: E402
from quarrel.flight.connection import Access, Retry  # noqa: E402
from quarrel.flight.filters import Filter  # noqa: E402
from quarrel.flight.results import Dataset, Hits, Readiness  # noqa: E402
from quarrel.flight.rows import METRICS, Metric, vector_batch  # noqa: E402

__all__ = [
    "METRICS",
    "Access",
    "Dataset",
    "Filter",
    "Hits",
    "LongbowClient",
    "Metric",
    "Readiness",
    "Retry",
    "vector_batch",
]
