"""What sentence-transformers puts behind an encoder, each in a folder beside the model: the pooling, and dense maps."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quarrel.convert.config import read_json
from quarrel.convert.keys import POOLING
from quarrel.errors import UnsupportedModel

DENSE = ("dense_2_out", "dense_3_out")
"""As the gguf package's table has them, for architectures that take such maps."""


@dataclass(frozen=True)
class Modules:
    """pooling: `pooling_type`, None where nothing says it. dense: files of the maps of pooled rows, in their order."""

    pooling: int | None = None
    dense: tuple[Path, ...] = ()

    @property
    def keys(self) -> dict[str, Any]:
        return {} if self.pooling is None else {"pooling_type": self.pooling}

    @property
    def named(self) -> dict[str, Path]:
        """The maps' files, by what takes the place of `linear` in the names of their tensors."""
        return dict(zip(DENSE, self.dense))


def modules(folder: Path) -> Modules:
    """Raises UnsupportedModel for what would change vectors and cannot be told in a GGUF file."""
    path = folder / "modules.json"
    if not path.is_file():
        return Modules()
    try:
        listed = [(str(m["type"]).rpartition(".")[2], str(m["path"])) for m in json.loads(path.read_text("utf-8"))]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        raise UnsupportedModel(f"{path} is no list of modules: download the model again") from None
    pooling, dense = None, []
    for kind, named in listed:
        if kind not in ("Pooling", "Dense"):
            continue
        if Path(named).name != named:
            raise UnsupportedModel(f"{path} places the {kind.lower()} in {named[:80]!r}, wanted a folder in this one")
        if kind == "Dense":
            dense.append(_dense(folder / named))
        elif pooling is None:
            pooling = _pooling(folder / named)
    if len(dense) > len(DENSE):
        raise UnsupportedModel(f"{path} names {len(dense)} dense maps of vectors, wanted {len(DENSE)} at most")
    return Modules(pooling, tuple(dense))


def _pooling(folder: Path) -> int:
    found = read_json(folder / "config.json")
    for key, kind in (("mean_tokens", 1), ("cls_token", 2), ("lasttoken", 3)):
        if found.get(f"pooling_mode_{key}"):
            return kind
    mode = str(found.get("pooling_mode"))
    if mode not in POOLING:
        raise UnsupportedModel(f"{folder} pools by {mode[:40]!r}, wanted one of {', '.join(POOLING)}")
    return POOLING[mode]


def _dense(folder: Path) -> Path:
    said, file = read_json(folder / "config.json"), folder / "model.safetensors"
    after = str(said.get("activation_function") or "Identity").rpartition(".")[2]
    if after != "Identity" or said.get("bias"):
        what = "a bias" if after == "Identity" else f"the activation {after[:40]}"
        raise UnsupportedModel(
            f"the map of vectors in {folder} has {what}, which a GGUF file cannot tell: results without it would be wrong"
        )
    if not file.is_file():
        raise UnsupportedModel(f"{folder} has no model.safetensors: download the model whole")
    return file
