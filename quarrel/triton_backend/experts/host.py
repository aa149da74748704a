"""Experts in host memory: the device hands rows over, waits, and takes the sum back; or it takes the experts themselves.

A step of few rows is computed by the host, from rows, ids and weights in pinned memory. For many rows the experts' weights
are copied to the device, a layer at a time into the same buffers, and multiplied there; from how many on is measured when
the first such step comes. Neither is part of a graph, so a step with such layers is captured in pieces (`Outside` cuts it).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from quarrel.ops.contract import Compute, Value, WeightRef
from quarrel.ops.host import IDS, OUT, SHARES, HostExperts, Part, X
from quarrel.ops.moe import EXPERT_UP
from quarrel.ops.program import Node
from quarrel.ops.registry import Choice, Implementation
from quarrel.ops.step import Limits, WeightSource
from quarrel.ops.weights import rows_as
from quarrel.triton_backend.experts import experts as device
from quarrel.triton_backend.formats.pack import Uploader, blank, fill
from quarrel.triton_backend.formats.weights import stored_as
from quarrel.triton_backend.runtime.arrays import Packed
from quarrel.triton_backend.runtime.site import Batch, Launch, Site, dims, inside

log = logging.getLogger("quarrel")

ROWS = 128
"""Rows that the host computes at once: each layer has buffers for so many."""
LEAST = 16
"""Rows from which weights may be copied; the speeds are measured with so many."""


class HostImplementation(Implementation):
    """Marks nodes that the host computes: their values are read and written as they are."""


@dataclass(frozen=True)
class Outside:
    """A launch that no graph may hold."""

    run: Launch

    def __call__(self, batch: Batch) -> None:
        self.run(batch)


class Exchange:
    """Memory that all layers share, as one at a time uses it: pinned for rows, and on the device for streamed experts."""

    def __init__(self, device: torch.device, source: WeightSource, compute: Compute) -> None:
        self._device, self._source, self._compute = device, source, compute
        self._held: dict[str, torch.Tensor] = {}
        self._stages: dict[tuple[str, int, int, int], Packed] = {}
        self._upload: Uploader | None = None

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

    def stage(self, ref: WeightRef, place: int) -> Packed:
        """Where a layer's weight number `place` goes on the device."""
        type = stored_as(ref.type, self._compute)
        key = (type.name, ref.rows, ref.k, place)
        if key not in self._stages:
            self._stages[key] = replace(blank(type, ref.rows, ref.k, self._device), reused=True)
        return self._stages[key]

    def send(self, refs: Mapping[WeightRef, int]) -> None:
        """Fills the stages of some weights."""
        if self._upload is None:
            self._upload = Uploader(self._device)
        for ref, place in refs.items():
            type = stored_as(ref.type, self._compute)
            fill(self.stage(ref, place), type, rows_as(self._source, ref, type), self._upload)


@dataclass
class Turn:
    """From how many rows on experts are copied to the device."""

    rows: float | None

    def streams(self, batch: Batch, measure: Callable[[], float]) -> bool:
        if batch.T < LEAST and self.rows is None:
            return False
        if self.rows is None:
            self.rows = measure()
            log.info("experts in host memory are copied to the device for steps of %.0f rows and more", self.rows)
        return bool(self.rows <= batch.T)


@dataclass
class Layer:
    """A layer's experts and the two ways to compute them."""

    exchange: Exchange
    turn: Turn
    tokens: int
    up: Node
    refs: dict[WeightRef, int] = field(default_factory=dict)
    part: Part | None = None

    @property
    def may_stream(self) -> bool:
        return self.turn.rows != math.inf

    def add(self, node: Node) -> None:
        stacks = [r for r in node.inputs if isinstance(r, WeightRef) and r.rows == node.spec.rows]
        self.refs |= {ref: len(self.refs) + i for i, ref in enumerate(stacks)}

    def staged(self, ref: WeightRef) -> Packed:
        """Where a matrix of this layer is once it is copied to the device."""
        return self.exchange.stage(ref, self.refs[ref])

    def streams(self, batch: Batch) -> bool:
        return self.turn.streams(batch, self.measured)

    def measured(self) -> float:
        """Rows that take the host as long as the weights take to the device."""
        spec = self.up.spec
        ids = (np.arange(LEAST * spec.used, dtype=np.int32) % spec.n_experts).reshape(LEAST, spec.used)
        arrays = {X: np.zeros((LEAST, spec.k), np.float32), IDS: ids, SHARES: np.ones(ids.shape, np.float32)}

        def host() -> None:
            assert self.part is not None
            self.part.run(arrays, (OUT,))

        def device() -> None:
            self.exchange.send(self.refs)
            self.exchange.wait()

        return max(LEAST, math.ceil(LEAST * _seconds(device) / _seconds(host)))


