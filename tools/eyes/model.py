"""A small LLaVA for training: CLIP's tower with two maps behind it, and the llama of `tools.demo_model`, in plain torch.

Parameters of the tower carry GGUF's names of a projector file, `mm.` and `v.` for `mm_` and nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.demo_model import Llama, Shape

TEXT = Shape(
    vocab_size=448, context_length=256, embedding_length=128, feed_forward_length=256, block_count=3, head_count=4,
    head_count_kv=2, head_dim=32,
)  # fmt: skip


@dataclass(frozen=True)
class TowerShape:
    """Static facts of a tower."""

    side: int = 48
    patch: int = 12
    width: int = 96
    wide: int = 384
    blocks: int = 4
    heads: int = 4
    eps: float = 1e-5

    @property
    def patches(self) -> int:
        return (self.side // self.patch) ** 2


class TowerBlock(nn.Module):
    """Attention to all sides and a feed-forward network, each behind a norm."""

    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        n = shape.width
        self.heads = shape.heads
        self.ln1, self.ln2 = (nn.LayerNorm(n, eps=shape.eps) for _ in range(2))
        self.attn_q, self.attn_k, self.attn_v, self.attn_out = (nn.Linear(n, n) for _ in range(4))
        self.ffn_up, self.ffn_down = nn.Linear(n, shape.wide), nn.Linear(shape.wide, n)

    def forward(self, h: Tensor) -> Tensor:
        x = self.ln1(h)
        q, k, v = (m(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.attn_q, self.attn_k, self.attn_v))
        h = h + self.attn_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return h + self.ffn_down(F.gelu(self.ffn_up(self.ln2(h)), approximate="tanh"))


class Tower(nn.Module):
    """Patches [B, T, 3 * patch * patch] -> rows of the language model [B, T, out]."""

    def __init__(self, shape: TowerShape, out: int) -> None:
        super().__init__()
        self.shape = shape
        self.class_embd = nn.Parameter(torch.randn(shape.width) * 0.02)
        self.patch_embd = nn.Linear(3 * shape.patch * shape.patch, shape.width, bias=False)
        self.position_embd = nn.Embedding(1 + shape.patches, shape.width)
        self.pre_ln = nn.LayerNorm(shape.width, eps=shape.eps)
        self.blk = nn.ModuleList(TowerBlock(shape) for _ in range(shape.blocks))
        self.mm_0, self.mm_2 = nn.Linear(shape.width, out), nn.Linear(out, out)
        nn.init.normal_(self.position_embd.weight, std=0.02)

    def forward(self, patches: Tensor) -> Tensor:
        h = self.patch_embd(patches)
        h = torch.cat([self.class_embd.expand(len(h), 1, -1), h], 1) + self.position_embd.weight
        h = self.pre_ln(h)
        for block in self.blk:
            h = block(h)
        return self.mm_2(F.gelu(self.mm_0(h[:, 1:])))


class Seeing(nn.Module):
    """A text with a picture in it."""

    def __init__(self, tower: TowerShape | None = None, text: Shape = TEXT) -> None:
        super().__init__()
        self.text = Llama(text)
        self.tower = Tower(tower or TowerShape(), text.embedding_length)

    def forward(self, ids: Tensor, pictures: Tensor, first: Tensor, learned: Tensor) -> Tensor:
        """Logits of the successors of `learned` [B, T]. pictures: patches; their rows stand in row b from first[b] on."""
        rows = self.tower(pictures)
        at = first[:, None] + torch.arange(rows.shape[1], device=first.device)
        h = self.text.token_embd(ids)
        h = h.scatter(1, at[..., None].expand_as(rows), rows)
        for block in self.text.blk:
            h, _ = block(h, self.text.cos[: ids.shape[1]], self.text.sin[: ids.shape[1]])
        return F.linear(self.text.output_norm(h)[learned], self.text.token_embd.weight)
