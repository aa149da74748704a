"""The Metal kernels of the MLX backend on an NVIDIA GPU: the same text compiled to PTX, the same launches, compared.

    python -m bench.check.metal_ptx prepare DIR [--all] [--arch sm_90]    where the emulator runs (any Linux machine)
    python -m bench.check.metal_ptx run DIR [--only NAME]                 where the GPU is: needs numpy and the CUDA driver
    compute-sanitizer --tool memcheck --padding 64 --error-exitcode 9 python -m bench.check.metal_ptx run DIR --smallest \\
        --exact
    compute-sanitizer --tool racecheck --error-exitcode 9 python -m bench.check.metal_ptx run DIR --smallest --exact

`prepare` runs the contracts' small cases (`--all`: every case), decoding attention of every head size and matrices whose
SIMD-groups share rows on the emulator, and keeps of every launch the PTX, its machine code, what went in, and what came out
there, which the contract has compared with its NumPy reference. `run` gives the GPU's outputs guard bands and NaN
beforehand, and measures the relative error against the emulator's; with `--smallest` one launch a kernel, with `--exact`
buffers that end where their array does (a sanitizer sees what is past them), with `--part 2/4` every fourth launch. With
`--planted` it runs nothing but a kernel with a race and a read past its input, which a sanitizer must report. The last line
is one JSON document.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

GUARD = 4096
LIMIT = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.2e-2}
"""Relative error against the emulator; float32 sums may be made in another order, and libdevice's exp is another."""
FEW_BYTES = 250_000
"""A launch of more is kept only where its kernel has no smaller one before, and one of thrice as many never."""
PLANTED = """
  threadgroup float shared[64];
  const uint i = thread_position_in_threadgroup.x;
  shared[i] = x[i + 1];
  y[i] = shared[63 - i];
"""
"""No barrier, and the last thread reads past x."""


def cases(every: bool) -> Iterator[tuple[Any, Any, Any, bool | None]]:
    """Op, case, arithmetic, and whether the rows are those of sequences with a single one."""
    from quarrel.ops import ALL_OPS, EXTRA_OPS
    from quarrel.ops.attention import ATTENTION, AttentionSpec
    from quarrel.ops.contract import Case
    from tools.metal_mutate import FURTHER

    tiles = Case(AttentionSpec(2, 1, 256, 0.0625), {"S": 1, "Q": 9, "KV": 20, "block_size": 16})
    dims = {"S": 1, "Q": 1, "KV": 300, "block_size": 16}
    decoding = [
        AttentionSpec(2, 2, 80, 0.11, window=259),
        AttentionSpec(7, 1, 96, 0.1, cap=10.0),
        AttentionSpec(8, 1, 128, 0.088, sinks=True),
        AttentionSpec(5, 1, 256, 0.0625),
    ]
    for op in {**ALL_OPS, **EXTRA_OPS}.values():
        for i, case in enumerate(op.cases()):
            if case.dims.get("kv"):
                continue  # codes are declined on Metal
            if not every and (i >= 3 and not op.name.startswith(("linear", "attention"))):
                continue
            for compute in ("float16", "float32", "bfloat16") if every or i == 0 else ("float16",):
                for single in (True, False) if "T" in case.dims and "S" not in case.dims else (None,):
                    yield op, case, compute, single
    for op, case in (*FURTHER, (ATTENTION, tiles), *((ATTENTION, Case(spec, dims)) for spec in decoding)):
        yield op, case, "float16", True if "S" not in case.dims else None


