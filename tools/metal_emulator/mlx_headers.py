"""The Metal headers that the MLX wheel brings along: the prelude of every custom kernel, and Apple's own kernels."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from tools.metal_emulator.cache import METAL_HEADERS

MLX_KERNELS = "mlx/backend/metal/kernels/"


def mlx_include() -> Path | None:
    """The wheel's include directory; None where MLX is absent or came without its headers."""
    spec = importlib.util.find_spec("mlx")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(location) / "include" / MLX_KERNELS / "utils.h").exists():
            return Path(location) / "include"
    return None


def kernel_text(*names: str) -> str:
    """MLX's headers of these names, with all they include, as one Metal text whose places name the headers."""
    include = mlx_include()
    if include is None:
        raise FileNotFoundError("the installed mlx has no Metal headers")
    seen: set[str] = set()
    return "".join(_flat(MLX_KERNELS + name, include, seen) for name in ("utils.h", *names))


def _flat(path: str, include: Path, seen: set[str]) -> str:
    if path in seen:
        return ""
    seen.add(path)
    replacement = METAL_HEADERS / path
    file = replacement if replacement.exists() else include / path
    text = [f'#line 1 "{file.name}"']
    for number, line in enumerate(file.read_text().splitlines(), 1):
        match = re.match(r'#include "(mlx/[^"]*)"', line)
        if match:
            text += [_flat(match[1], include, seen), f'#line {number + 1} "{file.name}"']
        else:
            text.append("" if line.startswith("#pragma once") else line)
    return "\n".join(text) + "\n"
