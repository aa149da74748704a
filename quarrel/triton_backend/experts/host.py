"""Experts in host memory: the device hands rows over, waits, and takes the sum back; or it takes the experts themselves.

A step of few rows is computed by the host, from rows, ids and weights in pinned memory. For many rows the experts' weights
are copied to the device, a layer at a time into the same buffers, and multiplied there; from how many on is measured when
the first such step comes. Neither is part of a graph, so a step with such layers is captured in pieces (`Outside` cuts it).

A layer of a pool (`pool.py`) has some experts on the device. The host looks the chosen ones up, the device multiplies with
those that are there, and the host meanwhile with the others, one row for each choice; then their sums are added.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from quarrel.ops.contract import Array, Compute, Value, WeightRef
from quarrel.ops.host import IDS, OUT, SHARES, HostExperts, Part, X
from quarrel.ops.moe import EXPERT_DOWN, EXPERT_UP
from quarrel.ops.program import Node
from quarrel.ops.registry import Choice, Implementation
from quarrel.ops.step import Limits, WeightSource
from quarrel.ops.weights import rows_as, weights_of
from quarrel.triton_backend.experts import experts as device
from quarrel.triton_backend.experts import matvec
from quarrel.triton_backend.experts.pool import Pool
from quarrel.triton_backend.formats.pack import Uploader, blank, fill
from quarrel.triton_backend.formats.weights import stored_as
from quarrel.triton_backend.runtime.arrays import Packed, Slot
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
        self._on_device: dict[tuple[str, int], Slot] = {}

    def take(self, name: str, source: torch.Tensor, count: int) -> torch.Tensor:
        """The buffer of this name for `count` values like the source's."""
        held = self._held.get(name)
        if held is None or held.numel() < count or held.dtype != source.dtype:
            held = self._held[name] = torch.empty(count, dtype=source.dtype, pin_memory=self._device.type == "cuda")
        return held[:count]

    def fetch(self, name: str, source: torch.Tensor, room: int, count: int) -> None:
        """Copies the first values of an array over, behind the device's other work; `room` is how many there may be."""
        self.take(name, source, room)[:count].copy_(source[:count], non_blocking=True)

    @cached_property
    def uploader(self) -> Uploader:
        """What moves weights."""
        return Uploader(self._device)

    def choices(self, name: str, dtype: torch.dtype, room: int) -> Slot:
        """Where the device finds what stands in place of a layer's ids or weights."""
        if (name, room) not in self._on_device:
            self._on_device[name, room] = Slot(torch.zeros(room, dtype=dtype, device=self._device))
        return self._on_device[name, room]

    def put(self, name: str, to: Slot, array: Array) -> None:
        """Copies an array of the host over; the last copy of this name must be through."""
        source = self.take(name, to.tensor, to.tensor.numel())[: array.size]
        source.copy_(torch.from_numpy(array.reshape(-1)))
        to.tensor[: array.size].copy_(source, non_blocking=True)

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
        for ref, place in refs.items():
            type = stored_as(ref.type, self._compute)
            fill(self.stage(ref, place), type, rows_as(self._source, ref, type), self.uploader)


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


@dataclass(frozen=True)
class Inputs:
    """What both products of a layer read: on the device, and once it is fetched on the host."""

    exchange: Exchange
    slots: dict[str, Slot]
    widths: dict[str, int]
    room: int
    padded: Slot | None

    @classmethod
    def of(cls, site: Site, layer: Layer) -> Inputs:
        (x, ids), shares, spec = layer.up.inputs[:2], layer.down.inputs[2], layer.up.spec
        slots = {name: site.slot(v) for name, v in ((X, x), (IDS, ids), (SHARES, shares))}  # type: ignore[arg-type]
        return cls(layer.exchange, slots, {X: spec.k, IDS: spec.used, SHARES: spec.used}, layer.tokens, site.tables.tokens)

    def fetch(self, batch: Batch) -> None:
        """Queues the copies."""
        for name, slot in self.slots.items():
            width = self.widths[name]
            self.exchange.fetch(name, slot.tensor, self.room * width, batch.T * width)
        if self.padded is not None:
            self.exchange.fetch("tokens", self.padded.tensor, 1, 1)

    def rows(self, batch: Batch) -> int:
        """Those that do not pad the batch: others are nobody's."""
        return batch.T if self.padded is None else min(batch.T, int(self.exchange.take("tokens", self.padded.tensor, 1)))

    def array(self, name: str, rows: int) -> Array:
        """What has come, `[rows, width]`; x as float32."""
        width = self.widths[name]
        there = self.exchange.take(name, self.slots[name].tensor, self.room * width)[: rows * width].view(rows, width)
        array: Array = (there.float() if name == X else there).numpy()
        return array


