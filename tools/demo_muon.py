"""Muon: momentum whose every matrix step is orthogonalised (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).

    m = mu m + (1 - mu) g;  u = (1 - mu) g + mu m;  W = (1 - lr wd) W - lr 0.2 sqrt(max(rows, columns)) orth(u)

The factor gives orth(u) the root mean square of an AdamW step (Liu et al. 2025), so both optimizers share one learning
rate. Matrices of one shape are stepped in one batch: a small model is otherwise bound by kernel launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class Muon(torch.optim.Optimizer):
    """Muon over matrices, and over stacks of them."""

    def __init__(
        self,
        matrices: Iterable[Tensor],
        lr: float,
        weight_decay: float,
        momentum: float = 0.95,
        compiled: bool | None = None,
    ) -> None:
        """`compiled`: the orthogonalisation by torch.compile; on a GPU if not said."""
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for matrix in matrices:
            by_shape.setdefault(matrix.shape, []).append(matrix)
        super().__init__([{"params": group} for group in by_shape.values()], {"lr": lr})
        self._weight_decay, self._momentum = weight_decay, momentum
        if compiled is None:
            compiled = next(iter(by_shape.values()))[0].is_cuda
        self._orthogonal: Callable[[Tensor], Tensor] = (
            torch.compile(_orthogonal, dynamic=False) if compiled else _orthogonal
        )

    @torch.no_grad()
    def step(self) -> None:
        """Step every matrix from its gradient."""
        for group in self.param_groups:
            matrices = group["params"]
            gradient = torch.stack([p.grad for p in matrices])  # [N, rows, columns]
            state = self.state[matrices[0]]
            momentum = state.setdefault("momentum", torch.zeros_like(gradient))
            momentum.lerp_(gradient, 1 - self._momentum)
            update = self._orthogonal(gradient.lerp(momentum, self._momentum))
            scale = group["lr"] * 0.2 * max(gradient.shape[-2:]) ** 0.5
            torch._foreach_mul_(matrices, 1 - group["lr"] * self._weight_decay)
            torch._foreach_add_(matrices, list(update.float().unbind()), alpha=-scale)


def _orthogonal(x: Tensor) -> Tensor:
    """Each of x [..., rows, columns] with its singular values brought near 1 by five Newton-Schulz steps."""
    tall = x.shape[-2] > x.shape[-1]
    y = (x.mT if tall else x).bfloat16()
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = y @ y.mT
        y = 3.4445 * y + (-4.7750 * a + 2.0315 * a @ a) @ y
    return y.mT if tall else y
