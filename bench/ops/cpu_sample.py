"""Drawing one token from a vocabulary by the CPU's kernel and by llama.cpp's chain of samplers, one thread.

    python -m bench.ops.cpu_sample --out FILE.jsonl [--llama FOLDER] [--sizes 49152,...] [--tree NAME]

FOLDER has libllama.so of a build of llama.cpp. A figure is the least processor time of many runs in turns, microseconds.
Logits are normal with a deviation of 3; eight rows take turns, so that they come from the second-level cache or behind it.
llama.cpp's samplers want a list of candidates, which is filled here by NumPy: `list_us` of `llama_us`. `--tree` is kept in
the record.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import numpy as np

from bench.ops.cpu_attention import Kernel, least
from bench.shared import Notes, command_line
from quarrel.cpu_backend.runtime.features import level
from quarrel.cpu_backend.runtime.pool import aligned
from quarrel.cpu_backend.sampling.sample import sample

SETTINGS = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "the defaults": (0.8, 40, 0.95, 0.05),
    "top_k alone": (0.8, 40, 1.0, 0.0),
    "top_p alone": (0.8, 0, 0.95, 0.0),
    "temperature alone": (0.8, 0, 1.0, 0.0),
}
"""temperature, top_k, top_p, min_p"""
TURNS = 8
Draw = Callable[[], object]
CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--llama", type=Path, metavar="FOLDER")
    parser.add_argument("--sizes", default="32000,49152,151936,262144")
    parser.add_argument("--seconds", type=float, default=0.5, help="of each figure")
    parser.add_argument("--tree", default="")
    args = parser.parse_args()
    notes, llama = Notes(args.out), None if args.llama is None else Llama(args.llama)
    for size in map(int, args.sizes.split(",")):
        logits = (np.random.default_rng(0).standard_normal((TURNS, size)) * 3).astype(np.float32)
        for name, settings in SETTINGS.items():
            sides = {"ours_us": ours(logits, *settings)}
            if llama is not None:
                sides["llama_us"] = llama.draw(logits, *settings)
                sides["list_us"] = llama.draw(logits)
            spent = least([cycle(draws) for draws in sides.values()], args.seconds)
            figures = {side: round(ns / 1e3, 1) for side, ns in zip(sides, spent, strict=True)}
            notes.say(tree=args.tree, size=size, settings=name, level=level().name, **figures)
    return 0


def ours(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> list[Draw]:
    size, here = logits.shape[1], level()
    kernel = sample(size)
    function, scratch = Kernel(kernel.address(here)), aligned(kernel.scratch + 64)

    def draw(row: np.ndarray) -> Draw:
        columns = {"temperature": temperature, "top_p": top_p, "min_p": min_p, "uniform": 0.5}
        arrays = {name: np.array([x], np.float32) for name, x in columns.items()}
        arrays |= {"top_k": np.array([top_k], np.int32), "tokens": np.zeros(1, np.int32), "logits": row}
        block = kernel.pack({**{name: x.ctypes.data for name, x in arrays.items()}, "n": size})

        def run() -> object:
            function(block.ctypes.data, 0, scratch.ctypes.data)
            return arrays

        return run

    return [draw(row) for row in logits]


class Llama:
    """llama.cpp's samplers."""

    def __init__(self, folder: Path) -> None:
        for name in ("libggml-base.so", "libggml.so"):
            ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL)
        self.lib = ctypes.CDLL(str(folder / "libllama.so"))
        for name in ("chain_init", "init_top_k", "init_top_p", "init_min_p", "init_temp", "init_dist", "init_greedy"):
            getattr(self.lib, f"llama_sampler_{name}").restype = ctypes.c_void_p

    def draw(self, logits: np.ndarray, *settings: float) -> list[Draw]:
        """Without settings the list of candidates is filled, and that is all."""
        lib, at, real = self.lib, ctypes.c_void_p, ctypes.c_float
        chain = at(lib.llama_sampler_chain_init(_Parameters(True)))

        def add(name: str, *arguments: object) -> None:
            lib.llama_sampler_chain_add(chain, at(getattr(lib, f"llama_sampler_init_{name}")(*arguments)))

        temperature, top_k, top_p, min_p = settings or (0.0, 0, 1.0, 0.0)
        if temperature == 0:
            add("greedy")
        else:
            if top_k:
                add("top_k", int(top_k))
            if top_p < 1:
                add("top_p", real(top_p), ctypes.c_size_t(1))
            if min_p:
                add("min_p", real(min_p), ctypes.c_size_t(1))
            add("temp", real(temperature))
            add("dist", ctypes.c_uint32(1))
        candidates = np.zeros(logits.shape[1], CANDIDATE)
        ids = np.arange(len(candidates), dtype=np.int32)

        def draw(row: np.ndarray) -> Draw:
            def run() -> object:
                candidates["id"], candidates["logit"] = ids, row
                found = _Candidates(candidates.ctypes.data, len(candidates), -1, False)
                if settings:
                    lib.llama_sampler_apply(chain, ctypes.byref(found))
                return found.selected

            return run

        return [draw(row) for row in logits]


class _Parameters(ctypes.Structure):
    _fields_ = (("no_perf", ctypes.c_bool),)


class _Candidates(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("size", ctypes.c_size_t), ("selected", ctypes.c_int64), ("sorted", ctypes.c_bool),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
