"""The step on CUDA: static buffers sized by its limits, and a captured graph for each size of step.

A graph is captured the second time that its size is asked for; the first time compiles the kernels. Steps are padded to a
power of two of sequences and of key splits, and steps of prompts to few numbers of tokens; no row reads what is added. What
the host computes (`experts/host.py`) stands between the graphs of its step.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import groupby
from math import prod
from threading import Lock
from typing import Any, get_args

import numpy as np
import torch

from quarrel.errors import RequestError
from quarrel.ops.attention import ATTENTION
from quarrel.ops.contract import Array, Compute, Value
from quarrel.ops.embedding import EmbeddingSpec
from quarrel.ops.profile import Profiled
from quarrel.ops.program import needed
from quarrel.ops.registry import Choice
from quarrel.ops.step import (
    Done,
    ExplainLine,
    Limits,
    MemoryPlan,
    Pending,
    StepInputs,
    StepOutputs,
    Want,
    outputs_of,
    results_of,
)
from quarrel.ops.transfer import CacheForm
from quarrel.triton_backend.ahead import Ahead
from quarrel.triton_backend.attention import ring
from quarrel.triton_backend.attention.cudnn import prompts_of, refusal
from quarrel.triton_backend.experts.host import Outside, pools_of
from quarrel.triton_backend.formats.pack import Uploader
from quarrel.triton_backend.formats.weights import stored_as
from quarrel.triton_backend.inputs import ENCODER, PROMPTS, InputBuffer, batch_of, item_bucket, item_starts, padded_prompts
from quarrel.triton_backend.plan import Plan
from quarrel.triton_backend.runtime import transfer
from quarrel.triton_backend.runtime.cache import copy_blocks, copy_states
from quarrel.triton_backend.runtime.launch import power_of_two
from quarrel.triton_backend.runtime.rows import DeviceRows
from quarrel.triton_backend.runtime.site import Batch, Launch
from quarrel.triton_backend.timing import EventClock, HostClock, Stopwatch

MOST_PINNED = 16 << 20
"""Numbers of a result that is copied while the host goes on (64 MiB); a larger one is waited for."""

MOST_GRAPHS = 128
"""Of a step; the oldest makes room."""

_CAPTURING = Lock()
"""Of the process, whose other models have threads of their own: PyTorch captures one graph at a time, and nobody may wait
for a device meanwhile, as the beginning of a capture does, and giving memory back."""


class _Results:
    """Pinned memory that results are copied to, each with an event; what a launch has taken comes back with its result."""

    def __init__(self, least: int, dtype: torch.dtype) -> None:
        self._least, self._dtype = least, dtype
        self._free: list[tuple[torch.Tensor, torch.cuda.Event]] = []

    def take(self, count: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Room for so many numbers."""
        if self._free:
            part = self._free.pop()
            if len(part[0]) >= count:
                return part
        length = self._least if count <= self._least else power_of_two(count)
        return torch.empty(length, dtype=self._dtype, pin_memory=True), torch.cuda.Event()

    def give(self, part: tuple[torch.Tensor, torch.cuda.Event]) -> None:
        self._free.append(part)


@dataclass
class _Copied:
    """A result that is being copied to the host."""

    results: _Results
    part: tuple[torch.Tensor, torch.cuda.Event]
    shape: tuple[int, ...]

    @classmethod
    def started(cls, results: _Results, source: torch.Tensor, shape: tuple[int, ...]) -> _Copied:
        count = prod(shape)
        host, event = results.take(count)
        host[:count].copy_(source[:count], non_blocking=True)
        return cls(results, (host, event), shape)

    def array(self) -> np.ndarray:
        """What has come; the memory goes back."""
        array: np.ndarray = self.part[0].numpy()[: prod(self.shape)].reshape(self.shape).copy()
        self.results.give(self.part)
        return array


class _Launched:
    """Results on their way to the host (`ops.step.Pending`)."""

    def __init__(self, copied: Mapping[str, _Copied]) -> None:
        self._copied = copied
        # Copies run in order, so that the last one's event is the only one.
        *_, last = copied.values()
        self._event = last.part[1]
        self._event.record()
        self._outputs: StepOutputs | None = None

    def result(self) -> StepOutputs:
        """Waits for them; a fault of the device is raised here."""
        if self._outputs is None:
            self._event.synchronize()
            self._outputs = StepOutputs(**{name: copied.array() for name, copied in self._copied.items()})
        return self._outputs


