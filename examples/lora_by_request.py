"""Two requests of one batch, the second with a LoRA adapter. The adapter is made up here; yours comes from training."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import numpy as np

import quarrel
from quarrel.gguf import GGUFFile, GGUFWriter
from quarrel.gguf.resolve import resolve

MODEL = sys.argv[1] if len(sys.argv) > 1 else "demo"
RANK = 4
adapter = Path(tempfile.mkdtemp()) / "adapter.gguf"

# As llama.cpp's convert_lora_to_gguf.py writes them: of a map [n, k], the factors a [rank, k] and b [n, rank].
writer, rng = GGUFWriter(), np.random.default_rng(1)
with GGUFFile.open(resolve(MODEL).paths[0]) as file:
    for key, value in {"type": "adapter", "architecture": file.metadata["general.architecture"]}.items():
        writer.add(f"general.{key}", value)
    n, k = file.tensors["blk.0.attn_q.weight"].shape
writer.add("adapter.type", "lora")
writer.add("adapter.lora.alpha", 8.0)
for name, shape in {"lora_a": (RANK, k), "lora_b": (n, RANK)}.items():
    writer.add_tensor(f"blk.0.attn_q.weight.{name}", (rng.standard_normal(shape) * 0.2).astype(np.float32))
writer.write(adapter)

with quarrel.load(MODEL, adapters={"mine": str(adapter)}) as llm:

    async def both() -> list[quarrel.Result]:
        calls = [llm.agenerate("Once upon a time", max_tokens=16, temperature=0, adapter=name) for name in (None, "mine")]
        return await asyncio.gather(*calls)

    alone, adapted = asyncio.run(both())
print(f"the model itself: {alone.text}\nwith the adapter: {adapted.text}")