@dataclass
class Layer:
    """A layer's experts and the ways to compute them."""

    exchange: Exchange
    turn: Turn
    tokens: int
    up: Node
    down: Node
    part: Part
    pool: Pool | None = None
    number: int = 0
    """Among the layers of the pool."""
    missing: Array | None = None
    """Choices of the step that are not on the device, as numbers of its ids flat; None is all."""

    @property
    def may_stream(self) -> bool:
        return self.turn.rows != math.inf

    @cached_property
    def refs(self) -> dict[WeightRef, int]:
        """The matrices, and the number of each."""
        stacks = [r for node in (self.up, self.down) for r in weights_of([node]) if r.rows == node.spec.rows]
        return {ref: i for i, ref in enumerate(stacks)}

    def staged(self, ref: WeightRef) -> Packed:
        """Where a matrix of this layer is once it is copied to the device."""
        return self.exchange.stage(ref, self.refs[ref])

    def streams(self, batch: Batch) -> bool:
        return self.turn.streams(batch, self.measured)

    def choose(self, inputs: Inputs, batch: Batch) -> None:
        """Gives the device those choices of a step that are there."""
        assert self.pool is not None
        if self.number == 0:
            self.pool.next_step()
        self.exchange.wait()
        rows = inputs.rows(batch)
        found = self.pool.slots_of(self.number, inputs.array(IDS, rows))
        shares = np.where(found < 0, np.float32(0), inputs.array(SHARES, rows))
        padding = ((0, batch.T - rows), (0, 0))
        slots = np.where(found < 0, np.int32(self.pool.slots), found)
        self.exchange.put("slots", self._slots, np.pad(slots, padding, constant_values=self.pool.slots))
        self.exchange.put("kept", self._shares, np.pad(shares, padding))
        self.missing = np.flatnonzero(found < 0)

    def pooled(self, site: Site) -> Site:
        """Where the products with the experts of the pool are built."""
        assert self.pool is not None
        ids, shares = self.down.inputs[1:3]
        assert isinstance(ids, Value)
        assert isinstance(shares, Value)
        return inside(site, {ids.id: self._slots, shares.id: self._shares}, self.pool.matrix, self.pool.vector)

    def on_host(self, x: Array, ids: Array, shares: Array, out: Array) -> None:
        """out `[rows, n]`: the sum over the missing choices."""
        if self.missing is None:
            for start in range(0, len(x), ROWS):
                span = slice(start, start + ROWS)
                out[span] = self.part.run({X: x[span], IDS: ids[span], SHARES: shares[span]}, (OUT,))[OUT]
            return
        out[:] = 0
        for start in range(0, len(self.missing), ROWS):
            pairs = self.missing[start : start + ROWS]
            row = pairs // ids.shape[1]
            arrays = {X: x[row], IDS: ids.reshape(-1, 1)[pairs], SHARES: shares.reshape(-1, 1)[pairs]}
            first = np.flatnonzero(np.diff(row, prepend=-1))
            out[row[first]] += np.add.reduceat(self.part.run(arrays, (OUT,))[OUT], first)

    def measured(self) -> float:
        """Rows that take the host as long as the weights take to the device."""
        spec = self.up.spec
        ids = (np.arange(LEAST * spec.used, dtype=np.int32) % spec.n_experts).reshape(LEAST, spec.used)
        arrays = np.zeros((LEAST, spec.k), np.float32), ids, np.ones(ids.shape, np.float32)
        out = np.empty((LEAST, self.down.spec.n), np.float32)
        if self.pool is not None:
            self.missing = self.pool.missing(self.number, ids)

        def device() -> None:
            self.exchange.send(self.refs)
            self.exchange.wait()

        return max(LEAST, math.ceil(LEAST * _seconds(device) / _seconds(lambda: self.on_host(*arrays, out))))

    @property
    def _slots(self) -> Slot:
        return self.exchange.choices("slots", torch.int32, self.tokens * self.up.spec.used)

    @property
    def _shares(self) -> Slot:
        return self.exchange.choices("kept", torch.float32, self.tokens * self.up.spec.used)


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
    pools: dict[str, Pool] = {}
    for pool in host.pools:
        pools |= dict.fromkeys(pool.paths, Pool(pool, weights, compute, device, lambda: exchange.uploader))
    ups = {c.node.outputs[0].id: c.node for c in choices if c.node.op is EXPERT_UP}
    layers: dict[int, Layer] = {}
    for node in (c.node for c in choices if host.takes(c.node) and c.node.op is EXPERT_DOWN):
        y = node.inputs[0]
        assert isinstance(y, Value)
        up, pool_of = ups[y.id], pools.get(node.path)
        rows = min(ROWS, limits.max_tokens * (1 if pool_of is None else up.spec.used))
        part = host.part(up, node, weights, rows, compute, by_pairs=pool_of is not None)
        number = 0 if pool_of is None else pool_of.add(up, node)
        layers[y.id] = Layer(exchange, turn, limits.max_tokens, up, node, part, pool_of, number)
    return [c if not host.takes(c.node) else _taken(c, layers, host, never) for c in choices]


