"""What reads models does without the names that Windows lacks: they are taken away, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
START = """
import mmap, os, shutil, socket, subprocess, sys, tempfile, types
import numpy, gguf, tokenizers, sentencepiece, jinja2, tqdm  # these have ways of their own on Windows
held = []
windows = types.ModuleType("msvcrt")
windows.LK_NBLCK = 2
def locking(file, mode, count):
    if held:
        raise OSError("locked")
    held.append((mode, count, os.lseek(file, 0, os.SEEK_CUR)))
windows.locking = locking
sys.modules.update(fcntl=None, resource=None, termios=None, pwd=None, msvcrt=windows)
for name in ("O_CLOEXEC", "O_NONBLOCK", "O_NOFOLLOW", "pread", "fork", "sysconf", "sched_getaffinity", "getuid"):
    if hasattr(os, name):
        delattr(os, name)
for name in [name for name in vars(mmap) if name.startswith("MADV_")]:
    delattr(mmap, name)
"""


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", START + code]
    environment = {"PYTHONPATH": str(ROOT), "HOME": str(folder), "PATH": ""}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=250)


@pytest.mark.parametrize(("command", "said"), [("inspect", "92 tensors"), ("tokenize", "tale")])
def test_a_file_is_read(command: str, said: str, tmp_path: Path) -> None:
    words = [command, "demo", *(["a tale"] if command == "tokenize" else [])]
    done = run(f"from quarrel.cli import main\nsys.exit(main({words!r}))", tmp_path)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


def test_one_process_downloads(tmp_path: Path) -> None:
    code = """
from pathlib import Path
from quarrel.errors import DownloadError
from quarrel.gguf.lock import hold
path = Path("part")
path.write_bytes(b"half")
with path.open("ab") as one, path.open("ab") as two:
    hold(one, path)
    assert held == [(2, 1, 0)] and one.tell() == 4, (held, one.tell())
    try:
        hold(two, path)
    except DownloadError as error:
        print(error)
"""
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "another process is downloading part: wait for it\n"


def test_one_process_fills_a_target(tmp_path: Path) -> None:
    code = """
from quarrel.embed.lock import alone
from quarrel.errors import RequestError
with alone("a store"):
    try:
        with alone("a store"):
            pass
    except RequestError as error:
        print(error)
"""
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "another process is filling a store" in done.stdout
