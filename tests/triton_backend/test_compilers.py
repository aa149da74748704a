"""Processes that compile kernels ahead: their order, their end, and what becomes of work that goes wrong."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from quarrel.triton_backend.runtime.compile import Compilers

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")


def writing(path: Path, text: str, after: Path | None = None) -> Callable[[], object]:
    """A job that adds `text` to a file, once another one is there."""

    def job() -> None:
        while after is not None and not after.exists():
            time.sleep(0.001)
        with path.open("a") as file:
            file.write(text)

    return job


def gone(compilers: Compilers) -> bool:
    """Whether no process is left, within a generous time."""
    until = time.monotonic() + 60
    while not all(child.ended for child in compilers.children) and time.monotonic() < until:
        time.sleep(0.005)
    return all(child.ended for child in compilers.children)


def test_jobs_run_in_order_and_what_is_waited_for_comes_first(tmp_path: Path) -> None:
    out, start = tmp_path / "out", tmp_path / "start"
    jobs = {"a": writing(out, "a", start)} | {name: writing(out, name) for name in "bcd"}
    compilers = Compilers(jobs, processes=1)
    compilers.first(["d"])
    start.touch()
    for wanted in ("d", "abc"):
        compilers.wait(wanted)
    assert out.read_text() in ("adbc", "dabc")  # `a` may have begun before
    assert gone(compilers)


def test_a_job_that_raises_and_one_that_kills_its_process_hold_nobody_up(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    jobs = {"raises": lambda: 1 // 0, "a": writing(out, "a"), "dies": die, "b": writing(out, "b")}
    compilers = Compilers(jobs, processes=1)
    compilers.wait(jobs)
    assert out.read_text() == "a"  # the only process has died: `b` is compiled where it is launched
    assert gone(compilers)


def test_closing_ends_the_work_at_once(tmp_path: Path) -> None:
    never = tmp_path / "never"
    compilers = Compilers({str(i): writing(tmp_path / "out", "", never) for i in range(8)}, processes=2)
    compilers.close()
    compilers.wait(map(str, range(8)))
    assert gone(compilers)


def test_a_process_that_has_just_ended_is_not_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is another one that has its number by then. One job of an H200's check met "No such process"."""
    waitpid, closing, complaints = os.waitpid, [], []
    monkeypatch.setattr(threading, "excepthook", complaints.append)

    def waits(pid: int, how: int) -> tuple[int, int]:
        found = waitpid(pid, how)
        closing.append(threading.Thread(target=compilers.close))
        closing[0].start()
        closing[0].join(0.2)
        return found

    monkeypatch.setattr(os, "waitpid", waits)
    compilers = Compilers({"a": writing(tmp_path / "out", "a", tmp_path / "go")}, processes=1)
    (tmp_path / "go").touch()
    assert gone(compilers)
    closing[0].join()
    assert not complaints


def test_a_child_keeps_no_file_of_its_parent(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with (tmp_path / "held").open("w"):
        kept = lambda: out.write_text(str(len(os.listdir("/proc/self/fd"))))  # noqa: E731
        Compilers({"kept": kept}, processes=1).wait(["kept"])
    assert int(out.read_text()) <= 3 + 2 + 2  # standard streams, two pipes, the listing and the file


def test_where_no_process_can_be_started_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    Compilers({"a": lambda: None}).wait("a")