def _seconds(run: Callable[[], None]) -> float:
    """Of the second time."""
    run()
    began = time.perf_counter()
    run()
    return max(time.perf_counter() - began, 1e-9)


def on_host(
    choices: Sequence[Choice],
    host: HostExperts | None,
    weights: WeightSource,
    limits: Limits,
    compute: Compute,
    device: torch.device,
) -> list[Choice]:
    """The choices, where those whose nodes the host takes are its own."""
    if host is None:
        return list(choices)
    exchange = Exchange(device, weights, compute)
    # A row's bits would depend on how many rows there are. Nothing can be measured without a device.
    never = not host.streams or limits.deterministic or (device.type == "cpu" and host.stream_from is None)
    turn = Turn(math.inf if never else host.stream_from)
    name = f"in host memory, on {host.backend.device()}"
    layers: dict[int, Layer] = {}
    made: list[Choice] = []
    for choice in choices:
        node = choice.node
        if not host.takes(node):
            made.append(choice)
            continue
        if node.op is EXPERT_UP:
            layer = layers[node.outputs[0].id] = Layer(exchange, turn, limits.max_tokens, node)
        else:
            y = node.inputs[0]
            assert isinstance(y, Value)
            layer = layers[y.id]
            layer.part = host.part(layer.up, node, weights, min(ROWS, limits.max_tokens), compute)
        layer.add(node)
        build = _Up(layer) if node.op is EXPERT_UP else _Down(layer)
        way = name if never else f"{name}, or copied to the device for steps of many rows"
        made.append(replace(choice, implementation=HostImplementation(node.op, way, build)))
    return made


def is_hosted(choice: Choice) -> bool:
    return isinstance(choice.implementation, HostImplementation)


@dataclass(frozen=True)
class _Up:
    """EXPERT_UP: hands over what both products need of it."""

    layer: Layer

    def __call__(self, site: Site, node: Node) -> Launch:
        layer, exchange = self.layer, self.layer.exchange
        x, ids = (site.slot(v) for v in node.inputs[:2])  # type: ignore[arg-type]
        real, tokens = site.tables.tokens, layer.tokens
        k, used = node.spec.k, node.spec.used
        there = device.build_expert_up(inside(site, {}, layer.staged), node) if layer.may_stream else None

        def run(batch: Batch) -> None:
            if there is not None and layer.streams(batch):
                exchange.send(layer.refs)
                there(batch)
                return
            exchange.fetch(X, x.tensor, tokens * k, batch.T * k)
            exchange.fetch(IDS, ids.tensor, tokens * used, batch.T * used)
            if real is not None:
                exchange.fetch("tokens", real.tensor, 1, 1)

        return Outside(run)


@dataclass(frozen=True)
class _Down:
    """EXPERT_DOWN: computes both products on the host and sends their sum."""

    layer: Layer

    def __call__(self, site: Site, node: Node) -> Launch:
        layer, exchange = self.layer, self.layer.exchange
        x, ids = (site.slot(v) for v in layer.up.inputs[:2])  # type: ignore[arg-type]
        shares, out = site.slot(node.inputs[2]), site.slot(node.outputs[0])  # type: ignore[arg-type]
        padded, tokens = site.tables.tokens, layer.tokens
        _, n = dims(node.outputs[0])
        k, used = layer.up.spec.k, layer.up.spec.used
        there = device.build_expert_down(inside(site, {}, layer.staged), node) if layer.may_stream else None

        def run(batch: Batch) -> None:
            if there is not None and layer.streams(batch):
                there(batch)
                return
            assert layer.part is not None
            exchange.fetch(SHARES, shares.tensor, tokens * used, batch.T * used)
            exchange.wait()
            # Rows that pad a batch are nobody's.
            rows = batch.T if padded is None else min(batch.T, int(exchange.take("tokens", padded.tensor, 1)))
            whole = {
                X: exchange.take(X, x.tensor, tokens * k)[: rows * k].float().view(rows, k).numpy(),
                IDS: exchange.take(IDS, ids.tensor, tokens * used)[: rows * used].view(rows, used).numpy(),
                SHARES: exchange.take(SHARES, shares.tensor, tokens * used)[: rows * used].view(rows, used).numpy(),
            }
            result = exchange.take(OUT, out.tensor, tokens * n)[: rows * n]
            for start in range(0, rows, ROWS):
                span = slice(start, min(start + ROWS, rows))
                got = layer.part.run({name: array[span] for name, array in whole.items()}, (OUT,))[OUT]
                result.view(rows, n)[span] = torch.from_numpy(got)
            out.tensor[: rows * n].copy_(result, non_blocking=True)

        return Outside(run)
