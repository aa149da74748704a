"""What the driver says of a GPU while something runs on it: utilisation and power, by NVML or by nvidia-smi."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

Reading = tuple[float, float]
"""Per cent of the time in which a kernel ran, and watts."""

ABSENT = "no utilisation or power: neither pynvml (nvidia-ml-py) nor nvidia-smi is here"
INTERVAL = 0.05


@dataclass(frozen=True)
class GpuLoad:
    """Means over the readings, and the highest power."""

    utilisation: float
    watts: float
    peak_watts: float
    readings: int


def reader() -> Callable[[], Reading] | None:
    """What reads the GPU that this process uses; None where nothing can."""
    return _nvml() or _nvidia_smi()


def _device() -> str:
    """The number or the UUID of the first device that CUDA sees."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"


def _nvml() -> Callable[[], Reading] | None:
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        name = _device()
        handle = nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)
    except Exception:  # its errors are its own, and whatever is wrong, nvidia-smi may know
        return None
    return lambda: (
        float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
    )


def _nvidia_smi() -> Callable[[], Reading] | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "-i", _device(), "--query-gpu=utilization.gpu,power.draw", "--format=csv,noheader,nounits"]

    def read() -> Reading:
        out = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        percent, watts = out.splitlines()[0].split(",")
        return float(percent), float(watts)

    return read


class Watch:
    """Reads the GPU on a thread of its own while a `with` runs."""

    def __init__(self, read: Callable[[], Reading] | None, interval: float = INTERVAL) -> None:
        self._read, self._interval = read, interval
        self._readings: list[Reading] = []
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watch:
        if self._read is not None:
            self._thread = threading.Thread(target=self._run, args=(self._read,), name="quarrel-gpu-load", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, read: Callable[[], Reading]) -> None:
        while True:
            try:
                self._readings.append(read())
            except Exception:  # a driver that stops answering costs a reading, not the measurement
                return
            if self._over.wait(self._interval):
                return

    def load(self) -> GpuLoad | None:
        """None where nothing was read."""
        if not self._readings:
            return None
        percents, watts = zip(*self._readings, strict=True)
        count = len(self._readings)
        return GpuLoad(sum(percents) / count, sum(watts) / count, max(watts), count)