def prepare(target: Path, every: bool, arch: str) -> dict[str, Any]:
    """Runs the cases here and writes `manifest.json`, kernels and arrays, each of them once."""
    import mlx.core as mx

    from quarrel.errors import UnsupportedOp
    from quarrel.mlx_backend.backend import create
    from quarrel.mlx_backend.registry import REGISTRY
    from quarrel.mlx_backend.run_op import run_op
    from quarrel.mlx_backend.runtime.launch import Batch, Rows
    from quarrel.ops import reference
    from quarrel.ops.compare import errors
    from tools.metal_emulator import Mode, Settings, install, metal_kernel
    from tools.metal_emulator.arrays import metal_name
    from tools.metal_emulator.build import MetalSource
    from tools.metal_emulator.kernel import Call
    from tools.metal_emulator.ptx import assemble, compile_ptx
    from tools.metal_emulator.session import Launch
    from tools.metal_emulator.toolchain import find_toolchain

    target.mkdir(parents=True, exist_ok=True)
    launches: list[dict[str, Any]] = []
    resources: dict[str, dict[str, int]] = {}
    seen: set[str] = set()
    place = ["", "", ""]

    def keep(name: str, data: bytes) -> str:
        """Writes it unless it is there."""
        path = target / (name or hashlib.sha256(data).hexdigest()[:16] + ".z")
        if not path.exists():
            path.write_bytes(zlib.compress(data, 9))
        return path.name

    def build(name: str, whole: str, entry: str) -> str:
        key = hashlib.sha256(whole.encode()).hexdigest()[:16]
        if key not in resources:
            ptx = compile_ptx(MetalSource(name, whole, entry), arch, find_toolchain())
            used = assemble(ptx, arch)
            keep(f"{key}.ptx.z", ptx.encode())
            keep(f"{key}.cubin.z", used.code)
            resources[key] = {"registers": used.registers, "spilled": used.spilled_bytes, "shared": used.shared_bytes}
        return key

    class Recorder(metal_kernel):
        """Executes as the emulator does and writes down what a GPU needs to do the same."""

        def launch(self, call: Call, settings: Settings) -> Launch:
            done = super().launch(call, settings)
            text = self.text(call)
            whole = text.with_places()
            shapes = repr([np.shape(i) for i in call.inputs])
            key = hashlib.sha256(whole.encode()).hexdigest()[:16]
            outputs = [_raw(mx.array(o)) for o in done.outputs]
            buffers, alive = self._buffers(self._inputs(call), outputs, False)
            given = [ctypes.string_at(b.address, b.bytes) for b in buffers[: -len(outputs)]]
            del alive
            size = sum(map(len, given)) + sum(o.nbytes for o in outputs)
            known = f"{key} {shapes}" in seen or (size > FEW_BYTES and key in resources)
            if not every and (known or size > 3 * FEW_BYTES):
                return done
            seen.add(f"{key} {shapes}")
            assert build(self.name, whole, text.entry) == key
            launches.append(
                {
                    "kernel": self.name, "code": key, "op": place[0], "case": place[1], "compute": place[2],
                    "given": [[len(g), keep("", g)] for g in given],
                    "wanted": [[metal_name(d), o.nbytes, keep("", o.tobytes())]
                               for d, o in zip(call.output_dtypes, outputs)],
                    "groups": [g // t for g, t in zip(call.grid, call.threadgroup)], "threads": list(call.threadgroup),
                }
            )  # fmt: skip
            return done

    with install(Settings(mode=Mode.FAST)):
        mx.fast.metal_kernel = Recorder
        create()
        for op, case, compute, single in cases(every):
            inputs = op.make(case, np.random.default_rng(0))
            place[:] = [op.name, f"{case.spec} {dict(case.dims)} {single}", compute]
            batch = None if single is None else Batch(*[Rows(np.full(case.dims["T"], single))] * 2)
            try:
                got = run_op(REGISTRY, op, case.spec, inputs, compute, batch)
            except UnsupportedOp:  # caches of codes, which the backend declines
                continue
            found = errors(op, case.spec, got, reference.run_op(op, case.spec, inputs), case)
            assert max(found.values()) <= op.tolerance[compute], (place, found)
    smallest: dict[str, dict[str, Any]] = {}
    for launch in launches:
        best = smallest.setdefault(launch["code"], launch)
        if np.prod(launch["groups"]) < np.prod(best["groups"]):
            smallest[launch["code"]] = launch
    for launch in launches:
        launch["smallest"] = smallest[launch["code"]] is launch
    planted = metal_kernel("planted", ["x"], ["y"], PLANTED)
    text = planted.text(Call([np.zeros(64, np.float32)], [(64,)], [np.float32], (64, 1, 1), (64, 1, 1)))
    manifest = {"arch": arch, "launches": launches, "resources": resources, "planted": ""}
    manifest["planted"] = build("planted", text.with_places(), text.entry)
    (target / "manifest.json").write_text(json.dumps(manifest))
    spilled = sum(1 for r in resources.values() if r["spilled"])
    size = sum(f.stat().st_size for f in target.iterdir())
    return {
        "launches": len(launches), "kernels": len(resources) - 1, "kernels_that_spill": spilled, "arch": arch,
        "bytes": size, "most_registers": max(r["registers"] for r in resources.values()),
    }  # fmt: skip


def _raw(array: Any) -> np.ndarray[Any, Any]:
    """An MLX array's bytes as a numpy array of them."""
    import mlx.core as mx

    return np.array(mx.contiguous(array).reshape(-1).view(mx.uint8))


class Driver:
    """The few calls of the CUDA driver API that a launch takes."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        name = ctypes.create_string_buffer(100)
        self._call("cuDeviceGetName", name, 100, device)
        self.name = name.value.decode()

    def _call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._cuda, function)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"{function}: {(text.value or b'?').decode()}")

    def load(self, source: Path, key: str) -> ctypes.c_void_p:
        """The entry of a module: its machine code, or its PTX where that is for another GPU."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        try:
            self._call("cuModuleLoadData", ctypes.byref(module), _kept(source, f"{key}.cubin.z"))
        except RuntimeError:
            self._call("cuModuleLoadData", ctypes.byref(module), _kept(source, f"{key}.ptx.z") + b"\0")
        self._call("cuModuleGetFunction", ctypes.byref(function), module, b"msl_kernel_entry")
        return function

    def upload(self, data: np.ndarray[Any, Any]) -> ctypes.c_uint64:
        pointer = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(1, data.nbytes)))
        self._call("cuMemcpyHtoD_v2", pointer, data.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(data.nbytes))
        return pointer

    def download(self, pointer: ctypes.c_uint64, nbytes: int) -> np.ndarray[Any, Any]:
        out = np.empty(nbytes, np.uint8)
        self._call("cuMemcpyDtoH_v2", out.ctypes.data_as(ctypes.c_void_p), pointer, ctypes.c_size_t(nbytes))
        return out

    def free(self, pointer: ctypes.c_uint64) -> None:
        self._call("cuMemFree_v2", pointer)

    def launch(self, function: ctypes.c_void_p, groups: list[int], threads: list[int], buffers: list[int]) -> None:
        """Runs to the end."""
        values = [ctypes.c_uint64(b) for b in buffers]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        self._call("cuLaunchKernel", function, *groups, *threads, 0, None, pointers, None)
        self._call("cuCtxSynchronize")


