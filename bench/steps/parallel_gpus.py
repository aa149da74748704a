"""One model on two GPUs against one: correctness on the reference models, the cost of sums, a worker that dies, and speed.

    python -m bench.steps.parallel_gpus --out RESULTS.jsonl [--seconds 300] [--cases DIR]     (all parts)
    python -m bench.steps.parallel_gpus --part case NAME FILE LAYOUT | sums RANK FOLDER | death | speed FILE LAYOUT

Two GPUs cut each layer (`tensor`) or have half of the layers each (`pipeline`). Every finding is one JSON line. Where there
is no GPU, --backend cpu --layers 2 tries the program out.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bench.shared import CASES as CASE_FOLDER
from bench.shared import FOLDER, ROOT, command_line, synthetic_command, test_named
from quarrel.bench.cut import one_layer_of_each
from quarrel.bench.measure import measure, run
from quarrel.bench.subject import Layout, Source, Subject, limits_for
from quarrel.bench.workload import Test
from quarrel.gguf import GGUFFile
from quarrel.models import ModelSpec, read_spec
from quarrel.models.shard import shard
from quarrel.ops.contract import rel_error
from quarrel.ops.registry import backend
from quarrel.ops.step import Limits, StepInputs
from quarrel.ops.traffic import Traffic
from quarrel.parallel import Team, Work, compile_shared

MODELS = ("mistral-7b:Q4_K_M", "gpt-oss-20b:MXFP4", "mixtral-8x7b:Q4_K_M")
TESTS = "tg128,tg128x32,tg128x128,pp4096"
CASES = (
    ("mistral", "q4_k_m"), ("mixtral", "q4_0x"), ("gptoss", "mxfp4-bf16"), ("llama32", "q4_k_m"),
    ("granitehybrid", "q4_0x"), ("mamba", "q4_0x"),
)  # fmt: skip
LIMIT = 3e-3
"""What the reference models allow float16 activations."""
LAYOUTS = {"one": (1, 1), "tensor": (2, 1), "pipeline": (2, 2)}
"""Processes of a model, and stages that they form."""


class Shared(Subject):
    """A model on all devices of a team."""

    def __init__(self, source: Source, on: Any, limits: Limits, team: Team, length: int) -> None:
        began = time.perf_counter()
        assert isinstance(source.spec, ModelSpec)
        self.source, self.backend, self.limits = source, on, limits
        self.step = compile_shared(team, on, source.spec, source.file, limits, length)
        self.load_seconds = time.perf_counter() - began
        self.layout = Layout(limits, source.spec.n_vocab)
        self.traffic = Traffic.of(source.program, self.step.compute)
        self.how = team.groups.how


def case(args: argparse.Namespace, name: str, variant: str, layout: str) -> dict[str, Any]:
    """Logits of a reference model on two devices, in pieces, against the truth."""
    folder = Path(args.cases) / name
    path = folder / f"model-{variant}.gguf"
    ids = np.load(folder / "tokens.npy").reshape(-1).astype(np.int32)
    limits = Limits(max_tokens=len(ids), max_seqs=2, max_blocks_per_seq=8, n_blocks=8, block_size=16)
    ranks, stages = LAYOUTS[layout]
    team = Team(Work((path,), args.backend, "auto", ranks, "tensor", stages, threads=1, peer_sums=not args.nccl_only))
    with GGUFFile.open(path) as file:
        spec = read_spec(file)
        assert isinstance(spec, ModelSpec)
        step = compile_shared(team, backend(args.backend), spec, file, limits, 64)
        how = team.groups.how
        # The last tokens one by one: small sums, and, from the third on, a graph.
        bounds = [0, 9, len(ids) - 12, *range(len(ids) - 11, len(ids) + 1)]
        parts = [step(chunk(ids, a, z), "logits").logits for a, z in pairwise(bounds)]
        again = [step(chunk(ids, a, z), "logits").logits for a, z in pairwise(bounds)]
        step.close()
    logits = np.concatenate(parts)  # type: ignore[arg-type]
    exact = folder / f"logits_{variant}_deq.npy"
    truth = np.load(exact if exact.exists() else folder / "logits_hf.npy")
    error = float(rel_error(logits[-len(truth) :], truth))
    same = bool(np.array_equal(logits, np.concatenate(again)))  # type: ignore[arg-type]
    found = {"case": f"{name}-{variant}", "layout": layout, "sums": how}
    return {**found, "error": error, "ok": error < LIMIT, "same_again": same}


def chunk(ids: np.ndarray, start: int, end: int) -> StepInputs:
    each = np.arange(start, end, dtype=np.int32)
    table = np.arange(-(-len(ids) // 16), dtype=np.int32)[None]
    slot = np.array([1], np.int32)
    starts, length = np.array([0, end - start], np.int32), np.array([end], np.int32)
    return StepInputs(ids[start:end], each, each, starts, length, table, each - start, state_slots=slot)


def death(args: argparse.Namespace) -> dict[str, Any]:
    """A process is killed while both decode; the first has to come back, and run again with a new one."""
    import quarrel

    path = Path(args.cases) / "mistral" / "model-q4_k_m.gguf"
    with quarrel.load(path, backend=args.backend, n_ctx=64, tensor_parallel=2) as llm:
        before = llm.generate([5, 9, 33], max_tokens=40, ignore_eos=True, temperature=0.0).token_ids
        (pid,) = workers()
        began = time.perf_counter()
        threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
        said = ""
        try:
            while time.perf_counter() - began < 20:
                llm.generate([5, 9, 33], max_tokens=40, ignore_eos=True, temperature=0.0)
        except quarrel.QuarrelError as error:
            said = f"{type(error).__name__}: {error}"
        noticed = time.perf_counter() - began
        after = llm.generate([5, 9, 33], max_tokens=40, ignore_eos=True, temperature=0.0).token_ids
        back = time.perf_counter() - began
    left = workers()
    return {"death": said, "noticed_s": round(noticed, 2), "back_s": round(back, 2), "same": after == before, "left": left}


def workers() -> list[int]:
    found = Path("/proc/self/task").glob("*/children")
    pids = [int(pid) for file in found for pid in file.read_text().split()]
    return [pid for pid in pids if b"quarrel.parallel.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def sums(rank: int, folder: Path) -> dict[str, Any]:
    """Microseconds of a sum within a graph of 64, by size and who makes it."""
    import torch

    from quarrel.parallel.group import TorchGroup
    from quarrel.parallel.meeting import Meeting
    from quarrel.triton_backend.collective.one_shot import MOST, OneShot

    logging.basicConfig(level="INFO")
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    group = TorchGroup(Meeting(folder), "sums", rank, 2, device, OneShot)
    found: dict[str, Any] = {"sums": group.how}
    peers, group._peers = group._peers, None
    for name, made in (("nccl", None), ("one_shot", peers)):
        if name == "one_shot" and peers is None:
            continue
        group._peers = made
        for size in (4096, 32 * 4096, 2048 * 4096):
            if made is not None and size > MOST:
                continue
            rows = torch.ones(size, device=device) * (rank + 1)
            group.all_reduce(rows)
            right = bool((rows == 3).all().item())
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for _ in range(64):
                    group.all_reduce(rows)
            graph.replay()
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(5):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            found[f"{name}_{size * 4 // 1024}KiB_us"] = round(start.elapsed_time(end) * 1000 / 320, 2)
            found[f"{name}_{size * 4 // 1024}KiB_right"] = right
            del graph
    group._peers = peers
    if rank == 0:
        print(json.dumps(found), flush=True)
    os._exit(0)


def tests_of(args: argparse.Namespace) -> list[Test]:
    return [test_named(name) for name in args.tests.split(",")]


def warm(args: argparse.Namespace, path: Path, ranks: int, index: int) -> None:
    """Compiles the kernels of one test, on the model cut down to a layer of each kind, without a second device."""
    with GGUFFile.open(path) as file:
        tests = tests_of(args)
        source = Source.of(file, max(t.length for t in tests))
        on = backend(args.backend)
        limits = limits_for(tests, args.step_tokens or on.step_tokens, False)
        assert isinstance(source.spec, ModelSpec)
        spec, tensors, _ = one_layer_of_each(file, source.spec)
        if ranks > 1:
            assert isinstance(spec, ModelSpec)
            spec, tensors = shard(spec, tensors, 0, ranks, "tensor")
        subject = Subject(Source(file, spec, tensors), on, limits, "auto")
        test = tests[index]
        if test.kind == "prefill":
            run(subject, subject.layout.prefill(test.depth, test.tokens, test.batch))
        else:
            run(subject, subject.layout.prefill(0, test.depth or 1, test.batch))
            for at in (test.depth, test.depth + test.tokens - 1):
                run(subject, (subject.layout.decode(at, test.batch, i > 0) for i in range(2)))
        subject.close()


def speed(args: argparse.Namespace, path: Path, layout: str) -> None:
    """One layout; lines as they come."""
    tests = tests_of(args)
    on = backend(args.backend)
    limits = limits_for(tests, args.step_tokens or on.step_tokens, False)
    ranks, stages = LAYOUTS[layout]
    team = None
    if ranks > 1:
        team = Team(Work((path,), args.backend, "auto", ranks, stages=stages, peer_sums=not args.nccl_only))
    with GGUFFile.open(path) as file:
        length = max(t.length for t in tests)
        source = Source.of(file, length)
        subject = Subject(source, on, limits, "auto") if team is None else Shared(source, on, limits, team, length)
        facts = {"model": path.stem, "layout": layout, "device": on.device(), "load_s": round(subject.load_seconds, 2)}
        facts |= {"sums": getattr(subject, "how", ""), "weights": subject.step.memory().weights}
        for test in tests:
            try:
                samples = measure(subject, test, args.rounds, None)
            except Exception as error:
                traceback.print_exc()
                failed = {"test": test.name, "failed": f"{type(error).__name__}: {error}"[:400]}
                print(json.dumps({**facts, **failed}), flush=True)
                break
            all_ = [round(test.work / s, 1) for s in samples.seconds]
            line = {**facts, "test": test.name, "tok_s": max(all_), "rounds": all_}
            print(json.dumps({**line, "warm_up_s": round(samples.warm_up, 2)}), flush=True)
        subject.close()


def everything(args: argparse.Namespace) -> int:
    began = time.perf_counter()

    def left() -> float:
        return args.seconds - (time.perf_counter() - began)

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - began:6.2f} s] {text}", flush=True)

    base = [sys.executable, "-m", "bench.steps.parallel_gpus", "--backend", args.backend, "--cases", str(args.cases)]
    base += ["--rounds", str(args.rounds)] + (["--step-tokens", str(args.step_tokens)] if args.step_tokens else [])
    base += ["--tests", args.tests]
    base += ["--nccl-only"] if args.nccl_only else []
    names = args.only.split(",") if args.only else list(MODELS)
    files = {n: args.folder / f"{n.replace(':', '-')}.gguf" for n in names}

    def start(*part: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*base, "--part", *part], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def keep(name: str, process: subprocess.Popen[str], limit: float) -> None:
        try:
            text, _ = process.communicate(timeout=max(1.0, min(limit, left())))
        except subprocess.TimeoutExpired:
            process.kill()
            text = process.communicate()[0] + "\nTIME OVER"
        lines = [row for row in text.splitlines() if row.startswith("{")]
        with args.out.open("a") as out:
            for row in lines:
                print(row, file=out)
        for row in lines:
            say(f"{name}: {row}")
        if process.returncode or name == "sums":
            say(f"{name}: status {process.returncode}: {text[-1500:]}")

    making = {}
    for name in names:
        if not files[name].exists():
            making[name] = subprocess.Popen(synthetic_command(name, files[name], args.layers), cwd=ROOT)
        if name == names[0]:
            gpu = args.backend == "triton"
            folder = tempfile.mkdtemp()
            pair = [start("sums", str(r), folder) for r in range(2)] if gpu else []
            for process in pair:  # while files are written, before other processes use the devices
                keep("sums", process, 40)
            kinds = [(c, v, how) for c, v in CASES[: args.n_cases] for how in ("tensor", "pipeline")]
            small = {f"{c}-{v} {how}": start("case", c, v, how) for c, v, how in kinds if (Path(args.cases) / c).exists()}
            if name in making:
                making[name].wait()
            warming = [start("warm", str(files[name]), str(r), str(i)) for r in (1, 2) for i in range(len(tests_of(args)))]
    for name, process in small.items():
        keep(name, process, 40)
    for process in warming:
        _quiet(process, say, left())
    say("the first model's kernels are compiled")
    for i, name in enumerate(names):
        if i:
            if name in making:
                making[name].wait()
            if left() < 25:
                say("the time is over")
                break
            warming = [start("warm", str(files[name]), str(r), str(j)) for r in (1, 2) for j in range(len(tests_of(args)))]
            for process in warming:
                _quiet(process, say, left())
        for layout in LAYOUTS:
            keep(f"{name} {layout}", start("speed", str(files[name]), layout), args.each)
    if left() > 15 and (Path(args.cases) / "mistral").exists():
        keep("death", start("death"), 45)
    return 0


def _quiet(process: subprocess.Popen[str], say: Any, limit: float) -> None:
    try:
        text, _ = process.communicate(timeout=max(1.0, min(60.0, limit)))
        if process.returncode:
            say(f"warm-up: {text[-800:]}")
    except subprocess.TimeoutExpired:
        process.kill()
        say("a warm-up took too long")


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--each", type=float, default=60, help="seconds that a layout of a model may take")
    parser.add_argument("--cases", default=CASE_FOLDER)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--only", default="")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tests", default=TESTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-tokens", type=int)
    parser.add_argument("--n-cases", type=int, default=len(CASES))
    parser.add_argument("--nccl-only", action="store_true", help="no sums in one launch")
    parser.add_argument("--part", nargs="+", default=[])
    args = parser.parse_args()
    match args.part:
        case ["case", name, variant, layout]:
            print(json.dumps(globals()["case"](args, name, variant, layout)), flush=True)
        case ["sums", rank, folder]:
            sums(int(rank), Path(folder))
        case ["death"]:
            print(json.dumps(death(args)), flush=True)
        case ["warm", path, ranks, index]:
            warm(args, Path(path), int(ranks), int(index))
        case ["speed", path, layout]:
            speed(args, Path(path), layout)
        case _:
            return everything(args)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception:
        traceback.print_exc()
        sys.exit(1)
