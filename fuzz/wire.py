"""Frames between a model's process and its server: values come back as they were, and changed bytes are refused.

    python -m fuzz.wire [--seconds 60] [--seed 0]

Frames of any sizes, in pieces of any sizes, arrive whole and in order. Values of the types that travel (chunks, results,
statistics, errors) come back equal. A frame with changed bytes gives an ordinary error or another value of the same types,
soon: never an object of a type that nobody asked for, and never a frame longer than its bound.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from fuzz.running import arguments, examples, rounds
from quarrel.child.wire import Link, Wire, pack_error, unpack_error
from quarrel.engine import Chunk, Result, Stats, Timings, TokenLogprob, Usage
from quarrel.errors import ContextOverflow, EngineLost, QuarrelError, QueueFull, RequestError
from quarrel.process.values import chunk_of, chunk_row, plain, typed

SECONDS = 5.0
MOST = 1 << 16
REFUSALS = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError)
"""What a frame that the other side never sends may raise where it is read, which ends that process's connection."""
TYPES: tuple[Any, ...] = (TokenLogprob, Result, Stats, Usage, Timings)
WHOLE = st.integers(0, 1 << 40)
SECOND = st.floats(0, 1e9)
TEXT = st.text(max_size=20)


def errors() -> Any:
    """Errors as they travel: by name, with a sentence."""
    plain_ones = st.builds(
        lambda kind, text: kind(text), st.sampled_from([ContextOverflow, EngineLost, RequestError]), TEXT
    )
    return plain_ones | st.builds(QueueFull, TEXT, SECOND)


def results() -> Any:
    """Anything that a continuation may end as."""
    id = st.integers(0, 1 << 20)
    logprob = st.builds(
        TokenLogprob, id, st.floats(-1e6, 0), st.lists(st.tuples(id, st.floats(-9, 0)), max_size=3).map(tuple)
    )
    usage = st.builds(Usage, WHOLE, WHOLE, WHOLE)
    timings = st.builds(Timings, SECOND, SECOND, SECOND, SECOND, WHOLE, WHOLE)
    reason = st.sampled_from(["stop", "length", "cancelled"])
    ids = st.lists(id, max_size=8).map(tuple)
    result = st.builds(Result, TEXT, ids, reason, usage, timings, st.integers(0, (1 << 64) - 1))
    return logprob, result


def chunks() -> Any:
    logprob, result = results()
    return st.builds(
        Chunk, TEXT, st.none() | st.integers(0, 1 << 20), st.integers(0, 7), st.none() | logprob, st.none() | result
    )


def check_values(drawn: tuple[Chunk, QuarrelError]) -> None:
    """There and back, as JSON."""
    chunk, error = drawn
    row = json.loads(json.dumps(chunk_row(3, chunk)))
    assert chunk_of(row) == chunk, "a chunk has changed"
    again = unpack_error(json.loads(json.dumps(pack_error(error))))
    assert (type(again), str(again)) == (type(error), str(error) or repr(error)), "an error has changed"
    if chunk.result is not None:
        assert typed(Result, json.loads(json.dumps(plain(chunk.result)))) == chunk.result, "a result has changed"


def check_frames(drawn: tuple[list[bytes], list[int]]) -> None:
    """Frames in pieces."""
    bodies, cuts = drawn
    data = b"".join(len(b).to_bytes(4, "big") + b for b in bodies)
    one, two = socket.socketpair()
    with one, two:

        def send() -> None:
            at = 0
            for cut in [*sorted(c % (len(data) + 1) for c in cuts), len(data)]:
                one.sendall(data[at:cut])
                at = max(at, cut)
            one.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        link = Link(two)
        found = []
        while (frame := link.receive(time.monotonic() + SECONDS)) is not None:
            found.append(frame)
        sender.join()
    assert found == bodies, "frames have changed on their way"


def check_mutant(drawn: tuple[bytes, Chunk, list[tuple[int, int]]]) -> bool:
    """Whether bytes that are no sound frame were refused; anything else must be of the types that are read."""
    noise, chunk, edits = drawn
    body = bytearray(json.dumps([chunk_row(1, chunk)]).encode())
    for at, byte in edits:
        body[at % len(body)] = byte
    data = noise or (len(body) + (edits[0][0] % 3 - 1 if len(edits) > 4 else 0)).to_bytes(4, "big") + bytes(body)
    return check_frame(data)


def check_frame(data: bytes) -> bool:
    """Whether these bytes, no sound frame perhaps, were refused."""
    one, two = socket.socketpair()
    start = time.process_time()
    with one, two:
        one.sendall(data)
        one.shutdown(socket.SHUT_WR)
        try:
            frame = Link(two).receive(time.monotonic() + SECONDS, MOST)
            if frame is None:
                return True
            assert len(frame) <= MOST
            for row in json.loads(frame):
                made = chunk_of(row)
                assert type(made) is Chunk, f"a chunk became {type(made)}"
        except REFUSALS as error:
            assert not isinstance(error, AssertionError)
            return True
        finally:
            taken = time.process_time() - start
            assert taken <= SECONDS, f"{taken:.1f} s"
    return False


def check_typed(drawn: tuple[Any, int]) -> None:
    """Any JSON in the place of a value: an ordinary error, or the type that was wanted."""
    data, which = drawn
    try:
        made = typed(TYPES[which], data)
    except REFUSALS:
        return
    assert isinstance(made, TYPES[which]), f"wanted {TYPES[which]}, got {type(made)}"


def check_messages(messages: list[list[Any]]) -> None:
    """Queued messages arrive in order, however they share frames."""
    one, two = map(Link, socket.socketpair())
    here, there = Wire(one), Wire(two)
    for message in messages:
        here.send(*message)
    here.flush(SECONDS)
    here.cut()
    found = [message for frame in there.frames() for message in frame]
    here.close()
    there.close()
    assert found == messages, "messages have changed on their way"


def fuzz(count: int, number: int) -> tuple[int, int]:
    """`count` of each check; how many changed frames were refused, and how many read."""
    counts = [0, 0]
    json_value = st.recursive(
        st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False) | TEXT,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
        max_leaves=12,
    )

    def one(drawn: tuple[bytes, Chunk, list[tuple[int, int]]]) -> None:
        counts[not check_mutant(drawn)] += 1

    edits = st.lists(st.tuples(st.integers(0, 1 << 12), st.integers(0, 255)), max_size=6)
    examples(st.tuples(chunks(), errors()), count, number, check_values)
    bodies = st.lists(st.binary(max_size=3000), max_size=6)
    examples(st.tuples(bodies, st.lists(st.integers(0, 1 << 16), max_size=8)), count, number, check_frames)
    examples(st.tuples(st.just(b"") | st.binary(min_size=1, max_size=40), chunks(), edits), count, number, one)
    examples(st.tuples(json_value, st.integers(0, len(TYPES) - 1)), count, number, check_typed)
    examples(
        st.lists(st.lists(json_value, min_size=1, max_size=4), max_size=6), max(1, count // 10), number, check_messages
    )
    return counts[0], counts[1]


def main(given: Sequence[str] | None = None) -> int:
    """Command line."""
    args = arguments(__doc__).parse_args(given)
    total = [0, 0]

    def one(number: int) -> None:
        for i, n in enumerate(fuzz(500, number)):
            total[i] += n

    count = rounds(args.seconds, args.seed, one)
    seeds = f"seeds {args.seed} to {args.seed + count - 1}"
    print(f"{sum(total)} changed frames and four times as many sound ones, {seeds}: {total[0]} refused, {total[1]} read")
    return 0


if __name__ == "__main__":
    sys.exit(main())
