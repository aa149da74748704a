"""What starts compute on a CPU: `import quarrel`, `quarrel generate` to its first word with compiled kernels and without,
and `quarrel llama-server` until it is ready. Two trees can be compared, in turns.

    python -m bench.engine.starts --out FILE.jsonl [--tree FOLDER ...] [--ways import,warm,cold,server] [--rounds 10]
        [--model FILE.gguf]

One line of JSON for each tree and way: the seconds that a process and its children used of all cores, and those that passed
until the first word (import: until the end), the least and the median of all rounds. What is used depends less on what else
the machine does. `cold` has an empty cache of kernels each time; Python's own cached bytecode is there in all.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from bench.serve.launched import computing, running, wait
from bench.shared import ROOT, Notes, command_line

WAYS = ("import", "warm", "cold", "server")
WORDS = ["Once upon a time", "--max-tokens", "1", "--temperature", "0", "--backend", "cpu", "--quiet"]


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tree", type=Path, action="append")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--model", type=Path, default=ROOT / "quarrel/demo/quarrel-demo-11M-Q8_0.gguf")
    args = parser.parse_args()
    notes, trees, ways = Notes(args.out), args.tree or [ROOT], args.ways.split(",")
    found: dict[tuple[Path, str], list[tuple[float, float]]] = {(t, w): [] for t in trees for w in ways}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(args.rounds + 1):
            for (tree, way), times in found.items():
                cache = Path(folder, str(trees.index(tree)), str(turn) if way == "cold" else "")
                time_taken = one(tree, way, str(args.model.resolve()), cache)
                if turn:  # the first fills the caches
                    times.append(time_taken)
    for (tree, way), times in found.items():
        used, passed = ([t[i] for t in times] for i in (0, 1))
        seconds = {
            name: {"least": round(min(v), 3), "median": round(median(v), 3)}
            for name, v in (("used", used), ("passed", passed))
        }
        cores = len(os.sched_getaffinity(0))
        notes.say(tree=tree.name, way=way, model=args.model.name, cores=cores, rounds=args.rounds, **seconds)
    return 0


def one(tree: Path, way: str, model: str, cache: Path) -> tuple[float, float]:
    """Seconds that were used, and that passed, of one start."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPATH": str(tree), "XDG_CACHE_HOME": str(cache), "PYTHONUNBUFFERED": "1"}
    if way == "server":
        return server(environment, model)
    command = ["-c", "import quarrel"] if way == "import" else ["-m", "quarrel", "generate", model, *WORDS]
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, *command], env=environment, stdout=subprocess.PIPE, cwd="/")
    assert process.stdout is not None
    process.stdout.read(1)  # or the end
    passed = time.perf_counter() - began
    process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} ended with status {process.returncode}")
    return usage.ru_utime + usage.ru_stime, passed


def server(environment: dict[str, str], model: str) -> tuple[float, float]:
    began = time.perf_counter()
    # -P: not the tree in which this runs.
    with running([sys.executable, "-P", "-m", "quarrel.launch"], model, 512, 1, environment) as (process, port):
        _, ready = wait(port)
        return computing(process.pid), ready - began


if __name__ == "__main__":
    sys.exit(main())
