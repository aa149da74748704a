"""A short, repeatable run of the fuzzer; `python -m fuzz.gguf` is the long one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fuzz.gguf import fuzz, read_whole, sound

PEAK = """
import re, sys
from pathlib import Path
from fuzz.gguf import fuzz, read_whole, sound
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
path = Path(sys.argv[1])
path.write_bytes(sound().data)
assert read_whole(path)
before = peak()
refused, read = fuzz(200, 2, path)
print(peak() - before)
"""


def test_the_seed_is_sound(tmp_path: Path) -> None:
    path = tmp_path / "sound.gguf"
    path.write_bytes(sound().data)
    assert read_whole(path)
    assert len(sound().fields) > 300


def test_mutants_are_refused_or_read(tmp_path: Path) -> None:
    refused, read = fuzz(1000, 1, tmp_path / "mutant.gguf")
    assert refused > 300
    assert read > 50


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")
def test_mutants_take_little_memory(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", PEAK, str(tmp_path / "mutant.gguf")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=root)
    assert int(done.stdout) <= 128 << 10