def _taken(choice: Choice, layers: Mapping[int, Layer], host: HostExperts, never_streams: bool) -> Choice:
    node = choice.node
    first = node.op is EXPERT_UP
    y = node.outputs[0] if first else node.inputs[0]
    assert isinstance(y, Value)
    layer = layers[y.id]
    where = "in host memory" if layer.pool is None else layer.pool.describe()
    way = f"{where}, on {host.backend.device()}"
    way += "" if never_streams else ", or copied to the device for steps of many rows"
    return replace(choice, implementation=HostImplementation(node.op, way, _Up(layer) if first else _Down(layer)))


def is_hosted(choice: Choice) -> bool:
    return isinstance(choice.implementation, HostImplementation)


def pools_of(choices: Sequence[Choice]) -> list[Pool]:
    """The pools of these nodes."""
    built = (c.implementation.build for c in choices if is_hosted(c))
    pools = (build.layer.pool for build in built if isinstance(build, _Up | _Down))
    return list(dict.fromkeys(pool for pool in pools if pool is not None))


@dataclass(frozen=True)
class _Up:
    """EXPERT_UP: hands over what both products need of it."""

    layer: Layer

    def __call__(self, site: Site, node: Node) -> Launch:
        layer, inputs = self.layer, Inputs.of(site, self.layer)
        there = device.build_expert_up(inside(site, {}, layer.staged), node) if layer.may_stream else None
        pool = layer.pool
        near = None if pool is None else matvec.build_expert_up(layer.pooled(site), pool.node(node))

        def run(batch: Batch) -> None:
            if there is not None and layer.streams(batch):
                layer.exchange.send(layer.refs)
                there(batch)
                return
            inputs.fetch(batch)
            if near is not None:
                layer.choose(inputs, batch)
                near(batch)

        return Outside(run)


@dataclass(frozen=True)
class _Down:
    """EXPERT_DOWN: computes both products on the host and sends their sum, or adds it to that of the pool's."""

    layer: Layer

    def __call__(self, site: Site, node: Node) -> Launch:
        layer, inputs, exchange = self.layer, Inputs.of(site, self.layer), self.layer.exchange
        out = site.slot(node.outputs[0])
        _, n = dims(node.outputs[0])
        there = device.build_expert_down(inside(site, {}, layer.staged), node) if layer.may_stream else None
        pool = layer.pool
        near = None if pool is None else matvec.build_expert_down(layer.pooled(site), pool.node(node))
        added = out if pool is None else site.scratch("T", n)

        def run(batch: Batch) -> None:
            if there is not None and layer.streams(batch):
                there(batch)
                return
            if near is None:
                exchange.wait()
            else:
                near(batch)
                if not len(layer.missing):  # type: ignore[arg-type]
                    return
            rows = inputs.rows(batch)
            result = exchange.take(OUT, out.tensor, layer.tokens * n)[: rows * n]
            layer.on_host(*(inputs.array(name, rows) for name in (X, IDS, SHARES)), result.view(rows, n).numpy())
            added.tensor[: rows * n].copy_(result, non_blocking=True)
            if near is not None:
                out.tensor[: rows * n].add_(added.tensor[: rows * n])

        return Outside(run)
