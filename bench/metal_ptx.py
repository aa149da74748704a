"""The Metal kernels of the MLX backend on an NVIDIA GPU: the same text compiled to PTX, the same launches, compared.

    python bench/metal_ptx.py prepare DIR [--all] [--arch sm_90]    where the emulator runs (any Linux machine)
    python bench/metal_ptx.py run DIR [--only NAME]                 where the GPU is: needs numpy and the CUDA driver alone
    compute-sanitizer --tool memcheck --error-exitcode 9 python bench/metal_ptx.py run DIR
    compute-sanitizer --tool racecheck --error-exitcode 9 python bench/metal_ptx.py run DIR

`prepare` runs the contracts' smallest cases (`--all`: every case) on the emulator, and keeps of every launch the PTX, what
went in, and what came out there, which the contract has compared with its NumPy reference. `run` gives the GPU's outputs
guard bands and NaN beforehand, and measures the relative error against the emulator's. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

GUARD = 4096
LIMIT = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.2e-2}
"""Relative error against the emulator; float32 sums may be made in another order, and libdevice's exp is another."""


def prepare(target: Path, every: bool, arch: str) -> dict[str, Any]:
    """Runs the cases here and writes `manifest.json`, PTX files and one array file a launch."""
    import mlx.core as mx

    from quarrel.mlx_backend import door
    from quarrel.mlx_backend.backend import create
    from quarrel.mlx_backend.registry import REGISTRY
    from quarrel.mlx_backend.runtime import Live, Rows
    from quarrel.ops import ALL_OPS, EXTRA_OPS, reference
    from quarrel.ops.compare import errors
    from tools.metal_emulator import Mode, Settings, install, metal_kernel
    from tools.metal_emulator.arrays import metal_name
    from tools.metal_emulator.build import MetalSource
    from tools.metal_emulator.kernel import Call, Launch
    from tools.metal_emulator.ptx import assemble, compile_ptx
    from tools.metal_emulator.toolchain import find_toolchain

    target.mkdir(parents=True, exist_ok=True)
    launches: list[dict[str, Any]] = []
    resources: dict[str, dict[str, int]] = {}
    seen: set[str] = set()
    place = ["", ""]

    class Recorder(metal_kernel):
        """Executes as the emulator does and writes down what a GPU needs to do the same."""

        def launch(self, call: Call, settings: Settings) -> Launch:
            done = super().launch(call, settings)
            text = self.text(call)
            whole = text.with_places()
            key = hashlib.sha256(whole.encode()).hexdigest()[:16]
            shapes = repr([np.shape(i) for i in call.inputs])
            if (once := f"{key} {shapes}") in seen and not every:
                return done
            seen.add(once)
            if key not in resources:
                ptx = compile_ptx(MetalSource(self.name, whole, text.entry), arch, find_toolchain())
                (target / f"{key}.ptx").write_text(ptx)
                used = assemble(ptx, arch)
                resources[key] = {"registers": used.registers, "spilled": used.spilled_bytes, "shared": used.shared_bytes}
            outputs = [_raw(mx.array(o)) for o in done.outputs]
            buffers, keep = self._buffers(self._inputs(call), outputs, False)
            given = [np.frombuffer(ctypes.string_at(b.address, b.bytes), np.uint8) for b in buffers[: -len(outputs)]]
            del keep
            file = f"{len(launches):04d}.npz"
            np.savez_compressed(target / file, *given, **{f"out{i}": o.view(np.uint8) for i, o in enumerate(outputs)})
            launches.append(
                {
                    "kernel": self.name, "ptx": key, "arrays": file, "op": place[0], "case": place[1],
                    "inputs": len(given), "outputs": [metal_name(d) for d in call.output_dtypes],
                    "groups": [g // t for g, t in zip(call.grid, call.threadgroup)], "threads": list(call.threadgroup),
                }
            )  # fmt: skip
            return done

    with install(Settings(mode=Mode.FAST)):
        mx.fast.metal_kernel = Recorder
        create()
        for op in {**ALL_OPS, **EXTRA_OPS}.values():
            for i, case in enumerate(op.cases() if every or op.name.startswith("linear") else op.cases()[:3]):
                inputs = op.make(case, np.random.default_rng(0)) if op.make else ()
                ways = (True, False) if "T" in case.dims and "S" not in case.dims else (None,)
                for single in ways:
                    place[:] = [op.name, f"{i} {case.spec} {dict(case.dims)} {single}"]
                    live = None if single is None else Live(*[Rows(np.full(case.dims["T"], single))] * 2)
                    got = door.run_op(REGISTRY, op, case.spec, inputs, "float16", live)
                    found = errors(op, case.spec, got, reference.run_op(op, case.spec, inputs), case)
                    assert max(found.values()) <= op.tolerance["float16"], (place, found)
            print(op.name, len(launches), "launches", len(resources), "kernels", flush=True)
    manifest = {"arch": arch, "launches": launches, "resources": resources}
    (target / "manifest.json").write_text(json.dumps(manifest))
    spilled = sum(1 for r in resources.values() if r["spilled"])
    return {"launches": len(launches), "kernels": len(resources), "kernels_that_spill": spilled, "arch": arch}


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

    def load(self, ptx: str) -> ctypes.c_void_p:
        """The entry of a module."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), ptx.encode() + b"\0")
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


def run(source: Path, only: str) -> dict[str, Any]:
    """Every launch on the GPU, against what the emulator made of it."""
    manifest = json.loads((source / "manifest.json").read_text())
    driver, functions = Driver(), {}
    worst: dict[str, float] = {}
    failures: list[str] = []
    done = 0
    for launch in manifest["launches"]:
        if only not in launch["kernel"]:
            continue
        if launch["ptx"] not in functions:
            functions[launch["ptx"]] = driver.load((source / f"{launch['ptx']}.ptx").read_text())
        arrays = np.load(source / launch["arrays"])
        buffers = [driver.upload(arrays[f"arr_{i}"]) for i in range(launch["inputs"])]
        wanted = [arrays[f"out{i}"] for i in range(len(launch["outputs"]))]
        # NaN within, and a band of it on either side that must stay as it is.
        bands = [driver.upload(np.full(w.nbytes + 2 * GUARD, 255, np.uint8)) for w in wanted]
        pointers = [b.value for b in buffers] + [b.value + GUARD for b in bands]
        driver.launch(functions[launch["ptx"]], launch["groups"], launch["threads"], pointers)
        for type, want, band in zip(launch["outputs"], wanted, bands):
            whole = driver.download(band, want.nbytes + 2 * GUARD)
            guards = np.concatenate([whole[:GUARD], whole[GUARD + want.nbytes :]])
            error = _error(whole[GUARD : GUARD + want.nbytes], want, type)
            worst[launch["kernel"]] = max(worst.get(launch["kernel"], 0.0), error)
            if not (guards == 255).all() or not error <= LIMIT.get(_floats(type), 0.0):
                what = f"error {error:.3g}" if (guards == 255).all() else "writes outside its output"
                failures.append(f"{launch['kernel']} ({launch['op']} {launch['case']}): {what}")
        for pointer in (*buffers, *bands):
            driver.free(pointer)
        done += 1
    for name, error in sorted(worst.items()):
        print(f"{name:50} {error:.2e}")
    for failure in failures:
        print("FAILED", failure)
    return {
        "device": driver.name, "launches": done, "kernels": len(functions), "failures": failures,
        "largest_error": max(worst.values(), default=0.0),
    }  # fmt: skip


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
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    report = prepare(given.folder, given.all, given.arch) if given.what == "prepare" else run(given.folder, given.only)
    print(json.dumps(report))
    sys.exit(1 if report.get("failures") else 0)


if __name__ == "__main__":
    main()