def _kept(source: Path, name: str) -> bytes:
    return zlib.decompress((source / name).read_bytes())


def run(source: Path, only: str, part: str, smallest: bool, exact: bool) -> dict[str, Any]:
    """Every launch on the GPU, against what the emulator made of it. Interrupted, it tells what was done."""
    manifest = json.loads((source / "manifest.json").read_text())
    driver, functions = Driver(), {}
    rows: list[dict[str, Any]] = []
    guard = 0 if exact else GUARD
    index, of = (int(n) for n in part.split("/"))
    chosen = [x for x in manifest["launches"] if only in x["kernel"] and (x["smallest"] or not smallest)][index - 1 :: of]
    try:
        for launch in chosen:
            if launch["code"] not in functions:
                functions[launch["code"]] = driver.load(source, launch["code"])
            given = [np.frombuffer(_kept(source, name), np.uint8) for _, name in launch["given"]]
            buffers = [driver.upload(g) for g in given]
            # NaN within, and a band of it on either side that must stay as it is.
            bands = [driver.upload(np.full(size + 2 * guard, 255, np.uint8)) for _, size, _ in launch["wanted"]]
            pointers = [b.value for b in buffers] + [b.value + guard for b in bands]
            driver.launch(functions[launch["code"]], launch["groups"], launch["threads"], pointers)
            worst, outside = 0.0, False
            for (type, size, name), band in zip(launch["wanted"], bands):
                whole = driver.download(band, size + 2 * guard)
                outside |= not (np.concatenate([whole[:guard], whole[guard + size :]]) == 255).all()
                error = _error(whole[guard : guard + size], np.frombuffer(_kept(source, name), np.uint8), type)
                worst = max(worst, error / LIMIT.get(_floats(type), 1.0))
            changed = any((driver.download(b, g.nbytes) != g).any() for b, g in zip(buffers, given))
            for pointer in (*buffers, *bands):
                driver.free(pointer)
            said = "writes outside its output" if outside else "writes to its input" if changed else ""
            said = said or ("" if worst <= 1 else f"{worst:.3g} of what it may differ by")
            row = {k: launch[k] for k in ("kernel", "op", "case", "compute")}
            rows.append({**row, "error_over_limit": float(f"{worst:.2g}"), **({"failure": said} if said else {})})
    except KeyboardInterrupt:
        print(f"cut off after {len(rows)} of {len(chosen)} launches")
    for row in rows:
        if "failure" in row:
            print("FAILED", row)
    return {
        "device": driver.name, "arch": manifest["arch"], "asked": len(chosen), "launches": len(rows),
        "kernels": len(functions), "failures": sum("failure" in r for r in rows),
        "largest_error_over_limit": max((r["error_over_limit"] for r in rows), default=0.0), "rows": rows,
    }  # fmt: skip


