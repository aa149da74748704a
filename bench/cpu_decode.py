"""Decode and prefill speed of the CPU backend on a GGUF file, beside the read bandwidth measured in the same run.

    python bench/cpu_decode.py MODEL.gguf [--tokens 32] [--prompt 512] [--rounds 5] [--threads N] [--level L] [--compute C]

Rounds rotate over the measurements, so that a change of the machine's load falls on all of them; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import time
from collections.abc import Callable

import numpy as np

from quarrel.cpu_backend.abi import Fields, KernelDef
from quarrel.cpu_backend.backend import CpuBackend
from quarrel.cpu_backend.ir import I32, Kernel, Val, vec
from quarrel.cpu_backend.pool import StageTable
from quarrel.gguf import GGUFFile
from quarrel.models import Tensors, assemble, read_spec
from quarrel.ops.step import Limits, SampleInputs, Step, StepInputs

BLOCK = 32
PIECE = 1 << 18


def read_kernel() -> KernelDef:
    """Chunk c reads PIECE bytes and does next to nothing with them."""

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        at = a.data + chunk * PIECE
        sums = [k.var(k.zero(vec(I32, 16))) for _ in range(4)]
        with k.range(0, PIECE, 256) as i:
            for j, total in enumerate(sums):
                total.v = total.v ^ k.load(at + i, vec(I32, 16), 64 * j)
        k.store((sums[0].v ^ sums[1].v) ^ (sums[2].v ^ sums[3].v), scratch)

    return KernelDef("bench/read", ("data",), body)


def reader(backend: CpuBackend, data: np.ndarray) -> Callable[[], float]:
    """A measurement of GB/s over all threads."""
    kernel, pool = read_kernel(), backend._pool
    args = kernel.pack({"data": int(data.ctypes.data)})
    chunks = data.nbytes // PIECE
    jobs = np.array([[kernel.address(pool.level), args.ctypes.data, 0, 1, 1]], np.int64)
    table = StageTable(np.array([[0, 1]], np.int64), jobs, np.array([chunks], np.int64), 4096, (args, data))

    def measure() -> float:
        start = time.perf_counter()
        pool.run(table)
        return chunks * PIECE / (time.perf_counter() - start) / 1e9

    return measure


def mapping(path: str) -> np.ndarray:
    """The file's own pages: small ones, as the kernels read them (memory in huge pages reads up to a fifth faster)."""
    size = min(os.path.getsize(path), 1 << 30) // PIECE * PIECE
    with open(path, "rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ), np.uint8)


def inputs(first: int, count: int, blocks: int, vocab: int) -> StepInputs:
    """Tokens `first .. first + count - 1` of one sequence; the result of the last is wanted."""
    at = np.arange(first, first + count, dtype=np.int32)
    one = np.ones(1, np.float32)
    sample = SampleInputs(one * 0, np.zeros(1, np.int32), one, one * 0, one * 0.5)
    table = np.arange(blocks, dtype=np.int32)[None]
    ends = np.array([0, count], np.int32)
    return StepInputs(at * 7919 % vocab, at, at, ends, ends[1:] + first, table, np.array([count - 1], np.int32), sample)


def timed(step: Step, batches: list[StepInputs]) -> float:
    start = time.perf_counter()
    for batch in batches:
        step(batch, "tokens")
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--level")
    parser.add_argument("--compute", default="auto")
    args = parser.parse_args()
    backend = CpuBackend(args.level, args.threads)
    begun = time.perf_counter()
    with GGUFFile.open(args.model) as file:
        spec, tensors = read_spec(file), Tensors(file)
        program = assemble(spec, tensors)
        blocks = -(-(args.prompt + args.tokens) // BLOCK)
        limits = Limits(max(args.prompt, 1), 1, blocks, blocks, BLOCK)
        step = backend.compile(program, tensors, limits, args.compute)
        compiled = time.perf_counter()
        step(inputs(0, 1, blocks, spec.n_vocab), "tokens")
        first = time.perf_counter()
        weights = step.memory().weights
        read = reader(backend, mapping(args.model))
        results: dict[str, list[float]] = {"read": [], "decode": [], "prefill": []}
        decode = [inputs(args.prompt + i, 1, blocks, spec.n_vocab) for i in range(args.tokens)]
        prefill = [inputs(0, args.prompt, blocks, spec.n_vocab)]
        for _ in range(args.rounds):
            results["read"].append(read())
            results["prefill"].append(args.prompt / timed(step, prefill))
            results["read"].append(read())
            results["decode"].append(args.tokens / timed(step, decode))
        embedding = next(n for n in program.nodes if n.op.name == "embedding").inputs[1]
        tied = any(embedding in n.inputs for n in program.nodes if n.op.name == "linear")
        # One row of the embedding is read per token, all of the rest.
        per_token = weights - (0 if tied else tensors.raw(embedding).raw.nbytes)
        median = {name: float(np.median(values)) for name, values in results.items()}
        spread = {name: [round(min(v), 2), round(max(v), 2)] for name, v in results.items()}
        gbs = median["decode"] * per_token / 1e9
        report = {
            "model": args.model.rsplit("/", 1)[-1], "device": backend.device(), "compute": step.compute,
            "read_gb_s": round(median["read"], 2), "decode_tok_s": round(median["decode"], 2), "decode_gb_s": round(gbs, 2),
            "decode_share": round(gbs / median["read"], 3), "prefill_tok_s": round(median["prefill"], 1), "spread": spread,
            "compile_s": round(compiled - begun, 2), "first_token_s": round(first - begun, 2),
            "max_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, "file_mb": weights >> 20,
        }  # fmt: skip
        for name, value in report.items():
            print(f"{name:16} {value}")
        print(json.dumps(report))
        step.close()
    backend.close()


if __name__ == "__main__":
    main()
