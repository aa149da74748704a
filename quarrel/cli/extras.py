"""What an installation may lack, told in one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from quarrel.errors import QuarrelError, installing


@contextmanager
def server_extra() -> Iterator[None]:
    """Around imports from `quarrel.server`."""
    try:
        yield
    except ImportError as error:
        raise QuarrelError(f"the server and its keys need {error.name}: {installing('server')}") from error
