"""What long prompts cost those who decode: beside them on one device, on two replicas, and read by a process apart.

    python -m bench.serve.prefill_apart --out FILE.jsonl [--model mistral-7b:Q4_K_M] [--seconds 20]
    python -m bench.serve.prefill_apart --out FILE.jsonl --model MODEL.gguf --backend cpu --long 300 --seconds 5 --streams 2

`--streams` callers decode without a pause, and every `--every` seconds a prompt of `--long` random tokens comes. A line of
JSON for each layout: milliseconds between two tokens of the callers, and until a long prompt's first token, at p50 and p99.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import quarrel
from bench.shared import FOLDER, ROOT, Notes, command_line, synthetic

LAYOUTS = {"one": 1, "two replicas": 2, "apart": 1}
"""How many processes decode."""
ANSWER = 16


def side(args: Namespace) -> dict[str, list[float]]:
    """One process that decodes, under its load."""
    options: dict[str, Any] = {"backend": args.backend, "n_ctx": args.long + 512, "max_seqs": args.streams + 8}
    between: list[float] = []
    first: list[float] = []
    ended = threading.Event()
    rng = np.random.default_rng(args.seed)

    with quarrel.load(args.model, **options, prefill=args.prefill) as llm:
        asked = {"temperature": 0.0, "ignore_eos": True}

        def ids(count: int) -> list[int]:
            return rng.integers(10, llm.spec.n_vocab - 10, count).tolist()  # type: ignore[no-any-return]

        def decode(prompt: list[int]) -> None:
            while not ended.is_set():
                last = None
                for chunk in llm.stream(prompt, max_tokens=400, **asked):
                    now = time.perf_counter()
                    if chunk.token_id is not None:
                        if last is not None:
                            between.append(1000 * (now - last))
                        last = now
                    if ended.is_set():
                        return

        def read(prompt: list[int]) -> None:
            began = time.perf_counter()
            for _ in llm.stream(prompt, max_tokens=ANSWER, **asked):
                first.append(1000 * (time.perf_counter() - began))
                break

        llm.generate(ids(64), max_tokens=ANSWER, **asked)
        read(ids(args.long))
        first.clear()
        threads = [threading.Thread(target=decode, args=(ids(64),)) for _ in range(args.streams)]
        for thread in threads:
            thread.start()
        end = time.perf_counter() + args.seconds
        while time.perf_counter() < end:
            threads.append(threading.Thread(target=read, args=(ids(args.long),)))
            threads[-1].start()
            time.sleep(args.every)
        ended.set()
        for thread in threads:
            thread.join()
    return {"between": between, "first": first}


def measure(layout: str, model: Path, args: Namespace) -> dict[str, Any]:
    """All processes of a layout, a device each."""
    sides = LAYOUTS[layout]
    own = {"streams": args.streams // sides, "every": args.every * sides, "long": args.long, "seconds": args.seconds}
    words = [f"--{name}={value}" for name, value in own.items()] + [f"--model={model}", f"--backend={args.backend}"]
    with ExitStack() as stack:
        if layout == "apart":
            command = [sys.executable, "-m", "quarrel", "prefill", str(model), "--port", "0", "--json"]
            command += ["--ctx", str(args.long + 512), "--backend", args.backend]
            reader = stack.enter_context(_started(command, 1))
            stack.callback(reader.kill)
            assert reader.stdout is not None
            words.append(f"--prefill={json.loads(reader.stdout.readline())['prefill']}")
        command = [sys.executable, "-m", "bench.serve.prefill_apart", "--side", *words]
        running = [stack.enter_context(_started([*command, f"--seed={i}"], i)) for i in range(sides)]
        found = [json.loads(one.communicate()[0].splitlines()[-1]) for one in running]
    row: dict[str, Any] = {"layout": layout, "tokens": sum(len(f["between"]) for f in found)}
    for name in ("between", "first"):
        values = [value for f in found for value in f[name]]
        row[f"{name}_ms"] = {f"p{p}": round(float(np.percentile(values, p)), 2) for p in (50, 99)} | {"n": len(values)}
    return row


def _started(command: list[str], device: int) -> subprocess.Popen[str]:
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": given[device % len(given)]}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="mistral-7b:Q4_K_M")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--long", type=int, default=4096)
    parser.add_argument("--every", type=float, default=0.5, metavar="SECONDS")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prefill")
    parser.add_argument("--side", action="store_true", help="one process that decodes")
    args = parser.parse_args()
    if args.side:
        print(json.dumps(side(args)))
        return
    if args.out is None:
        parser.error("--out FILE.jsonl is wanted")
    notes, model = Notes(args.out), synthetic(args.model, FOLDER)
    load = {"model": args.model, "streams": args.streams, "long": args.long, "every": args.every, "seconds": args.seconds}
    for layout in LAYOUTS:
        notes.say(**load, **measure(layout, model, args))


if __name__ == "__main__":
    main()
