"""A Ray cluster whose nodes are processes of this machine, none of which outlives the tests."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 240.0
MARK = "RAY_TEST_CLUSTER"
ENVIRONMENT = {
    "RAY_memory_monitor_refresh_ms": "0",  # it ends workers where the rest of the machine uses its memory
    "RAY_health_check_timeout_ms": "60000",  # a node of a busy machine is not gone; one that is refuses at once
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",  # in which a head that is gone, or slow, ends nobody
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",
}


@contextlib.contextmanager
def cluster(nodes: int, **environment: str) -> Iterator[Any]:
    """Of so many nodes of two cores each. Where Ray itself does not start, the tests are skipped with its reason."""
    mark = secrets.token_hex(8)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, value in (ENVIRONMENT | environment | {MARK: mark}).items():
            patch.setenv(name, value)
        import ray  # which reads these
        from ray.cluster_utils import Cluster

        made, on_end = Cluster(), signal.getsignal(signal.SIGTERM)
        try:
            try:
                for _ in range(nodes):
                    made.add_node(wait=False, num_cpus=2, object_store_memory=80_000_000, include_dashboard=False)
                made.wait_for_nodes(timeout=PATIENCE)
            except Exception as error:
                first = str(error).strip().partition("\n")[0]
                pytest.skip(f"Ray does not start on this machine: {type(error).__name__}: {first}")
            yield made
        finally:
            try:
                ray.shutdown()
                made.shutdown()
            finally:
                signal.signal(signal.SIGTERM, on_end)  # which a driver of Ray takes
                end(mark)


def end(mark: str, patience: float = 10.0) -> None:
    """Nodes that are gone take their workers with them; what is left of those after a while is killed."""
    deadline = time.monotonic() + patience
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in marked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def marked(mark: str) -> list[int]:
    """Processes that have the mark of a cluster."""
    return [
        pid for pid, folder in processes() if f"{MARK}={mark}".encode() in read(folder / "environ") and pid != os.getpid()
    ]


def processes() -> list[tuple[int, Path]]:
    return [(int(folder.name), folder) for folder in Path("/proc").glob("[0-9]*")]


def read(path: Path) -> bytes:
    """Nothing of a process that has just ended."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
