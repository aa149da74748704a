"""`quarrel chat` in a terminal, with prompt_toolkit: what is typed, and what is shown."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.support import GREEDY, ROOT


class Screen:
    """A program in a terminal: what it writes, and keys for it."""

    def __init__(self, *words: str, **environment: str) -> None:
        import pty

        self._keys, theirs = pty.openpty()
        env = {**os.environ, "TERM": "xterm-256color", **environment}
        self.process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=env)
        os.close(theirs)
        self.text = ""

    def types(self, text: str) -> None:
        os.write(self._keys, text.encode())

    def shows(self, text: str, seconds: float = 60) -> None:
        """Waits until it stands there, behind what was waited for before."""
        end = time.monotonic() + seconds
        while text not in self.text:
            ready, _, _ = select.select([self._keys], [], [], max(0, end - time.monotonic()))
            assert ready, f"{text!r} was not shown, but {self.text[-2000:]!r}"
            data = os.read(self._keys, 65536)
            if b"\x1b[6n" in data:  # where is the cursor?
                os.write(self._keys, b"\x1b[1;1R")
            self.text += data.decode("utf-8", "replace")
        self.text = self.text.partition(text)[2]


@pytest.mark.skipif(sys.platform == "win32", reason="has no such terminals")
def test_a_conversation_in_a_terminal_has_a_system_message_and_is_saved(chatty: str, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    screen = Screen(sys.executable, "-m", "quarrel", "chat", chatty, *GREEDY)
    try:
        screen.shows("/help lists commands")
        screen.shows(">>>")
        screen.types("/sy")
        screen.shows("/system")  # the menu
        screen.types("\t be kind\r")
        screen.shows("(the system message is set)")
        for typed, said in (
            ("one", "12 tokens"),
            (f"/save {saved}", "(saved in"),
            ("/system", "(there is no system message now)"),
            ("/reset", "(forgotten)"),
            (f"/load {saved}", "(2 messages of"),
        ):
            screen.shows(">>>")
            screen.types(f"{typed}\r")
            screen.shows(said)
        screen.shows(">>>")
        screen.types("\x04")
        assert screen.process.wait(60) == 0
    finally:
        screen.process.kill()
        screen.process.wait()
    kept: list[dict[str, Any]] = json.loads(saved.read_text())
    assert [(m["role"], m["content"]) for m in kept[:2]] == [("system", "be kind"), ("user", "one")]
    assert kept[2]["role"] == "assistant"
