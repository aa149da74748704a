"""Experts in host memory: the device hands rows over, waits, and takes the sum back.

Rows, ids and weights are copied to pinned memory behind the kernels that make them, as part of a captured step; the products
themselves are no part of it, so a step with such layers is captured in pieces (`Outside` marks where it is cut).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from quarrel.ops.contract import Compute, Value
from quarrel.ops.host import IDS, OUT, SHARES, HostExperts, Part, X
from quarrel.ops.moe import EXPERT_UP
from quarrel.ops.program import Node
from quarrel.ops.registry import Choice, Implementation
from quarrel.ops.step import WeightSource
from quarrel.triton_backend.runtime import Launch, Live, Site, Slot, dims

ROWS = 128
"""Rows that the host computes at once: each layer has buffers for so many."""


class HostImplementation(Implementation):
    """Marks nodes that the host computes: their values are read and written as they are."""


@dataclass(frozen=True)
class Outside:
    """A launch that no graph may hold."""

    run: Launch

    def __call__(self, live: Live) -> None:
        self.run(live)


class Exchange:
    """Pinned memory that all layers share: one at a time uses it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[str, torch.Tensor] = {}

    def take(self, name: str, source: torch.Tensor, count: int) -> torch.Tensor:
        """The buffer of this name for `count` values like the source's."""
        held = self._held.get(name)
        if held is None or held.numel() < count or held.dtype != source.dtype:
            held = self._held[name] = torch.empty(count, dtype=source.dtype, pin_memory=self._device.type == "cuda")
        return held[:count]

    def fetch(self, name: str, source: torch.Tensor, room: int, count: int) -> None:
        """Copies the first values of an array over, behind the device's other work; `room` is how many there may be."""
        self.take(name, source, room)[:count].copy_(source[:count], non_blocking=True)

    def wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def on_host(
    choices: Sequence[Choice],
    host: HostExperts | None,
    weights: WeightSource,
    tokens: int,
    compute: Compute,
    device: torch.device,
) -> list[Choice]:
    """The choices, where those whose nodes the host takes are its own; steps have at most so many tokens."""
    if host is None:
        return list(choices)
    exchange = Exchange(device)
    name = f"in host memory, on {host.backend.device()}"
    ups: dict[int, Node] = {}
    made: list[Choice] = []
    for choice in choices:
        node = choice.node
        if not host.takes(node):
            made.append(choice)
            continue
        if node.op is EXPERT_UP:
            ups[node.outputs[0].id] = node
            build = _Up(exchange, tokens)
        else:
            y = node.inputs[0]
            assert isinstance(y, Value)
            part = host.part(ups[y.id], node, weights, min(ROWS, tokens), compute)
            build = _Down(exchange, tokens, ups[y.id], part)  # type: ignore[assignment]
        made.append(replace(choice, implementation=HostImplementation(node.op, name, build)))
    return made


def is_hosted(choice: Choice) -> bool:
    return isinstance(choice.implementation, HostImplementation)


@dataclass(frozen=True)
class _Up:
    """EXPERT_UP: hands over what both products need of it."""

    exchange: Exchange
    tokens: int

    def __call__(self, site: Site, node: Node) -> Launch:
        x, ids = (site.slot(v) for v in node.inputs[:2])  # type: ignore[arg-type]
        real, exchange, tokens = site.work.tokens, self.exchange, self.tokens
        k, used = node.spec.k, node.spec.used

        def run(live: Live) -> None:
            exchange.fetch(X, x.tensor, tokens * k, live.T * k)
            exchange.fetch(IDS, ids.tensor, tokens * used, live.T * used)
            if real is not None:
                exchange.fetch("live", real.tensor, 1, 1)

        return run


@dataclass(frozen=True)
class _Down:
    """EXPERT_DOWN: computes both products on the host and sends their sum."""

    exchange: Exchange
    tokens: int
    up: Node
    part: Part

    def __call__(self, site: Site, node: Node) -> Launch:
        shares, out = site.slot(node.inputs[2]), site.slot(node.outputs[0])  # type: ignore[arg-type]
        padded: Slot | None = site.work.tokens
        _, n = dims(node.outputs[0])
        k, used = self.up.spec.k, self.up.spec.used
        exchange, tokens, part = self.exchange, self.tokens, self.part

        def run(live: Live) -> None:
            exchange.fetch(SHARES, shares.tensor, tokens * used, live.T * used)
            exchange.wait()
            # Rows that pad a batch are nobody's.
            rows = live.T if padded is None else min(live.T, int(exchange.take("live", padded.tensor, 1)))
            x = exchange.take(X, site.slot(self.up.inputs[0]).tensor, tokens * k)[: rows * k].float().view(rows, k).numpy()  # type: ignore[arg-type]
            ids = exchange.take(IDS, _ids(site, self.up), tokens * used)[: rows * used].view(rows, used).numpy()
            weights = exchange.take(SHARES, shares.tensor, tokens * used)[: rows * used].view(rows, used).numpy()
            result = exchange.take(OUT, out.tensor, tokens * n)[: rows * n]
            for start in range(0, rows, ROWS):
                span = slice(start, min(start + ROWS, rows))
                arrays = {X: x[span], IDS: ids[span], SHARES: weights[span]}
                result.view(rows, n)[span] = torch.from_numpy(part.run(arrays, (OUT,))[OUT])
            out.tensor[: rows * n].copy_(result, non_blocking=True)

        return Outside(run)


def _ids(site: Site, up: Node) -> torch.Tensor:
    return site.slot(up.inputs[1]).tensor  # type: ignore[arg-type]
