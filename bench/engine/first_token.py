"""How long `quarrel generate` takes to its first token where no kernel is compiled yet, and where the time goes.

    python -m bench.engine.first_token --out FILE.jsonl [--model mistral-7b:Q4_K_M] [--ways ahead,alone,ahead-warm]
        [--prompt-words 12] [--tokens 32] [--backend triton]

Each way is a process of its own with an empty cache of kernels: `ahead` compiles as the backend does by default, in several
processes; `alone` compiles each kernel where it is launched, as Triton does; `-warm` behind either runs it once more with
the cache that the run before it has left. A line of JSON each: seconds from the start of the process to the first token,
to the second, and to the end; when modules were imported, the weights loaded, each step's kernels ready; what kernels took.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.shared import FOLDER, ROOT, Notes, command_line, synthetic

TEXT = "the house on the hill had been empty for as long as anyone in the village could remember "


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="mistral-7b:Q4_K_M")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--ways", default="ahead,ahead-warm,alone,alone-warm")
    parser.add_argument("--prompt-words", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--backend", default="triton")
    args = parser.parse_args()
    path = synthetic(args.model, args.folder, args.layers)
    with path.open("rb") as file:  # no disk is measured
        while file.read(1 << 26):
            pass
    notes = Notes(args.out)
    prompt = " ".join((TEXT * args.prompt_words).split()[: args.prompt_words])
    options = ["--json", "--stream", "--temperature", "0", "--max-tokens", str(args.tokens), "--backend", args.backend]
    with tempfile.TemporaryDirectory() as folder:
        for way in args.ways.split(","):
            kind, _, warm = way.partition("-")
            cache = Path(folder, f"{kind}{'' if warm else time.monotonic_ns()}")
            if not warm:
                (Path(folder) / kind).unlink(missing_ok=True)
                cache.mkdir()
                (Path(folder) / kind).symlink_to(cache)
            notes.say(
                model=path.name,
                way=way,
                cores=len(os.sched_getaffinity(0)),
                **run(kind, cache, [str(path), prompt, *options]),
            )
    return 0


def run(kind: str, cache: Path, arguments: list[str]) -> dict[str, Any]:
    """One process of `quarrel generate`: its lines with the seconds at which they came, and what it noted of itself."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        environment = os.environ | {"TRITON_CACHE_DIR": str(cache), "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "bench.engine.first_token", "--child", kind, report.name]
        began = time.time()
        command += [str(began), "generate", *arguments]
        at: list[float] = []
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                at.append(round(time.time() - began, 3))
                lines.append(line)
        done = time.time() - began
        if process.returncode:
            return {"failed": process.returncode}
        result = json.loads(lines[-1])["result"]
        told = json.loads(Path(report.name).read_text())
    return {
        "first_token_s": at[0], "second_token_s": at[1], "end_s": round(done, 3),
        "prompt_tokens": result["usage"]["prompt_tokens"], "token_ids": result["token_ids"],
        "timings": result["timings"], **told,
    }  # fmt: skip


def child(kind: str, report: str, began: float) -> None:
    """The rest of the command line is quarrel's."""
    told: dict[str, Any] = {"events": [], "kernels": [], "processes": 0}

    def event(what: str) -> None:
        told["events"].append([round(time.time() - began, 3), what])

    def timed(owner: Any, name: str, said: str) -> None:
        function = getattr(owner, name)

        def run(*args: Any, **named: Any) -> Any:
            event(f"{said} begins")
            try:
                return function(*args, **named)
            finally:
                event(f"{said} ends")

        setattr(owner, name, run)

    from quarrel.ops import registry

    event("python")
    make = registry.backend
    compilers: list[Any] = []

    def made(name: str, *args: Any) -> Any:
        event("imports of the backend begin")
        backend = make(name, *args)  # type: ignore[arg-type]
        event("imports of the backend end")
        if name == "triton":
            from triton import knobs

            from quarrel.triton_backend import ahead, step
            from quarrel.triton_backend.backend import TritonBackend
            from quarrel.triton_backend.runtime import compile as processes

            timed(TritonBackend, "compile", "load")
            timed(ahead.Ahead, "begin", "list of kernels")
            timed(ahead.Ahead, "need", "wait for a step's kernels")
            timed(step.TritonStep, "_run", "step without a graph")
            timed(step, "_graph", "capture")
            begin = processes.Compilers.__init__

            def counted(self: Any, *args: Any, **named: Any) -> None:
                begin(self, *args, **named)
                compilers.append(self)

            processes.Compilers.__init__ = counted  # type: ignore[method-assign]

            def heard(*, src: Any, times: Any, cache_hit: bool, **rest: Any) -> None:
                told["kernels"].append([src.name, cache_hit, round(times.total / 1e6, 3)])

            knobs.compilation.listener = heard
            backend.ahead = kind == "ahead"  # type: ignore[attr-defined]
        return backend

    registry.backend = made
    sys.argv[0] = "quarrel"
    try:
        runpy.run_module("quarrel", run_name="__main__")
    finally:
        event("end")
        told["processes"] = sum(len(c.children) for c in compilers)
        told["compiled"] = [[_name(c, key), round(s, 3)] for c in compilers for key, s in list(c.seconds.items())]
        Path(report).write_text(json.dumps(told))


def _name(compilers: Any, key: str) -> str:
    """Of the kernel that a job compiles."""
    held = (cell.cell_contents for cell in compilers._jobs[key].args[0].__closure__)
    return next((str(one.name) for one in held if hasattr(one, "constants")), "?")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _, _, kind, report, began, *sys.argv[1:] = sys.argv
        child(kind, report, float(began))
    else:
        sys.exit(main())
