"""What a figure depends on besides the code: versions, processor, driver."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time

from quarrel import __version__

PACKAGES = ("numpy", "llvmlite", "torch", "triton", "mlx", "gguf")


def versions() -> dict[str, str]:
    """Of Quarrel, Python and whatever is installed of what backends are made of."""
    found = {"quarrel": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, object]:
    """The host, in words, and when."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": versions(),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
        return names[0] if names else platform.machine()
    except OSError:
        return platform.processor() or platform.machine()
