"""Further parts of small models for training: experts and Mamba-2, under GGUF's tensor names, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 64


class Experts(nn.Module):
    """Softmax over all experts, the best few of them with weights that sum to 1, each a SwiGLU network.

    All experts are computed and all but the chosen get weight 0, which is what small ones are quickest at.
    """

    def __init__(self, width: int, hidden: int, count: int, used: int) -> None:
        super().__init__()
        self.used = used
        self.ffn_gate_inp = nn.Linear(width, count, bias=False)
        self.ffn_gate_exps = nn.Parameter(torch.empty(count, hidden, width))
        self.ffn_up_exps = nn.Parameter(torch.empty(count, hidden, width))
        self.ffn_down_exps = nn.Parameter(torch.empty(count, width, hidden))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, E] -> the sum, and how unevenly the experts are used: 1 where they share alike (Fedus et al. 2021)."""
        odds = self.ffn_gate_inp(x).float().softmax(-1)  # [B, T, X]
        best, chosen = odds.topk(self.used, -1)
        share = torch.zeros_like(odds).scatter(-1, chosen, best / best.sum(-1, keepdim=True))
        gate = torch.einsum("bte,xfe->btxf", x, self.ffn_gate_exps)
        up = torch.einsum("bte,xfe->btxf", x, self.ffn_up_exps)
        y = torch.einsum("btxf,xef->bte", F.silu(gate) * up * share[..., None].to(up.dtype), self.ffn_down_exps)
        used = (share > 0).float().mean((0, 1)) / self.used
        return y, odds.shape[-1] * (used * odds.mean((0, 1))).sum()


class Mamba2(nn.Module):
    """One group of B and C: S = exp(dt a) S + dt x B^T;  y = S C + d x;  out = W RMS(y silu(z))."""

    def __init__(self, width: int, inner: int, state: int, heads: int, kernel: int, epsilon: float) -> None:
        super().__init__()
        self.inner, self.state, self.heads = inner, state, heads
        self.ssm_in = nn.Linear(width, 2 * inner + 2 * state + heads, bias=False)
        self.ssm_conv1d = nn.Conv1d(inner + 2 * state, inner + 2 * state, kernel, groups=inner + 2 * state)
        steps = torch.exp(torch.linspace(-6.9, -2.3, heads))  # 0.001 to 0.1
        self.ssm_dt_bias = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))  # softplus of it is the step
        self.ssm_a_log = nn.Parameter(torch.linspace(1, 16, heads).log())
        self.ssm_d = nn.Parameter(torch.ones(heads))
        self.ssm_norm = nn.RMSNorm(inner, eps=epsilon)
        self.ssm_out = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, E] -> [B, T, E]; T is filled up to whole chunks."""
        T = x.shape[1]
        x = F.pad(x, (0, 0, 0, -T % CHUNK))
        z, xbc, dt = self.ssm_in(x).split([self.inner, self.inner + 2 * self.state, self.heads], -1)
        width = self.ssm_conv1d.kernel_size[0] - 1
        xbc = F.silu(self.ssm_conv1d(F.pad(xbc.transpose(1, 2), (width, 0)))).transpose(1, 2)
        values, b, c = xbc.float().split([self.inner, self.state, self.state], -1)
        dt = F.softplus(dt.float() + self.ssm_dt_bias)
        values = values.unflatten(-1, (self.heads, -1))  # [B, T, H, P]
        y = chunked_scan(values * dt[..., None], dt * -self.ssm_a_log.exp(), b, c) + self.ssm_d[:, None] * values
        y = self.ssm_norm(y.flatten(-2) * F.silu(z.float()))
        return self.ssm_out(y.to(x.dtype))[:, :T]


def chunked_scan(x: Tensor, decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """y[t] = C[t] sum over s <= t of exp(decay[s+1] + ... + decay[t]) B[s] x[s], by products within chunks and states
    between them (Dao and Gu 2024). x [B, T, H, P], decay [B, T, H], b and c [B, T, N]."""
    x, decay, b, c = (v.unflatten(1, (-1, CHUNK)) for v in (x, decay, b, c))
    sums = decay.cumsum(2)  # [B, C, Q, H]
    apart = sums[:, :, :, None] - sums[:, :, None]  # [B, C, Q to, Q from, H]
    earlier = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=x.device).tril()[..., None]
    weight = torch.einsum("bcin,bcjn->bcij", c, b)[..., None] * apart.masked_fill(~earlier, -torch.inf).exp()
    y = torch.einsum("bcijh,bcjhp->bcihp", weight, x)
    made = torch.einsum("bcjh,bcjn,bcjhp->bchpn", (sums[:, :, -1:] - sums).exp(), b, x)
    state, states = torch.zeros_like(made[:, 0]), []
    for chunk in range(made.shape[1]):
        states.append(state)
        state = state * sums[:, chunk, -1].exp()[..., None, None] + made[:, chunk]
    y = y + torch.einsum("bcin,bchpn,bcih->bcihp", c, torch.stack(states, 1), sums.exp())
    return y.flatten(1, 2)
