"""Weights of small models between training and export: float16, in files that any transfer takes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from tools.demo_model import Llama, Shape

SHARD_BYTES = 14 * 2**20


def save(model: Llama, out: Path) -> None:
    """Write float16 weights to `out`, in shards of at most SHARD_BYTES, and the shape."""
    shards: list[dict[str, np.ndarray]] = [{}]
    for name, parameter in model.named_parameters():
        array = parameter.detach().to(torch.float16).cpu().numpy()
        if sum(a.nbytes for a in shards[-1].values()) + array.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = array
    for number, shard in enumerate(shards):
        np.savez(out / f"weights-{number}.npz", **shard)
    (out / "shape.json").write_text(json.dumps(asdict(model.shape)) + "\n", encoding="utf-8")


def load(run: Path) -> Llama:
    """The model that `save` wrote to a folder, in float32 on the CPU."""
    model = Llama(Shape(**json.loads((run / "shape.json").read_text(encoding="utf-8"))))
    arrays = {name: a for path in sorted(run.glob("weights-*.npz")) for name, a in np.load(path).items()}
    model.load_state_dict({name: torch.from_numpy(a).float() for name, a in arrays.items()})
    return model
