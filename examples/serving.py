"""A server for the examples that talk to one: that of $QUARREL_URL, or one that lives as long as its block."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def serving(model: str) -> Iterator[str]:
    """The base URL of a server that has the model."""
    if given := os.environ.get("QUARREL_URL"):
        yield given
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "quarrel", "serve", model, "--port", "0", "--data-dir", folder]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
            assert server.stderr is not None
            try:
                for line in server.stderr:
                    if found := re.search(r"listening on (http://\S+)", line):
                        yield found[1]
                        return
                sys.exit("the server did not start: quarrel serve says why")
            finally:
                server.terminate()
                server.stderr.close()
