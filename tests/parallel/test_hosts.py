"""One model on several hosts of a Ray cluster, whose nodes are processes of this machine. Skipped (counted) without Ray."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import quarrel
from quarrel.child.wire import Link
from quarrel.errors import BackendUnavailable, EngineFault, RequestError
from quarrel.parallel import hosts
from tests.parallel.clusters import PATIENCE, cluster, processes, read

pytest.importorskip("ray", reason="Ray is not installed: several hosts are not tried")
pytest.importorskip("torch.distributed")
pytestmark = pytest.mark.filterwarnings("default")

OPTIONS: dict[str, Any] = {"backend": "cpu", "compute": "float32", "n_ctx": 256, "max_seqs": 3, "threads": 2}
PROMPTS = ["Once upon a time", "The king", [5] * 130, "A bird", "She said"]
ASK: dict[str, Any] = {"max_tokens": 100, "temperature": 0.0, "ignore_eos": True}
SHORT = 8
EVERYTHING = os.environ.get("QUARREL_TEST_ALL") == "1"


@pytest.fixture(name="cluster", scope="module")
def _cluster() -> Iterator[Any]:
    with cluster(3) as made:
        yield made


@pytest.fixture(name="alone", scope="module")
def _alone() -> list[tuple[int, ...]]:
    with quarrel.load("demo", **OPTIONS) as llm:
        return [r.token_ids for r in llm.generate(PROMPTS, **ASK)]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def far(cluster: Any) -> list[int]:
    """The processes that share a model on the nodes of the cluster."""
    nodes, found = [process.process.pid for node in cluster.list_all_nodes() for process in raylets(node)], []
    for pid, folder in processes():
        with contextlib.suppress(OSError):  # it has just ended
            if b"quarrel.parallel.worker" in read(folder / "cmdline") and parent(parent(pid)) in nodes:
                found.append(pid)
    return found


def raylets(node: Any) -> list[Any]:
    return node.all_processes.get("raylet", [])


def begins(llm: quarrel.LLM) -> list[tuple[int, ...]]:
    return [r.token_ids for r in llm.generate(PROMPTS, **{**ASK, "max_tokens": SHORT})]


def outcomes(llm: quarrel.LLM, strike: Any) -> list[Any]:
    """Of all prompts at once, tokens or what was raised; `strike` is called when the first token is there."""
    made: list[list[Any]] = [[] for _ in PROMPTS]
    first = threading.Event()

    def one(index: int) -> None:
        try:
            for chunk in llm.stream(PROMPTS[index], **ASK):
                first.set()
                if chunk.result is not None:
                    made[index].append(chunk.result.failure or chunk.result.token_ids)
        except quarrel.QuarrelError as error:
            made[index].append(error)

    threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    assert first.wait(PATIENCE)
    strike()
    deadline = time.monotonic() + PATIENCE
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), "a request hangs"
    assert all(len(ends) == 1 for ends in made), "a request is lost, or ended twice"
    return [ends[0] for ends in made]


def check_killed(cluster: Any, llm: quarrel.LLM, alone: Any, strike: Any) -> None:
    """Only requests of the step that was lost end, with a reason; the others, and later ones, have one process's tokens."""
    ends = outcomes(llm, strike)
    told = [end for end in ends if isinstance(end, Exception)]
    assert 0 < len(told) <= OPTIONS["max_seqs"]
    assert all(isinstance(end, EngineFault) and "device" in str(end) for end in told)
    assert all(isinstance(end, Exception) or end == wanted for end, wanted in zip(ends, alone))
    assert begins(llm) == [tokens[:SHORT] for tokens in alone]
    assert len(far(cluster)) == 2


@pytest.mark.timeout(900)  # of which 25 s are work; the nodes of a cluster and seven processes start on two cores
def test_two_hosts_of_two_members_and_what_becomes_of_requests_when_one_is_lost(cluster: Any, alone: Any) -> None:
    with quarrel.load("demo", **OPTIONS, hosts=cluster.address, pipeline_parallel=2, tensor_parallel=2) as llm:
        assert begins(llm) == [tokens[:SHORT] for tokens in alone]
        members = far(cluster)
        assert len(members) == 2
        check_killed(cluster, llm, alone, lambda: os.kill(members[0], signal.SIGKILL))
    assert far(cluster) == []


def test_a_stranger_at_the_port_is_sent_away(caplog: pytest.LogCaptureFixture) -> None:
    for said in (b"", b"GET / HTTP/1.1", b"[]", b'{"secret": "no", "rank": 1}', b'{"secret": "yes", "rank": 1}'):
        here, there = socket.socketpair()
        with here, there:
            Link(here).send(said)
            here.shutdown(socket.SHUT_WR)
            assert hosts._hello(there, "yes") is None
    assert "a stranger connected" in caplog.text


def test_a_cluster_without_the_hosts_is_refused_in_a_sentence(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "PLACE_SECONDS", 0.5)
    with pytest.raises(BackendUnavailable, match=r"no 9 hosts with 1 free CPU cores each.*use a smaller pipeline_parallel"):
        quarrel.load("demo", **OPTIONS, hosts=cluster.address, pipeline_parallel=9)
    with pytest.raises(RequestError, match="pipeline_parallel says how many do: 2 or more are wanted"):
        quarrel.load("demo", **OPTIONS, hosts=cluster.address)


LONG = pytest.mark.skipif(not EVERYTHING, reason="QUARREL_TEST_ALL is not set")


@pytest.mark.slow
@pytest.mark.timeout(900)
@LONG
def test_a_host_is_lost(cluster: Any, alone: Any) -> None:
    """The cluster has two nodes from then on."""

    def kill_node() -> None:
        """As a machine that is gone: all of its processes at once."""
        members = far(cluster)
        starter = parent(members[0])
        for pid in (parent(starter), starter, *members):
            os.kill(pid, signal.SIGKILL)

    with quarrel.load("demo", **OPTIONS, hosts=cluster.address, pipeline_parallel=2, tensor_parallel=2) as llm:
        check_killed(cluster, llm, alone, kill_node)
    assert far(cluster) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@LONG
def test_the_head_is_lost(cluster: Any, alone: Any) -> None:
    """The last test of this cluster. Ray carries no step: requests under way, and later ones, notice nothing."""
    with quarrel.load("demo", **OPTIONS, hosts=cluster.address, pipeline_parallel=2, tensor_parallel=2) as llm:
        (head,) = cluster.head_node.all_processes["gcs_server"]
        assert outcomes(llm, lambda: os.kill(head.process.pid, signal.SIGKILL)) == alone
        assert begins(llm) == [tokens[:SHORT] for tokens in alone]
