"""The QUARREL_* variables: all of them, read in one place, and strictly.

QUARREL_BACKEND   auto, cpu, triton or mlx: where models run when nothing else is asked for
QUARREL_COMPUTE   auto, float32, float16, bfloat16 or fp8: the arithmetic when nothing else is asked for
QUARREL_THREADS   threads of the CPU backend, 1 to 1024
QUARREL_TENSOR_PARALLEL   how many devices share a model when nothing else is asked for, 1 to 16
QUARREL_MEMORY    the memory that a model may take, in bytes (512MiB, 16GB) or as a share of what is free (80%, 0.8)
QUARREL_KV_CACHE  auto, float16, bfloat16, int8, fp8 or fp8_e5m2: how keys and values are stored if no one asks otherwise
QUARREL_ATTENTION  auto, own or cudnn: who attends to long prompts on CUDA when nothing else is asked for
QUARREL_METAL     auto or mlx: mlx takes mx.quantized_matmul for the formats that it holds exactly, to compare with
QUARREL_CHECK     1 compares every op with its NumPy reference while it runs (slow)
QUARREL_MODELS    a further folder to look for models in
QUARREL_PREFILL_KEY   a secret between processes that read prompts and those that they are read for
QUARREL_LOG       debug, info, warning or error: what the logger "quarrel" writes to standard error
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from quarrel.errors import ConfigError

BACKENDS = ("auto", "cpu", "triton", "mlx")
COMPUTE = ("auto", "float32", "float16", "bfloat16", "fp8")
KV_CACHE = ("auto", "float16", "bfloat16", "int8", "fp8", "fp8_e5m2")
ATTENTION = ("auto", "own", "cudnn")
METAL = ("auto", "mlx")
LEVELS = ("debug", "info", "warning", "error")
NAMES = (
    *("QUARREL_BACKEND", "QUARREL_COMPUTE", "QUARREL_THREADS", "QUARREL_TENSOR_PARALLEL", "QUARREL_MEMORY"),
    *("QUARREL_KV_CACHE", "QUARREL_ATTENTION", "QUARREL_METAL", "QUARREL_CHECK", "QUARREL_MODELS", "QUARREL_LOG"),
    "QUARREL_PREFILL_KEY",
)
MAX_THREADS = 1024
MAX_DEVICES = 16


@dataclass(frozen=True)
class Environment:
    """What the variables say; the defaults stand for variables that are not set or empty."""

    backend: str = "auto"
    compute: str = "auto"
    threads: int | None = None
    check: bool = False
    models: Path | None = None
    log: str | None = None
    memory: int | float | None = None
    kv_cache: str = "auto"
    attention: str = "auto"
    metal: str = "auto"
    tensor_parallel: int = 1
    prefill_key: str = field(default="", repr=False)


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Reads the variables, the process's own by default. Raises ConfigError, naming the variable and what it may be."""
    given = {k: v for k, v in (os.environ if variables is None else variables).items() if v}
    models = given.get("QUARREL_MODELS")
    return Environment(
        backend=_choice(given, "QUARREL_BACKEND", BACKENDS, "auto"),
        compute=_choice(given, "QUARREL_COMPUTE", COMPUTE, "auto"),
        threads=_count(given, "QUARREL_THREADS", MAX_THREADS),
        tensor_parallel=_count(given, "QUARREL_TENSOR_PARALLEL", MAX_DEVICES) or 1,
        prefill_key=given.get("QUARREL_PREFILL_KEY", ""),
        memory=_memory(given),
        kv_cache=_choice(given, "QUARREL_KV_CACHE", KV_CACHE, "auto"),
        attention=_choice(given, "QUARREL_ATTENTION", ATTENTION, "auto"),
        metal=_choice(given, "QUARREL_METAL", METAL, "auto"),
        check=_choice(given, "QUARREL_CHECK", ("0", "1"), "0") == "1",
        models=None if models is None else _folder(models),
        log=_choice(given, "QUARREL_LOG", LEVELS, LEVELS[0]) if "QUARREL_LOG" in given else None,
    )


def misspelt(variables: Iterable[str]) -> list[tuple[str, str]]:
    """Names that are nearly one of the variables, and which."""
    known = {name.partition("_")[2]: name for name in NAMES}
    found = []
    for name in sorted(set(variables) - set(NAMES)):
        first, _, rest = name.partition("_")
        if first == NAMES[0].partition("_")[0] and (near := get_close_matches(rest, known, 1, 0.75)):
            found.append((name, known[near[0]]))
    return found


def _choice(given: Mapping[str, str], name: str, allowed: tuple[str, ...], default: str) -> str:
    value = given.get(name, default)
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}, wanted one of {', '.join(allowed)}")
    return value


def _count(given: Mapping[str, str], name: str, most: int) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) < 5) or not 1 <= int(value) <= most:
        raise ConfigError(f"{name} is {value!r}, wanted a whole number from 1 to {most}")
    return int(value)


def memory_of(text: str) -> int | float:
    """Bytes as a whole number, or a share of what is free as a float above 0, at most 1. Raises ConfigError."""
    found = _AMOUNT.fullmatch(text.strip())
    if found:
        number, unit = found[1], found[2].lower()
        if unit == "%" and 0 < float(number) <= 100:
            return float(number) / 100
        if not unit and "." in number and 0 < float(number) <= 1:
            return float(number)
        if unit != "%" and (unit or "." not in number) and float(number) * _UNITS[unit] >= 1:
            return int(float(number) * _UNITS[unit])
    raise ConfigError(f"the memory is {text!r}, wanted bytes such as 512MiB or 16GB, or a share such as 80% or 0.8")


_AMOUNT = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?(%|[kmgtKMGT]?(?:i?[bB])?)", re.ASCII)
_UNITS = {"": 1, "b": 1} | {
    unit + ending: (1000 if ending == "b" else 1024) ** power
    for power, unit in enumerate("kmgt", 1)
    for ending in ("", "b", "ib")
}
"""KB is 1000 bytes; K and KiB are 1024."""


def _memory(given: Mapping[str, str]) -> int | float | None:
    value = given.get("QUARREL_MEMORY")
    if value is None:
        return None
    try:
        return memory_of(value)
    except ConfigError as error:
        raise ConfigError(str(error).replace("the memory", "QUARREL_MEMORY", 1)) from None


def _folder(value: str) -> Path:
    path = Path(value).expanduser()
    if not path.is_dir():
        raise ConfigError(f"QUARREL_MODELS is {value!r}, which is no folder; create it or unset the variable")
    return path


def cache_home() -> Path:
    """$XDG_CACHE_HOME; a relative one counts as none, as the XDG specification says."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return given if given.is_absolute() else Path("~/.cache").expanduser()
