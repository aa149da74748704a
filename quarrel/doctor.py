"""What this machine can run and what is missing, as findings in plain words; nothing here loads a model."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from quarrel import __version__
from quarrel.env import Environment, cache_home, misspelt, read_environment
from quarrel.errors import QuarrelError, installing
from quarrel.gguf import hub, ollama, resolve, store
from quarrel.ops.registry import BACKENDS, backend

State = Literal["ready", "fact", "missing", "broken"]

EXTRAS = {
    "cuda": ("NVIDIA GPUs", ("torch", "triton")),
    "metal": ("Apple GPUs", ("mlx",)),
    "server": ("the server", ("fastapi", "pydantic", "uvicorn", "websockets", "h11")),
    "structured": ("answers by schema, expression or grammar", ("llguidance",)),
    "flight": ("vector stores, Parquet and Arrow files", ("pyarrow",)),
    "hub": ("downloads from Hugging Face", ("huggingface_hub",)),
    "mcp": ("tools of MCP servers, and `quarrel mcp`", ("mcp",)),
    "terminal": ("Markdown and editing in `quarrel chat`", ("prompt_toolkit", "rich", "shtab")),
}
"""What can be added to an installation: the extra brings these packages for that use."""
ELSEWHERE = {"Darwin": "cuda", "Linux": "metal"}
"""An extra that is of no use on a system."""

CORE = ("numpy", "llvmlite", "gguf", "tokenizers", "sentencepiece", "jinja2")


@dataclass(frozen=True)
class Finding:
    """One line: its group, what it is about, how it stands, and the one thing to do where something is missing."""

    group: str
    what: str
    state: State
    text: str
    advice: str = ""


def examine() -> list[Finding]:
    """Everything, in the order in which it is worth reading. Never raises."""
    findings: list[Finding] = []
    for group, look in _GROUPS:
        try:
            findings += [Finding(group, *rest) for rest in look()]
        except Exception as error:  # a report on a broken machine must survive what is broken
            text = f"could not be looked at ({type(error).__name__}: {error})"
            findings.append(Finding(group, "", "broken", text))
    return findings


def usable(findings: list[Finding]) -> bool:
    """Whether some backend can run a model here."""
    return any(f.group == "backends" and f.state == "ready" for f in findings)


Line = tuple[str, State, str, str] | tuple[str, State, str]


def _backends() -> Iterator[Line]:
    for name in BACKENDS:
        try:
            found = backend(name)
            reason = found.unavailable()
            if reason is None:
                yield name, "ready", found.device()
            else:
                yield name, "missing", reason
        except QuarrelError as error:
            yield name, "missing", str(error)
        except Exception as error:  # a half-installed torch fails in its own ways
            text = f"its packages fail to load ({type(error).__name__}: {error})"
            yield name, "broken", text, "install them again in a fresh virtual environment"


def _machine() -> Iterator[Line]:
    yield "system", "fact", f"{platform.system()} {platform.release()}, {platform.machine()}"
    yield "processor", "fact", f"{_processor()}, {_cores()} of {os.cpu_count()} logical cores usable"
    memory, limit = _memory(), _container_limit()
    if memory:
        text = f"{_gib(memory)}"
        if limit and limit < memory:
            text += f", of which this container may use {_gib(limit)}"
        yield "memory", "fact", text
    yield from _gpu()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 0


def _container_limit() -> int:
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return int(Path(name).read_text().strip())
        except (OSError, ValueError):  # absent, or the word "max"
            continue
    return 0


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"


def _gpu() -> Iterator[Line]:
    driver = Path("/proc/driver/nvidia/version")
    if driver.exists() or shutil.which("nvidia-smi"):
        yield "NVIDIA driver", "fact", "installed"
    elif platform.system() == "Linux":
        yield "NVIDIA driver", "fact", "none found, so no NVIDIA GPU can be used"
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        yield "Apple GPU", "fact", "part of this chip"


def _python() -> Iterator[Line]:
    version = platform.python_version()
    where = f"{platform.python_implementation()} {version} in {sys.prefix}"
    yield "Python", "fact", where
    yield "quarrel", "fact", f"{__version__} in {Path(__file__).parent}"
    missing = [name for name in CORE if not _version(name)]
    present = ", ".join(f"{name} {_version(name)}" for name in CORE if name not in missing)
    yield "packages", "fact", present
    if missing:
        yield (
            "packages",
            "broken",
            f"{', '.join(missing)} not installed",
            "bring what is missing: pip install longbow-quarrel",
        )
    for extra, (use, names) in EXTRAS.items():
        if extra == ELSEWHERE.get(platform.system()):
            continue
        absent = [name for name in names if not _version(name)]
        if absent:
            yield f"[{extra}]", "missing", f"for {use}: no {' and no '.join(absent)}", installing(extra)
        else:
            yield f"[{extra}]", "fact", f"for {use}: " + ", ".join(f"{name} {_version(name)}" for name in names)


def _variables() -> Iterator[Line]:
    try:
        variables, usual = asdict(read_environment()), asdict(Environment())
    except QuarrelError as error:
        yield "environment", "broken", str(error), "mend or unset it: no command runs a model until then"
        return
    changed = [f"{name} = {value}" for name, value in variables.items() if value != usual[name]]
    yield "environment", "fact", ", ".join(changed) or "nothing is set"
    for name, meant in misspelt(os.environ):
        yield name, "broken", "is not read by anything", f"{meant} may be meant"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _caches() -> Iterator[Line]:
    base = cache_home() / "quarrel"
    reason = _not_writable(base)
    if reason:
        advice = "set XDG_CACHE_HOME to a folder that you may write to, or kernels are compiled anew at each start"
        yield "compiled kernels", "broken", f"{base} cannot be written to ({reason})", advice
    else:
        yield "compiled kernels", "fact", f"kept in {base}"


def _not_writable(folder: Path) -> str:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _models() -> Iterator[Line]:
    for name in ("demo", "demo-chat"):
        try:
            bundled = resolve(name).paths[0]
            yield name, "ready", f"{bundled.stat().st_size / 1e6:.1f} MB, bundled"
        except QuarrelError as error:
            yield name, "broken", str(error)
    stores = [folder for folder in ollama.stores() if _readable(folder / "manifests")]
    names = sorted(str(name) for folder in stores for name in store.names_in(folder))
    if stores:
        yield "Ollama", "fact", f"{_listed(names)} in {', '.join(map(str, stores))}"
    else:
        yield "Ollama", "fact", "no store found"
    cache = hub.cache_folder()
    files = [f"hf://{name}" for name, _ in hub.listed(cache)] if _readable(cache) else []
    yield "Hugging Face", "fact", f"{_listed(files)} in {cache}" if files else f"no GGUF model in {cache}"


def _readable(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.R_OK | os.X_OK)


def _listed(names: list[str], most: int = 12) -> str:
    if not names:
        return "no model"
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


_GROUPS: tuple[tuple[str, Callable[[], Iterator[Line]]], ...] = (
    ("backends", _backends),
    ("machine", _machine),
    ("Python", _python),
    ("settings", _variables),
    ("caches", _caches),
    ("models", _models),
)
