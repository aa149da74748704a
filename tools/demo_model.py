"""The architecture of small models for training: GGUF `llama` with tied embeddings, in plain torch; also with experts,
and as `granitehybrid`, whose layers are Mamba-2 or attention without positions.

    h = token_embd[ids];  h += mixer(RMS(h; attn_norm)), h += ffn(RMS(h; ffn_norm)) per layer
    logits = token_embd RMS(h; output_norm)

RoPE rotates the pairs (2i, 2i+1) of a head, which is how GGUF's llama stores q and k, so that nothing is permuted on
export and the parameters carry GGUF's tensor names.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.demo_blocks import Experts, Mamba2


@dataclass(frozen=True)
class Shape:
    """Static facts of one model."""

    vocab_size: int = 4096
    context_length: int = 512
    embedding_length: int = 512
    feed_forward_length: int = 1024
    block_count: int = 4
    head_count: int = 8
    head_count_kv: int = 2
    head_dim: int = 64
    rope_freq_base: float = 10000.0
    rms_epsilon: float = 1e-5
    expert_count: int = 0
    expert_used_count: int = 0
    layout: str = ""
    """A hybrid's layers, such as "MMAM": Mamba-2 or attention. Empty: attention with rope in all of them."""
    ssm_inner_size: int = 512
    ssm_state_size: int = 64
    ssm_head_count: int = 8
    ssm_conv_kernel: int = 4

    @property
    def architecture(self) -> str:
        return "granitehybrid" if self.layout else "llama"


class Block(nn.Module):
    """Attention or Mamba-2, and a SwiGLU feed-forward network or experts, each on a normed residual."""

    def __init__(self, shape: Shape, dropout: float, mamba: bool) -> None:
        super().__init__()
        E, Fw, hd = shape.embedding_length, shape.feed_forward_length, shape.head_dim
        self.shape, self.dropout = shape, dropout
        self.attn_norm = nn.RMSNorm(E, eps=shape.rms_epsilon)
        if mamba:
            self.mamba = Mamba2(
                E,
                shape.ssm_inner_size,
                shape.ssm_state_size,
                shape.ssm_head_count,
                shape.ssm_conv_kernel,
                shape.rms_epsilon,
            )
        else:
            self.attn_q = nn.Linear(E, shape.head_count * hd, bias=False)
            self.attn_k = nn.Linear(E, shape.head_count_kv * hd, bias=False)
            self.attn_v = nn.Linear(E, shape.head_count_kv * hd, bias=False)
            self.attn_output = nn.Linear(shape.head_count * hd, E, bias=False)
        self.ffn_norm = nn.RMSNorm(E, eps=shape.rms_epsilon)
        if shape.expert_count:
            self.experts = Experts(E, Fw, shape.expert_count, shape.expert_used_count)
        else:
            self.ffn_gate = nn.Linear(E, Fw, bias=False)
            self.ffn_up = nn.Linear(E, Fw, bias=False)
            self.ffn_down = nn.Linear(Fw, E, bias=False)

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """The residual after the layer, and how unevenly its experts are used (0 without any)."""
        x = self.attn_norm(h)
        y = self.mamba(x) if hasattr(self, "mamba") else self.attention(x, cos, sin)
        h = h + F.dropout(y, self.dropout, self.training)
        x = self.ffn_norm(h)
        if self.shape.expert_count:
            y, uneven = self.experts(x)
        else:
            y, uneven = self.ffn_down(F.silu(self.ffn_gate(x)) * self.ffn_up(x)), h.new_zeros(())
        return h + F.dropout(y, self.dropout, self.training), uneven

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, _ = x.shape
        hd = self.shape.head_dim
        turned = (lambda v: v) if self.shape.layout else (lambda v: _rotate(v, cos, sin))
        q = turned(self.attn_q(x).view(B, T, -1, hd)).transpose(1, 2)  # [B, nh, T, hd]
        k = turned(self.attn_k(x).view(B, T, -1, hd)).transpose(1, 2)  # [B, nkv, T, hd]
        v = self.attn_v(x).view(B, T, -1, hd).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).reshape(B, T, -1)
        return self.attn_output(y)


class Llama(nn.Module):
    """ids [B, T] -> logits [B, T, V]."""

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape, self.dropout = shape, dropout
        self.token_embd = nn.Embedding(shape.vocab_size, shape.embedding_length)
        layout = shape.layout or "A" * shape.block_count
        if len(layout) != shape.block_count or set(layout) - set("AM"):
            raise ValueError(f"layout is {layout!r}, wanted {shape.block_count} letters, each A or M")
        self.blk = nn.ModuleList(Block(shape, dropout, kind == "M") for kind in layout)
        self.output_norm = nn.RMSNorm(shape.embedding_length, eps=shape.rms_epsilon)
        half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        angle = torch.outer(torch.arange(shape.context_length), shape.rope_freq_base**-half)  # [C, hd / 2]
        self.register_buffer("cos", angle.cos()[:, None, :], persistent=False)
        self.register_buffer("sin", angle.sin()[:, None, :], persistent=False)
        for name, p in self.named_parameters():
            if p.ndim > 1 and "conv1d" not in name:
                # Residual branches start smaller, so that the sum over the layers keeps its size.
                last = ("attn_output.weight", "ssm_out.weight", "ffn_down.weight", "ffn_down_exps")
                nn.init.normal_(p, std=0.02 * ((2 * shape.block_count) ** -0.5 if name.endswith(last) else 1.0))

    def forward(self, ids: Tensor) -> Tensor:
        return self.scored(ids)[0]

    def hidden(self, ids: Tensor) -> Tensor:
        """What the logits are made of: ids [B, T] -> [B, T, E]."""
        return self._through(ids)[0]

    def scored(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and how unevenly the experts of all layers are used together."""
        hidden, uneven = self._through(ids)
        return F.linear(hidden, self.token_embd.weight), uneven

    def _through(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        T = ids.shape[1]
        h = F.dropout(self.token_embd(ids), self.dropout, self.training)
        uneven = []
        for block in self.blk:
            h, of_block = block(h, self.cos[:T], self.sin[:T])
            uneven.append(of_block)
        return self.output_norm(h), torch.stack(uneven).sum()

    @torch.no_grad()
    def sample(self, ids: list[int], num_tokens: int, temperature: float, seed: int, eos: int) -> list[int]:
        """Continue `ids` by up to `num_tokens`, without a cache: for looking at text, not for speed."""
        device = self.token_embd.weight.device
        rng = torch.Generator(device).manual_seed(seed)
        for _ in range(num_tokens):
            logits = self(torch.tensor([ids[-self.shape.context_length :]], device=device))[0, -1].float()
            token = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=rng))
            if token == eos:
                break
            ids = [*ids, token]
        return ids


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()  # [B, T, H, hd / 2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)
