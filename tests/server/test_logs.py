"""Lines of the access log leave later, all of them, and wait for nobody."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import threading

from quarrel.server import logs
from quarrel.server.logs import Later


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("x", logging.INFO, "", 0, text, None, None)


def test_every_line_is_there_in_its_order_when_it_is_closed() -> None:
    out = io.StringIO()
    handler = Later(out)
    for i in range(1000):
        handler.emit(record(str(i)))
    handler.close()
    assert out.getvalue().split() == [str(i) for i in range(1000)]


def test_a_line_that_cannot_be_written_ends_no_others(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(logging, "raiseExceptions", False)
    out = io.StringIO()
    handler = Later(out)
    handler.emit(logging.LogRecord("x", logging.INFO, "", 0, "%d", ("one",), None))
    handler.emit(record("two"))
    handler.close()
    assert out.getvalue() == "two\n"


def test_a_reader_that_stands_still_costs_lines_and_no_time(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(logs, "MOST", 10)
    stands, goes = threading.Event(), threading.Event()

    class Stuck(io.StringIO):
        def write(self, text: str) -> int:
            stands.set()
            goes.wait(60)
            return super().write(text)

    out = Stuck()
    handler = Later(out)
    handler.emit(record("first"))
    assert stands.wait(60)
    for i in range(25):
        handler.emit(record(f"line {i}"))
    goes.set()
    handler.close()
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["first", "line 0"]
    assert lines[-1] == "15 lines were lost: nobody read them"
    assert len(lines) == 12


def test_a_reader_that_has_gone_ends_nothing() -> None:
    out = io.StringIO()
    handler = Later(out)
    out.close()
    handler.emit(record("nobody hears"))
    handler.close()
    assert not handler._thread.is_alive()


SCRIPT = """
import logging, os, subprocess, sys, warnings
from quarrel.server.logs import JSONLines, json_stderr
with json_stderr() as stream:
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JSONLines())
    logging.getLogger().addHandler(handler)
    logging.getLogger("uvicorn.error").warning("two\\nlines")
    logging.getLogger("quarrel.access").warning("%s", '{"path": "/a", "status": 200}')
    warnings.warn("careful")
    subprocess.run([sys.executable, "-c", "raise ValueError('of a child')"])
    os.write(2, b"\\xff raw\\n")
    try:
        1 / 0
    except ZeroDivisionError:
        logging.exception("broken")
print("plain", file=sys.stderr)
"""


def test_every_line_is_json_and_a_traceback_one_of_them() -> None:
    lines = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stderr.splitlines()
    assert lines.pop() == "plain"  # the block has ended
    rows = [json.loads(line) for line in lines]
    assert all({"time", "level", "logger"} <= row.keys() for row in rows)
    said = {row["logger"]: row for row in rows}
    assert said["uvicorn.error"]["message"] == "two\nlines"
    assert (said["quarrel.access"]["path"], said["quarrel.access"]["status"]) == ("/a", 200)
    assert "ZeroDivisionError" in said["root"]["traceback"]
    raw = "\n".join(row["message"] for row in rows if row["logger"] == "stderr")
    assert all(text in raw for text in ("UserWarning: careful", "ValueError: of a child", "\ufffd raw"))


def test_a_server_that_cannot_start_says_so_in_json() -> None:
    command = [sys.executable, "-m", "quarrel", "serve", "--log-format", "json", "--models-dir", "/no/such"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "is no folder" in json.loads(ended.stderr)["message"]
