"""Frames, errors and heartbeats between a process and its child, and how a child starts and ends."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from quarrel.child import spawn
from quarrel.child.heartbeat import Heart, Watch
from quarrel.child.phase import PhaseClock, compile_begins, compile_ends
from quarrel.child.spawn import link_of
from quarrel.child.wire import Link, Wire, pack_error, unpack_error
from quarrel.errors import ContextOverflow, EngineLost, QuarrelError, QueueFull, RequestError, UnsupportedOp


@pytest.fixture(name="ends")
def _ends() -> Iterator[tuple[Link, Link]]:
    one, two = map(Link, socket.socketpair())
    yield one, two
    one.close()
    two.close()


def test_frames_arrive_whole_and_in_order(ends: tuple[Link, Link]) -> None:
    here, there = ends
    bodies = [b"", b"a", bytes(range(256)) * 20_000]
    sender = threading.Thread(target=lambda: [here.send(body) for body in bodies])
    sender.start()
    assert [there.receive() for _ in bodies] == bodies
    sender.join()
    here.cut()
    assert there.receive() is None


def test_a_frame_cut_off_is_none_and_one_too_long_is_refused(ends: tuple[Link, Link]) -> None:
    here, there = ends
    here.send(b"12345")
    with pytest.raises(OverflowError, match="a frame of 5 bytes, wanted at most 4"):
        there.receive(max_bytes=4)
    one, two = socket.socketpair()
    with one, two:
        one.sendall(b"\x00\x00\x00\x09half")
        one.shutdown(socket.SHUT_WR)
        assert Link(two).receive() is None


def test_a_deadline_ends_sending_and_receiving(ends: tuple[Link, Link]) -> None:
    here, there = ends
    for late in (lambda end: there.receive(end), lambda end: here.send(bytes(1 << 24), end)):
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            late(began + 0.05)
        assert time.monotonic() - began < 60


def test_messages_of_many_threads_share_frames(ends: tuple[Link, Link]) -> None:
    here, there = map(Wire, ends)
    threads = [threading.Thread(target=lambda i=i: [here.send("n", i, j) for j in range(300)]) for i in range(4)]
    for thread in threads:
        thread.start()
    frames, found = there.frames(), []
    while len(found) < 1200:
        found += next(frames)
    assert sorted(found) == [["n", i, j] for i in range(4) for j in range(300)]
    here.send_all([["a"], ["b"]])
    here.flush(5)
    assert next(frames) == [["a"], ["b"]]
    here.close()
    assert next(frames, None) is None
    there.close()


def test_errors_keep_their_name() -> None:
    for error in (QueueFull("x", 0.5), ContextOverflow("y"), EngineLost("z")):
        again = unpack_error(pack_error(error))
        assert (type(again), str(again)) == (type(error), str(error))
    assert getattr(unpack_error(pack_error(QueueFull("x", 0.5))), "retry_after", None) == 0.5
    assert type(unpack_error(pack_error(UnsupportedOp("cpu", "op", "spec", [])))) is QuarrelError
    for stranger in ("print", "installing", "annotations"):
        assert type(unpack_error([stranger, "x", None, []])) is QuarrelError
    assert unpack_error(pack_error(RequestError("n_ctx is 0", "n_ctx"))).field == "n_ctx"
    assert str(unpack_error(pack_error(KeyError()))) == "KeyError()"


def test_a_phase_begins_when_it_is_entered() -> None:
    now = [0.0]
    clock = PhaseClock("loading", lambda: now[0])
    now[0] = 3.0
    assert clock.read() == ("loading", 3.0)
    clock.enter("stepping")
    now[0] = 5.0
    assert clock.read() == ("stepping", 2.0)
    with clock.compiling():
        now[0] = 50.0
        assert clock.read() == ("compiling", 45.0)
    assert clock.read() == ("stepping", 0.0)


def test_a_compiler_within_a_step_sets_the_phase_of_its_thread() -> None:
    clock, other = PhaseClock("stepping"), PhaseClock("stepping")

    def step() -> None:
        clock.follow_compiler()
        compile_begins()

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    compile_begins()  # a thread without a clock
    assert clock.read()[0] == "compiling"
    other.follow_compiler()
    compile_begins()
    compile_ends()
    assert other.read()[0] == "stepping"
    assert clock.read()[0] == "compiling"


def test_a_heart_reports_the_clock_that_it_has() -> None:
    beats: list[str] = []
    heart = Heart(PhaseClock("loading"), lambda phase, seconds: beats.append(phase))
    heart.clock = PhaseClock("idle")
    end = time.monotonic() + 60
    while "idle" not in beats and time.monotonic() < end:
        time.sleep(0.05)
    assert beats[0] == "loading"
    assert beats[-1] == "idle"


@pytest.mark.parametrize(
    ("phase", "stuck"), [("stepping", True), ("compiling", False), ("loading", False), ("idle", False)]
)
def test_only_a_step_takes_too_long(phase: str, stuck: bool) -> None:
    found: list[float] = []
    told = threading.Event()

    def tell(seconds: float) -> None:
        found.append(seconds)
        told.set()

    watch = Watch(1e9, tell, clock=lambda: 0.0)
    watch._progress = -1000.0  # nothing was heard before
    watch.heard(phase, 99)  # type: ignore[arg-type]
    watch.limit = 10.0
    assert told.wait(60 if stuck else 1.2) == stuck
    watch.end()
    assert found == ([99.0] if phase == "stepping" else [])


def test_silence_is_found() -> None:
    found = threading.Event()
    watch = Watch(0.4, lambda seconds: found.set())
    assert found.wait(60)
    watch.end()


def test_a_watch_that_was_stopped_itself_blames_nobody() -> None:
    found: list[float] = []
    now = [0.0]
    watch = Watch(10.0, found.append, lambda: now[0])
    now[0] = 3600.0
    time.sleep(1.2)
    assert not found
    watch.end()


def main(descriptor: int) -> None:
    """What the children of these tests run: answers each frame, and hangs at b"hang"."""
    link = link_of(descriptor)
    while (body := link.receive()) is not None:
        if body == b"hang":
            time.sleep(60)
        link.send(body[::-1] + str(os.getpid()).encode())
    sys.exit(3)


def test_a_child_answers_and_ends_with_its_link() -> None:
    child = spawn.spawn("tests.child.test_child")
    child.link.send(b"abc")
    assert child.link.receive(time.monotonic() + 60) == b"cba" + str(child.pid).encode()
    assert child.running
    child.link.cut()
    assert child.end(30) == 3
    assert not child.running
    child.link.close()


def test_a_child_that_hangs_is_killed() -> None:
    child = spawn.spawn("tests.child.test_child")
    child.link.send(b"hang")
    with pytest.raises(TimeoutError):
        child.link.receive(time.monotonic() + 0.2)
    assert child.end(0.2) == -9
    assert child.end() == -9
    child.link.close()