def run_planted(source: Path) -> dict[str, Any]:
    """Launches the kernel with a race and a read past its input, which is 256 bytes long."""
    driver = Driver()
    function = driver.load(source, json.loads((source / "manifest.json").read_text())["planted"])
    x, y = (driver.upload(np.zeros(256, np.uint8)) for _ in range(2))
    driver.launch(function, [1, 1, 1], [64, 1, 1], [v for v in (x.value, y.value) if v is not None])
    return {"device": driver.name, "planted": True}


def _floats(metal: str) -> str:
    return {"float": "float32", "float16_t": "float16", "bfloat16_t": "bfloat16"}.get(metal, metal)


def _error(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any], metal: str) -> float:
    """RMS of the difference over that of the wanted; for whole numbers 0 if equal, else infinity."""
    type = _floats(metal)
    if type == "bfloat16":
        g, w = ((a.view(np.uint16).astype(np.uint32) << 16).view(np.float32) for a in (got, want))
    elif type in LIMIT:
        g, w = got.view(type), want.view(type)
    else:
        return 0.0 if np.array_equal(got, want) else float("inf")
    g, w = g.astype(np.float64), w.astype(np.float64)
    finite = np.isfinite(w)
    if not np.array_equal(finite, np.isfinite(g)):
        return float("inf")
    scale = float(np.sqrt(np.mean(w[finite] ** 2))) if finite.any() else 0.0
    return float(np.sqrt(np.mean((g[finite] - w[finite]) ** 2))) / (scale or 1.0) if finite.any() else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["prepare", "run"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--smallest", action="store_true")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--planted", action="store_true")
    parser.add_argument("--out", type=Path, help="writes the JSON document there as well")
    given = parser.parse_args()
    if given.what == "prepare":
        report = prepare(given.folder, given.all, given.arch)
    elif given.planted:
        report = run_planted(given.folder)
    else:
        report = run(given.folder, given.only, given.part, given.smallest, given.exact)
    if given.out:
        given.out.write_text(json.dumps(report) + "\n")
    print(json.dumps({k: v for k, v in report.items() if k != "rows"}))
    sys.exit(1 if report.get("failures") else 0)


if __name__ == "__main__":
    main()
