"""A Python that has imported what takes long, and forks for each piece of code: each runs as in a Python of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LOOP = """
import json, os, sys
names = {}
exec(sys.argv[1], names)
for line in sys.stdin:
    code, folder, arguments = json.loads(line)
    if (child := os.fork()) == 0:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.argv[1:] = arguments
        exec(code, names)
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Forked:
    """`run` is `python -c` with arguments, behind what was imported."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process, self._folder = process, folder

    def run(self, code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps([code, str(self._folder), [str(a) for a in arguments]]) + "\n")
        stdin.flush()
        status = stdout.readline()
        assert status, "the process that forks has ended; its standard error is the test run's"
        told = [(self._folder / name).read_text() for name in ("out", "err")]
        return subprocess.CompletedProcess(code, int(status), *told)


@contextmanager
def forked(imports: str, environment: Mapping[str, Any], folder: Path) -> Iterator[Forked]:
    command = [sys.executable, "-c", LOOP, imports]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**environment}
    ) as process:
        yield Forked(process, folder)
        assert process.stdin is not None
        process.stdin.close()