class TritonStep:
    """A compiled program (`ops.step.Step`)."""

    def __init__(
        self,
        plan: Plan,
        inputs: InputBuffer,
        outputs: Mapping[str, Value],
        limits: Limits,
        graphs: bool,
        ahead: Ahead | None = None,
    ) -> None:
        self.limits = limits
        self.compute: Compute = plan.compute
        self._plan, self._inputs, self._outputs = plan, inputs, dict(outputs)
        self._graphs: dict[tuple[Batch, str], list[Callable[[], None]]] = {}
        self._seen: set[tuple[Batch, str]] = set()
        self._last_rows = 0
        self._on_gpu = plan.device.type == "cuda"
        self._capture = graphs and self._on_gpu
        self._results = _Results(limits.max_tokens, torch.int32)
        self._float_results = _Results(1 << 20, torch.float32)
        self._choices: tuple[Choice, ...] = tuple(plan.choices)
        self._masks = masks_of(plan.choices, outputs)
        self._ahead = ahead
        self._n_vocab, self._n_positions = (_smallest_table(plan.choices, name) for name in ("ids", "positions"))
        attends = [c.node for c in plan.choices if c.node.op is ATTENTION]
        self._deep = ring.deep_sequences(plan, attends)
        some = plan.cudnn_from > 0 and any(refusal(plan, node) is None for node in attends)
        self._cudnn_from = plan.cudnn_from if some else 0
        """Where cuDNN takes no layer, prompts of any length are graphs."""
        self._watch: Stopwatch | None = None
        self._sees = inputs.sees
        """A tower's program: its images' sizes repeat, and are captured as they are."""
        # What the library allocates inside graphs, which run one after the other, is shared by all of them.
        self._pool = torch.cuda.graph_pool_handle() if self._sees and self._capture else None

    def launch(self, inputs: StepInputs, want: Want) -> Pending:
        """Starts a step. On a GPU, all but logits is on its way when this returns; those are waited for."""
        wanted = self._checked(inputs, want)
        with self._device():
            rows = len(inputs.out_rows)
            self._start(inputs, want, rows)
            if "tokens" in wanted:
                self._last_rows = rows
            sizes = {"T": len(inputs.ids), "S": len(inputs.kv_len), "R": rows}
            results = results_of(want, self._outputs)
            if self._on_gpu and "logits" not in wanted:
                shapes = {name: _shape(self._outputs[name], sizes) for name in results}
                if sum(map(prod, shapes.values())) <= MOST_PINNED:
                    return _Launched({name: self._copied(self._outputs[name], shape) for name, shape in shapes.items()})
            return Done(StepOutputs(**{name: self._read(self._outputs[name], sizes) for name in results}))

    def _checked(self, inputs: StepInputs, want: Want) -> tuple[str, ...]:
        """What is wanted, by name. Raises RequestError for what cannot be run."""
        wanted = outputs_of(want)
        if any(name not in self._outputs for name in wanted):
            raise RequestError(f"this program has no {want}: ask for one of {', '.join(self._outputs)}")
        if "tokens" in wanted and inputs.sample is None:
            raise RequestError("tokens are asked for without sampling controls: fill StepInputs.sample")
        if self._plan.states and inputs.state_slots is None:
            raise RequestError("this program keeps recurrent state: fill StepInputs.state_slots")
        self._inputs.check(inputs, self._n_vocab, self._n_positions, self._last_rows)
        return wanted

    def _device(self) -> AbstractContextManager[Any]:
        """A thread starts on device 0, whatever device the model was loaded on."""
        return torch.cuda.device(self._plan.device) if self._on_gpu else nullcontext()

    def keep(self, inputs: StepInputs, grids: Sequence[tuple[int, int]], behind: np.ndarray | None) -> list[DeviceRows]:
        """See `ops.step.KeepsRows`."""
        self._checked(inputs, "hidden")
        with self._device():
            self._start(inputs, "hidden", len(inputs.out_rows))
            values = [self._outputs[name] for name in results_of("hidden", self._outputs)]
            widths = [int(value.dims[1]) for value in values]
            parts = [self._plan.slots[value.id].tensor for value, width in zip(values, widths)]
            made, at = list[DeviceRows](), 0
            for rows, columns in grids:
                end = at + rows * columns
                each = [part[at * width : end * width].view(-1, width) for part, width in zip(parts, widths)]
                made.append(DeviceRows.of(each, None if behind is None else (columns, behind)))
                at = end
            return made

    def keep_stream(self, inputs: StepInputs, want: Want) -> torch.Tensor:
        """See `ops.step.KeepsStream`."""
        self._checked(inputs, want)
        with self._device():
            self._start(inputs, want, len(inputs.out_rows))
            stream = self._outputs["stream"]
            shape = _shape(stream, {"T": len(inputs.ids)})
            return self._plan.slots[stream.id].tensor[: prod(shape)].view(shape)

    def __call__(self, inputs: StepInputs, want: Want) -> StepOutputs:
        """Runs once; the result is on the host when this returns."""
        return self.launch(inputs, want).result()

    def profile(self, inputs: StepInputs, want: Want) -> Profiled:
        """See `ops.profile.Profiles`: plain launches, timed on the device."""
        self._watch = watch = Stopwatch(EventClock() if self._on_gpu else HostClock())
        try:
            outputs = self.launch(inputs, want).result()
        finally:
            self._watch = None
        return Profiled(outputs, *watch.read([c.node for c in self._choices]))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole cache blocks (source, destination) in every layer."""
        copy_blocks(self._plan.caches, pairs)

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies the state in slots (source, destination) of every layer."""
        copy_states(self._plan.states, pairs)

    def form(self) -> CacheForm:
        """See `ops.transfer.Transfers`, as of those below."""
        return transfer.form_of(self._plan.caches, self._plan.states, self.limits)

    def read_blocks(self, blocks: Sequence[int], into: Sequence[np.ndarray] = ()) -> list[np.ndarray]:
        return transfer.read_blocks(self._plan.caches, blocks, into)

    def write_blocks(self, blocks: Sequence[int], arrays: Sequence[np.ndarray], layer: int = 0) -> None:
        caches = self._plan.caches[layer : layer + len(arrays) // 2]
        transfer.write_blocks(caches, blocks, arrays, lambda array: self._upload(array))

    def transferred(self) -> Callable[[], None]:
        return transfer.transferred(self._plan.device)

    def pin(self, memory: np.ndarray) -> Callable[[], None]:
        with _CAPTURING:
            unpin = transfer.pin(memory, self._plan.device)

        def end() -> None:
            with _CAPTURING:
                unpin()

        return end

    @cached_property
    def _upload(self) -> Uploader:
        """Through which blocks come that are in memory which is not pinned."""
        return Uploader(self._plan.device)

    def read_states(self, slots: Sequence[int]) -> list[np.ndarray]:
        return [state[list(slots)].cpu().numpy() for state in self._plan.states]

    def write_states(self, slots: Sequence[int], arrays: Sequence[np.ndarray]) -> None:
        for state, given in zip(self._plan.states, arrays, strict=True):
            state[list(slots)] = torch.from_numpy(np.array(given)).to(state.device)

    def finite_states(self, slot: int) -> bool:
        """See `ops.step.KeepsStates`."""
        return all(bool(torch.isfinite(state[slot]).all()) for state in self._plan.states)

    def explain(self) -> list[ExplainLine]:
        """Who took what, in which format its weight is stored if not its own, and which kernels serve which rows."""
        return [
            ExplainLine(c.node.path, c.node.op.name, str(c.node.spec), self._taken(i, c), self._declined(i, c))
            for i, c in enumerate(self._choices)
        ]

    def expert_counts(self) -> dict[str, np.ndarray]:
        """See `ops.step.CountsExperts`."""
        return {path: counts.cpu().numpy() for path, counts in self._plan.counters.items()}

    def memory(self) -> MemoryPlan:
        """Device bytes; nothing of the file is used in place."""
        tensors = [*(t for c in self._plan.caches for t in c.tensors), *self._plan.states]
        cache = sum(t.numel() * t.element_size() for t in tensors)
        pools = sum(pool.nbytes for pool in pools_of(self._choices))
        decoded = sum(made.nbytes for made in self._plan.decoded_weights.values())
        decoded += sum(made.nbytes for made in self._plan.float8_weights.values())
        weights, activations = self._plan.weights.nbytes() + pools, self._plan.nbytes + self._inputs.nbytes
        return MemoryPlan(weights, 0, cache, activations, decoded)

    def close(self) -> None:
        """Drops every device tensor and graph; a second call does nothing."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        self._graphs.clear()
        self._outputs.clear()
        if "_plan" in self.__dict__:
            self._plan.drop()
        for name in ("_plan", "_inputs", "_choices", "_results", "_float_results", "_upload"):
            self.__dict__.pop(name, None)
        if torch.cuda.is_available():
            with _CAPTURING:
                torch.cuda.empty_cache()

    def _start(self, inputs: StepInputs, want: Want, rows: int) -> None:
        starts = self._item_starts(inputs)
        batch = batch_of(inputs.query_start, inputs.kv_len, rows, starts)
        sample = inputs.sample if "tokens" in outputs_of(want) else None
        adjusts = sample is not None and (sample.lists is not None or sample.masks is not None)
        batch = replace(batch, adjusts=adjusts) if adjusts else batch
        if self._cudnn_from and batch.prefill:
            batch = replace(batch, prompts=prompts_of(inputs.query_start, inputs.kv_len, self._cudnn_from))
        if self._sees:
            batch = replace(batch, longest=int(np.diff(inputs.query_start).max()))
        if self._deep and not batch.prefill and ring.is_deep(inputs.kv_len, self._deep):
            batch = replace(batch, deep=True)
        capture = self._capture and self._watch is None
        if capture and not self._sees and self._start_prompts(inputs, want, batch):
            return
        decode = capture and not batch.prefill and batch.T == batch.S and rows <= batch.S
        most = min(self.limits.max_seqs, self.limits.max_tokens)
        padded = min(power_of_two(batch.S), most) if decode else 0
        self._grow(max(rows, padded), batch.items)
        if decode:
            self._inputs.send(inputs, padded, starts)
            items = self._items(batch.items, padded, batch.splits)
            self._replay(replace(batch, T=padded, S=padded, R=padded, items=items), want)
        else:
            self._inputs.send(inputs, 0, starts)
            (self._replay if capture and self._sees else self._run)(batch, want)

    def _start_prompts(self, inputs: StepInputs, want: Want, batch: Batch) -> bool:
        """Runs a step of prompts, padded, as a graph; False where it cannot be one."""
        encoder = "mean" in self._outputs
        # cuDNN's plans and NCCL's sums follow the lengths that there are.
        if not encoder and (not batch.prefill or batch.prompts or self._plan.group is not None):
            return False
        whole = padded_prompts(inputs, self.limits, ENCODER if encoder else PROMPTS)
        if whole is None:
            return False
        seqs, outs = len(whole.kv_len), len(whole.out_rows)
        starts = np.zeros(seqs + 1, np.int32)
        if not encoder:
            real = self._item_starts(inputs, seqs)
            starts[: len(real)], starts[len(real) :] = real, real[-1]
        items = int(starts[-1])
        self._grow(outs, items)
        self._inputs.send(whole, 0, starts, len(inputs.ids))
        items = self._items(items, seqs) if items else 0
        self._replay(Batch(len(whole.ids), seqs, outs, items > 0, True, items, adjusts=batch.adjusts), want)
        return True

    def _item_starts(self, inputs: StepInputs, seqs: int = 0) -> Array:
        plan = self._plan
        return item_starts(
            inputs.query_start, inputs.kv_len, seqs, self.limits.deterministic, plan.most_splits, plan.short_splits
        )

    def _items(self, items: int, seqs: int, splits: bool = True) -> int:
        """Items that a graph has programs for."""
        return max(items, min(item_bucket(items, seqs, self._plan.most_splits, splits), self._plan.rows["items"]))

    def _grow(self, rows: int, items: int) -> None:
        have = self._plan.rows
        # Doubling keeps this rare; shared prefixes can make items outnumber the blocks of the cache.
        more = {
            "R": min(power_of_two(rows), self.limits.max_tokens) if rows > have["R"] else have["R"],
            "items": power_of_two(items) if power_of_two(items) > have["items"] else have["items"],
        }
        if any(more[axis] != have[axis] for axis in more):
            self._graphs.clear()
            self._plan.rows |= more
            self._plan.allocate()

    def _run(self, batch: Batch, want: str) -> None:
        self._plan.begin()
        if self._watch is not None:
            self._watch.run(self._plan, self._masks[want], batch)
            return
        for go, mark in zip(self._plan.launches, self._masks[want], strict=True):
            if mark:
                go(batch)

    def _replay(self, batch: Batch, want: str) -> None:
        key = (batch, want)
        if key not in self._graphs and key not in self._seen:
            self._seen.add(key)
            if self._ahead is not None:
                self._ahead.need(batch, want)
            self._run(batch, want)
            return
        if key not in self._graphs:
            if len(self._graphs) == MOST_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
            self._graphs[key] = self._captured(batch, want)
        for go in self._graphs[key]:
            go()

    def _captured(self, batch: Batch, want: str) -> list[Callable[[], None]]:
        """The step as graphs, with what no graph may hold between them."""
        self._plan.begin()
        wanted = [go for go, mark in zip(self._plan.launches, self._masks[want], strict=True) if mark]
        pieces: list[Callable[[], None]] = []
        for outside, piece in groupby(wanted, lambda go: isinstance(go, Outside)):
            launches = list(piece)
            pieces += [partial(go, batch) for go in launches] if outside else [_graph(launches, batch, self._pool).replay]
        return pieces or [_graph([], batch, self._pool).replay]

    def _copied(self, value: Value, shape: tuple[int, ...]) -> _Copied:
        results = self._results if value.kind == "i32" else self._float_results
        return _Copied.started(results, self._plan.slots[value.id].tensor, shape)

    def _read(self, value: Value, sizes: Mapping[str, int]) -> np.ndarray:
        shape = _shape(value, sizes)
        flat = self._plan.slots[value.id].tensor[: prod(shape)]
        out: np.ndarray = flat.float().cpu().numpy() if value.kind == "act" else flat.cpu().numpy()
        # On a CPU the tensor is the buffer itself, which the next call overwrites.
        return out.reshape(shape).copy() if flat.device.type == "cpu" else out.reshape(shape)

    def _taken(self, i: int, choice: Choice) -> str:
        described = self._plan.described.get(i)
        taken = choice.implementation.name + self._stored(choice) + (f": {described.describe()}" if described else "")
        note = self._plan.notes.get(i)
        return taken if note is None else f"{taken}; {note}"

    def _declined(self, i: int, choice: Choice) -> tuple[str, ...]:
        wanted = self._plan.cudnn_from and choice.node.op is ATTENTION
        reason = refusal(self._plan, choice.node) if wanted else None
        described = self._plan.described.get(i)
        declined = (*choice.declined, *(described.declined if described else ()))
        return declined if reason is None else (*declined, f"cuDNN: {reason}")

    def _stored(self, choice: Choice) -> str:
        if choice.node.op is ATTENTION and self._plan.cudnn_from and refusal(self._plan, choice.node) is None:
            return f"; whole prompts of {self._plan.cudnn_from} tokens and more by cuDNN"
        type = getattr(getattr(choice.node.spec, "linear", choice.node.spec), "type", None)
        if type is None or stored_as(type, self.compute) == type:
            return ""
        return f" (stored as {stored_as(type, self.compute).name})"


def masks_of(choices: Sequence[Choice], outputs: Mapping[str, Value]) -> dict[str, list[bool]]:
    """Which nodes run, for all that can be wanted."""
    nodes = [c.node for c in choices]
    alone = {name: needed(nodes, [value]) for name, value in outputs.items()}
    return {
        want: [any(marks) for marks in zip(*(alone[name] for name in results_of(want, alone)))]
        for want in get_args(Want)
        if alone.keys() >= set(outputs_of(want))
    }


def _shape(value: Value, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Of a result: a row for each that was asked for, or for each sequence or token."""
    axis, *widths = value.dims
    return (sizes[str(axis)], *(int(w) for w in widths))


def _graph(launches: Sequence[Launch], batch: Batch, pool: Any = None) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with _CAPTURING, _no_collections(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an empty program would warn; it is as well captured empty
        # Other threads may go on using the device, as another model's loading does.
        stream = _stream(torch.cuda.current_device())
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            for go in launches:
                go(batch)
    return graph


@contextmanager
def _no_collections() -> Iterator[None]:
    """A garbage collection may close another model here, whose thread would wait for this one, and give memory back, which
    a thread that captures must not."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """That a device's graphs are captured on: PyTorch's own is of the device that captured first, and each new one would
    keep a workspace of cuBLAS for itself."""
    return torch.cuda.Stream(device)


def _smallest_table(choices: Sequence[Choice], index: str) -> int:
    """Rows of the smallest embedding that is read at this input of the step; unlimited without one."""
    tables = [c.node for c in choices if isinstance(c.node.spec, EmbeddingSpec)]
    found = (t.spec.n for t in tables if isinstance(t.inputs[0], Value) and t.inputs[0].name == index)
    return min(found, default=1 << 31)
