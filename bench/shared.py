"""What the developers' benches share: their command line, JSON lines, synthetic models, and times of CUDA graphs."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from quarrel.bench.workload import Test

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path("/dev/shm")
"""Where model files go: in memory, so that no disk is measured."""
CASES = Path(os.environ.get("QUARREL_CASES", ROOT.parent / "shared" / "cases"))


def command_line(doc: str | None) -> argparse.ArgumentParser:
    """A parser that prints the module's docstring as it stands."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


class Notes:
    """Appends each result to a file as one line of JSON when it comes, so that a run that is cut off keeps what it had."""

    def __init__(self, path: Path) -> None:
        self._path, self._began = path, time.perf_counter()

    def say(self, **row: Any) -> None:
        """Adds the seconds since the start, prints the row and appends it."""
        text = json.dumps({"at": round(time.perf_counter() - self._began, 1)} | row)
        print(text, flush=True)
        with self._path.open("a", encoding="utf-8") as file:
            print(text, file=file)


def synthetic_command(name: str, path: Path, layers: int | None = None) -> list[str]:
    """The command that writes a model of random weights: `name` is SHAPE:QUANT or SHAPE:QUANT:LAYERS."""
    shape, quant, *cut = name.split(":")
    count = cut[0] if cut else layers
    command = [sys.executable, "-m", "tools.make_synthetic", shape, quant, str(path)]
    return command if count is None else [*command, "--layers", str(count)]


def synthetic(name: str, folder: Path, layers: int | None = None) -> Path:
    """The file of a model by its name (see `synthetic_command`), written if it is not there yet; or the path of a file."""
    if name.endswith(".gguf"):
        return Path(name)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name.replace(':', '-')}{'' if layers is None else f'-{layers}'}.gguf"
    if not path.exists():
        subprocess.run(synthetic_command(name, path, layers), cwd=ROOT, check=True)
    return path


def test_named(name: str) -> Test:
    """`pp4096`, `tg16`, or `tg16x8` for eight sequences, each behind a prompt of 128 tokens."""
    found = re.fullmatch(r"(pp|tg)(\d+)(?:x(\d+))?", name)
    if found is None:
        raise SystemExit(f"{name!r} is no test: use names such as pp4096, tg16 or tg16x8")
    if found[1] == "pp":
        return Test("prefill", int(found[2]))
    batch = int(found[3] or 1)
    return Test("decode", int(found[2]), 128 if batch > 1 else 0, batch)


def graph_us(call: Callable[[], Any], calls: int = 20, rounds: int = 5) -> float:
    """Microseconds of one call: a CUDA graph of several, the median of some replays."""
    import torch

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return round(median(times), 2)
