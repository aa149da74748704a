"""Whole models as MLX runs them, on an NVIDIA GPU: MLX for CUDA launches our Metal kernels, compiled to PTX, by itself.

    python -m bench.check.mlx_cuda prepare DIR [--models 4]      where the emulator runs: files, kernels and logits into DIR
    python -m bench.check.mlx_cuda run DIR [--out FILE]          where the GPU is: needs numpy, gguf and `mlx[cuda]`
    python -m bench.check.mlx_cuda run DIR --only NAME,NAME      some of its models: several processes share the work
    python -m bench.check.mlx_cuda run DIR --emulated            the same launches on the emulator; says which has no PTX

What Metal would be given goes through the graph of MLX as on a Mac: async evaluation, donation, `mx.compile` of the steps
that decode, steps in flight together. `run` makes the text of every launch from the tree that it runs in and looks its
kernel up by that text, so that kernels of another tree are not found. Of each model, in each arithmetic: the logits of a
prompt at once and in pieces against the case's truth; the tokens of sequences that decode, step by step and with all steps
in flight, which must be the same; and how far memory grows meanwhile, which must be less than an eighth of the cache. A
line of JSON each, then one of totals.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from quarrel.errors import RequestError
from quarrel.gguf import GGUFFile
from quarrel.mlx_backend import step as stepping
from quarrel.mlx_backend.backend import MlxBackend, create
from quarrel.mlx_backend.step import MlxStep
from quarrel.mlx_backend.warm import warm
from quarrel.models import Tensors, assemble, read_spec
from quarrel.ops.contract import Compute, rel_error
from quarrel.ops.step import Limits, SampleInputs, StepInputs
from tools.metal_emulator import Settings, install, metal_kernel
from tools.metal_emulator.arrays import KernelArray, metal_name
from tools.metal_emulator.build import MetalSource
from tools.metal_emulator.kernel import Call, Triple
from tools.metal_emulator.ptx import PTX_ENTRY, compile_ptx
from tools.metal_emulator.ptx import assemble as machine_code
from tools.metal_emulator.session import Launch
from tools.metal_emulator.settings import Mode
from tools.metal_emulator.signature import KernelText, TemplateArgument, shape_parameters, write_kernel
from tools.metal_emulator.toolchain import find_toolchain

MODELS = (
    *(("llama32", "q4_k_m"), ("qwen3moe", "q4_0x"), ("gemma3", "q4_0x"), ("granitehybrid", "q4_0x")),
    *(("deepseek2_lite", "q4_0x"), ("qwen35", "q4_0x"), ("phi3", "q4_0x"), ("mamba2", "q4_0x")),
)
"""Folder of reference cases and variant."""
ARITHMETIC: tuple[Compute, ...] = ("float32", "float16")
LIMIT: Mapping[Compute, float] = {"float32": 2e-5, "float16": 2e-2}
"""Of the logits against the truth; float32 sums are made in another order there, and exp is another."""
CUTS = (1, 2, 9, 10, 15)
SEQS, PROMPT, AHEAD, SIZE, BLOCKS = 2, 20, 40, 16, 8
CACHE = 64 << 20
"""Bytes of keys and values, so that a copy of them shows."""


def key_of(text: KernelText) -> str:
    """What a kernel is called in DIR."""
    return "k" + hashlib.sha256(text.with_places().encode()).hexdigest()[:20]


class OnCuda:
    """What stands at `mx.fast.metal_kernel`: a kernel whose launches are those of machine code made before."""

    folder: ClassVar[Path] = Path()
    used: ClassVar[set[str]] = set()

    def __init__(
        self, name: str, input_names: Sequence[str], output_names: Sequence[str], source: str, header: str = ""
    ) -> None:
        self.name, self.input_names, self.output_names = name, input_names, output_names
        self.source, self.header = source, header

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
        grid: Triple,
        threadgroup: Triple,
        template: Sequence[TemplateArgument] = (),
    ) -> list[mx.array]:
        known = [KernelArray(np.broadcast_to(np.int8(0), a.shape), metal_name(a.dtype), True) for a in inputs]
        named = list(zip(self.input_names, known, strict=True))
        outputs = list(zip(self.output_names, output_dtypes, strict=True))
        key = key_of(write_kernel(self.name, self.header, self.source, named, outputs, template, False))
        given: list[mx.array] = []
        for (name, form), array in zip(named, inputs):
            given.append(array)
            for what in shape_parameters(name, form, self.source):
                if what != "shape":
                    raise RequestError(f"{self.name} asks for {name}_{what}: only shapes are handed over here")
                given.append(_numbers(tuple(array.shape)))
        self.used.add(key)
        return mx.fast.precompiled_cuda_kernel(
            name=key,
            compiled_source=_code(self.folder, key, self.name),
            inputs=given,
            output_shapes=list(output_shapes),
            output_dtypes=list(output_dtypes),
            scalars=[],
            grid=grid,
            threadgroup=threadgroup,
            ensure_row_contiguous=True,
        )


@cache
def _numbers(shape: tuple[int, ...]) -> mx.array:
    return mx.array(np.array(shape, np.int32))


@cache
def _code(folder: Path, key: str, name: str) -> bytes:
    path = folder / f"{key}.z"
    if not path.exists():
        raise RequestError(f"{name} has no PTX in {folder} ({key}): prepare the folder again from this tree")
    return zlib.decompress(path.read_bytes())


class Looked(metal_kernel):
    """The emulator, for launches that DIR has a kernel for."""

    def launch(self, call: Call, settings: Settings) -> Launch:
        key = key_of(self.text(call))
        OnCuda.used.add(key)
        _code(OnCuda.folder, key, self.name)
        return super().launch(call, settings)


def drive(folder: Path, model: dict[str, Any], compute: Compute, emulated: bool) -> dict[str, Any]:
    """One model in one arithmetic. On the emulator nothing is compiled, and memory says nothing."""
    ids = np.array(model["ids"], np.int32)
    with GGUFFile.open(folder / model["file"]) as file:
        tensors = Tensors(file)
        program = assemble(read_spec(file), tensors)
        row = sum(2 * c.n_kv * c.head_dim * SIZE * 4 for c in program.caches)
        many = SEQS * BLOCKS if emulated or not row else max(SEQS * BLOCKS, CACHE // row)
        limits = Limits(max_tokens=len(ids), max_seqs=SEQS, max_blocks_per_seq=BLOCKS, n_blocks=many, block_size=SIZE)
        step = _backend().compile(program, tensors, limits, compute)
    found: dict[str, Any] = {"model": model["name"], "compute": compute, "launches_to": len(step.explain())}
    truth = np.load(folder / model["truth"])
    whole = _logits(step, ids, (0, len(ids)))
    pieces = _logits(step, ids, (0, *CUTS, len(ids)))
    found |= {
        "error_whole": rel_error(whole[-len(truth) :], truth),
        "error_pieces": rel_error(pieces[-len(truth) :], truth),
    }
    warm(step, lambda done, of: None)
    one_by_one, _, _ = _decode(step, ids, False)
    in_flight, grown, seconds = _decode(step, ids, True)
    again, _, _ = _decode(step, ids, True)
    found |= {
        "tokens": one_by_one.tolist(),
        "same_in_flight": bool(np.array_equal(one_by_one, in_flight) and np.array_equal(one_by_one, again)),
        "ms_a_step_in_flight": seconds / AHEAD * 1e3,
        # Without keys and values no copy of states would show beside what 40 steps in flight hold.
        "cache_bytes": step.memory().cache if row else 0,
        "grown_bytes": grown,
        "traced": len(step._traced),
    }
    step.close()
    return found


def failed(found: Mapping[str, Any], emulated: bool) -> list[str]:
    """What is not as it must be."""
    limit = LIMIT[found["compute"]]
    said = [
        f"{name} {found[name]:.2g} of {limit:.0e}" for name in ("error_whole", "error_pieces") if not found[name] < limit
    ]
    if not found["same_in_flight"]:
        said.append("other tokens with steps in flight")
    if not emulated and found["cache_bytes"] and found["grown_bytes"] > found["cache_bytes"] / 8:
        said.append(f"memory grew by {found['grown_bytes']} bytes")
    return said


@cache
def _backend() -> MlxBackend:
    return create()


def _chunk(ids: np.ndarray, start: int, end: int) -> StepInputs:
    """Tokens of the first sequence, the earlier ones in the cache."""
    each = np.arange(start, end, dtype=np.int32)
    table = np.arange(BLOCKS, dtype=np.int32)[None]
    starts, slot = np.array([0, end - start], np.int32), np.array([1], np.int32)
    return StepInputs(ids[start:end], each, each, starts, np.array([end], np.int32), table, each - start, None, slot)


def _logits(step: MlxStep, ids: np.ndarray, bounds: Sequence[int]) -> np.ndarray:
    parts = [step(_chunk(ids, a, z), "logits").logits for a, z in pairwise(bounds)]
    return np.concatenate([part for part in parts if part is not None])


def _decode(step: MlxStep, ids: np.ndarray, ahead: bool) -> tuple[np.ndarray, int, float]:
    """Tokens `[steps, sequences]` after prompts, how far memory grew, and seconds. Each step's ids are the tokens of the
    one before, on the device where steps run ahead; the second sequence draws, by the same numbers each time."""
    rows, seqs = np.arange(SEQS, dtype=np.int32), np.arange(SEQS)
    table = np.arange(SEQS * BLOCKS, dtype=np.int32).reshape(SEQS, BLOCKS)

    def inputs(first: int, new: int, tokens: np.ndarray, last: np.ndarray | None) -> StepInputs:
        each = np.tile(np.arange(first, first + new, dtype=np.int32), SEQS)
        slots = (np.repeat(seqs * BLOCKS * SIZE, new) + each).astype(np.int32)
        starts = (np.arange(SEQS + 1) * new).astype(np.int32)
        zero = np.zeros(SEQS, np.float32)
        uniform = ((0.37 * (first + 1) + 0.5 * seqs) % 1).astype(np.float32)
        drawn = SampleInputs((0.8 * (seqs > 0)).astype(np.float32), rows * 20, np.ones(SEQS, np.float32), zero, uniform)
        kv_len = np.full(SEQS, first + new, np.int32)
        out = (starts[1:] - 1).astype(np.int32)
        return StepInputs(tokens, each, slots, starts, kv_len, table, out, drawn, rows, from_last=last)

    prompts = np.concatenate([ids[5 * s : 5 * s + PROMPT] for s in seqs]).astype(np.int32)
    first = step(inputs(0, PROMPT, prompts, None), "tokens").tokens
    assert first is not None
    mx.reset_peak_memory()
    before, begin = mx.get_active_memory(), time.perf_counter()
    pending, results = [], [first]
    for i in range(AHEAD):
        pending.append(step.launch(inputs(PROMPT + i, 1, results[-1].astype(np.int32), rows if ahead else None), "tokens"))
        if not ahead:
            results.append(_tokens(pending[-1]))
    if ahead:
        results += [_tokens(p) for p in pending]
    return np.stack(results), mx.get_peak_memory() - before, time.perf_counter() - begin


def _tokens(pending: stepping.Pending) -> np.ndarray:
    tokens = pending.result().tokens
    assert tokens is not None
    return tokens


def prepare(target: Path, models: int, arch: str) -> dict[str, Any]:
    """Runs the models on the emulator, and writes what they take there."""
    from tests.models.test_reference_logits import wanted
    from tests.paths import need_cases

    target.mkdir(parents=True, exist_ok=True)
    texts: dict[str, MetalSource] = {}

    class Recorder(metal_kernel):
        def launch(self, call: Call, settings: Settings) -> Launch:
            text = self.text(call)
            texts.setdefault(key_of(text), MetalSource(self.name, text.with_places(), text.entry))
            return super().launch(call, settings)

    fast: Any = mx.fast
    manifest: list[dict[str, Any]] = []
    for folder, variant in MODELS[:models]:
        source, name = need_cases(folder), f"{folder}-{variant}"
        ids = np.load(source / "tokens.npy").reshape(-1).tolist()
        shutil.copyfile(source / f"model-{variant}.gguf", target / f"{name}.gguf")
        np.save(target / f"{name}.npy", wanted(source, variant))
        model: dict[str, Any] = {"name": name, "file": f"{name}.gguf", "truth": f"{name}.npy", "ids": ids}
        with install(Settings(mode=Mode.FAST)):
            fast.metal_kernel = Recorder
            for compute in ARITHMETIC:
                found = drive(target, model, compute, True)
                model[f"tokens_{compute}"] = found["tokens"]
                print(json.dumps({k: v for k, v in found.items() if k != "tokens"} | {"kernels": len(texts)}), flush=True)
                assert not failed(found, True), failed(found, True)
        manifest.append(model)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(partial(_write, target, arch), *zip(*texts.items())))
        (target / "manifest.json").write_text(json.dumps({"arch": arch, "models": manifest}))
    return {"models": len(manifest), "kernels": len(texts), "bytes": sum(f.stat().st_size for f in target.iterdir())}


def _write(target: Path, arch: str, key: str, source: MetalSource) -> None:
    path = target / f"{key}.z"
    if not path.exists():
        ptx = compile_ptx(source, arch, find_toolchain()).replace(PTX_ENTRY, key)
        path.write_bytes(zlib.compress(machine_code(ptx, arch).code, 9))


def run(folder: Path, emulated: bool, only: Sequence[str], tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Every model, or those of these names; a failure stops none of the others."""
    manifest = json.loads((folder / "manifest.json").read_text())
    models = [m for m in manifest["models"] if not only or m["name"] in only]
    if not models:
        raise RequestError(
            f"no model of {', '.join(only)}: {folder} has {', '.join(m['name'] for m in manifest['models'])}"
        )
    OnCuda.folder = folder
    totals: dict[str, Any] = {"models": 0, "failures": 0}
    for model in models:
        for compute in ARITHMETIC:
            try:
                found = drive(folder, model, compute, emulated)
                said = failed(found, emulated)
            except Exception as error:  # what MLX throws is of no class of its own
                found, said = {"model": model["name"], "compute": compute}, [f"{type(error).__name__}: {error}"[:400]]
            if "tokens" in found:
                there, here = np.array(found.pop("tokens")), np.array(model[f"tokens_{compute}"])
                found["tokens_as_emulated"] = float((there == here).mean())
            tell(found | ({"failure": said} if said else {}))
            totals = {"models": totals["models"] + 1, "failures": totals["failures"] + bool(said)}
    device = "emulated" if emulated else str(mx.device_info().get("device_name", "a GPU"))
    return {**totals, "kernels": len(OnCuda.used), "device": device, "mlx": version("mlx"), "arch": manifest["arch"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["prepare", "run"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", type=int, default=len(MODELS), help="only the first so many")
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--emulated", action="store_true")
    parser.add_argument("--only", default="", help="run: names of models, with commas between them")
    parser.add_argument("--out", type=Path, help="writes the lines there as well")
    given = parser.parse_args()
    only = [name for name in given.only.split(",") if name]
    if given.what == "prepare":
        print(json.dumps(prepare(given.folder, given.models, given.arch)))
        return

    def tell(line: dict[str, Any]) -> None:
        print(json.dumps(line), flush=True)
        if given.out:
            with given.out.open("a") as file:
                file.write(json.dumps(line) + "\n")

    fast: Any = mx.fast
    if given.emulated:
        with install(Settings(mode=Mode.FAST)):
            fast.metal_kernel = Looked
            totals = run(given.folder, True, only, tell)
    else:
        fast.metal_kernel = OnCuda
        # Not so for what else is asked: limits of memory and the name of a Mac's GPU are Metal's.
        vars(stepping)["emulated"] = lambda: False
        totals = run(given.folder, False, only, tell)
    tell(totals)
    sys.exit(1 if totals["failures"] else 0)


if __name__ == "__main__":
    main()
