"""A quantised weight of a GGUF file in a PyTorch module: `torch.ops.quarrel`. Without a GPU, in Triton's interpreter."""

from __future__ import annotations

import os
import sys

try:
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    import triton  # noqa: F401
except ImportError:
    sys.exit("needs PyTorch and Triton: pip install 'longbow-quarrel[cuda]'")

import numpy as np

import quarrel.interop.torch_ops  # noqa: F401  (registers torch.ops.quarrel)
from quarrel.gguf import GGUFFile
from quarrel.gguf.resolve import resolve

NAME = "blk.0.ffn_gate.weight"
device = "cuda" if torch.cuda.is_available() else "cpu"


class Linear(torch.nn.Module):
    """y = x W^T, W as its blocks: 8.5 bits a weight of Q8_0, here and in memory."""

    def __init__(self, raw: np.ndarray, format: str, k: int) -> None:
        super().__init__()
        self.format, self.n = format, len(raw)
        self.register_buffer("weight", torch.ops.quarrel.pack(torch.from_numpy(raw).to(device), format, k))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.quarrel.linear(x, self.weight, self.format, self.n, None)


with GGUFFile.open(resolve(sys.argv[1] if len(sys.argv) > 1 else "demo").paths[0]) as file:
    entry = file.tensors[NAME]
    layer = Linear(np.array(file.raw(NAME)), entry.type.name, entry.shape[1])
    exact = torch.from_numpy(file.array(NAME)).to(device)
x = torch.randn(2, entry.shape[1], generator=torch.Generator().manual_seed(1)).to(device)
error = (layer(x) - x @ exact.T).abs().max() / (x @ exact.T).abs().max()
print(f"{NAME} {tuple(entry.shape)} in {entry.type.name}: {layer.weight.numel():,} bytes, error {error:.1e}")
assert error < 1e-2
