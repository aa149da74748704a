"""A compiled program: its stage tables, inputs and outputs, and the `Step` that the engine calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from quarrel.child.phase import compile_begins, compile_ends
from quarrel.cpu_backend.attention.cache import Cache
from quarrel.cpu_backend.experts.counts import ExpertCounts
from quarrel.cpu_backend.lowering import Lowering
from quarrel.cpu_backend.plan import AXES, Piece, Plan, finish
from quarrel.cpu_backend.registry import REGISTRY, forms_read
from quarrel.cpu_backend.runtime.pool import Pool, StageTable
from quarrel.cpu_backend.timing import StageTimes, parts_of
from quarrel.cpu_backend.weights import Weights
from quarrel.errors import RequestError
from quarrel.ops.collective import Group
from quarrel.ops.contract import Array, Compute, Value
from quarrel.ops.embedding import table_of_positions
from quarrel.ops.moe import RouteSpec
from quarrel.ops.profile import Part, Profiled
from quarrel.ops.program import Node, Program, needed
from quarrel.ops.registry import lower
from quarrel.ops.step import (
    Done,
    ExplainLine,
    Limits,
    MemoryPlan,
    StepInputs,
    StepOutputs,
    Want,
    WeightSource,
    outputs_of,
    results_of,
    with_ids,
)
from quarrel.ops.transfer import CacheForm, nothing, placed
from quarrel.ops.weights import Loading, weights_of


class Compiled:
    """A program with its weights and caches, for arrays up to `sizes` along the free axes."""

    def __init__(
        self,
        program: Program,
        source: WeightSource,
        caches: Sequence[Cache],
        states: Sequence[np.ndarray],
        sizes: Mapping[str, int],
        exact: bool,
        pool: Pool,
        progress: Callable[[int, int], None] | None = None,
        group: Group | None = None,
    ) -> None:
        self.program, self.caches, self._pool = program, caches, pool
        self.states = states
        self.choices = lower(program, REGISTRY)
        nodes = [c.node for c in self.choices]
        self.weights = Weights(source, "float32" if exact else "int8")
        plan = Plan(pool.level, pool.threads, {**sizes, "S1": sizes.get("S", 0) + 1}, exact, {}, {}, {})
        routes = [n.spec for n in nodes if isinstance(n.spec, RouteSpec)]
        self.expert_counts = ExpertCounts(routes, sizes.get("T", 0))
        lowering = Lowering(plan, self.weights, caches, states, self.expert_counts, group)
        plan.forms, plan.last_use = _uses(nodes, program, lowering)
        plan.producer = {v.id: i for i, node in enumerate(nodes) for v in node.outputs}
        self.inputs: dict[str, np.ndarray] = {}
        for name, value in program.inputs.items():
            self.inputs[name] = _buffer(value, plan.sizes)
            plan.bind(value, int(self.inputs[name].ctypes.data))
        loading = Loading(weights_of(nodes), progress)
        for choice in self.choices:
            choice.implementation.build(lowering, choice.node)
            plan.end_node([v for v in (*choice.node.inputs, *choice.node.outputs) if isinstance(v, Value)])
            for ref in weights_of([choice.node]):
                loading.loaded(ref)
        self._notes = lowering.notes
        self.weights.finish()
        places = {name: plan.place(value) for name, value in program.outputs.items()}
        plan.keep += [self.weights, list(caches), list(states), self.inputs]
        self.tables = finish(plan)
        self._outputs = {
            name: (value.dims[0], self.tables.view(places[name], _dtype(value), _shape(value, plan.sizes)))
            for name, value in program.outputs.items()
        }
        # Which axes of an input give the size of a free axis of the program.
        self._axes = {
            name: [(axis, i) for i, axis in enumerate(value.dims) if axis in AXES or axis == "S1"]
            if name != "images"
            else []
            for name, value in program.inputs.items()
        }
        self.words = int(program.inputs["masks"].dims[1]) if "masks" in program.inputs else None
        self._selected: dict[tuple[str, ...], list[Piece]] = {}
        self._wanted: dict[tuple[str, ...], dict[str, set[int]]] = {}
        self.closed = False

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """What `StageTimes` times."""
        return parts_of(self.tables, [c.node for c in self.choices])

    def run(
        self, arrays: Mapping[str, Array], wanted: tuple[str, ...], times: StageTimes | None = None
    ) -> dict[str, Array]:
        """Copies the inputs in, runs what the wanted outputs and the caches need, and copies the results out."""
        # Between two decode steps the CPU's caches are cold for this code, so it does as little as possible.
        sizes: dict[str, int] = {}
        for name, array in arrays.items():
            self.inputs[name][: array.size] = array.reshape(-1)
            for axis, i in self._axes[name]:
                if axis == "S1":
                    sizes["S"] = array.shape[i] - 1
                else:
                    sizes[axis] = array.shape[i]
        self.tables.header.set(sizes)
        if wanted not in self._selected:
            marks = needed([c.node for c in self.choices], [self.program.outputs[name] for name in wanted])
            self._selected[wanted] = self.tables.select({i for i, mark in enumerate(marks) if mark})
            self._wanted[wanted] = self.tables.wanted(self._selected[wanted])
        if self.tables.missing and (used := self.tables.used(self._wanted[wanted])):
            compile_begins()
            try:
                self.tables.load(used, self._pool.level, self._pool.threads)
            finally:
                compile_ends()
        for stages, piece in self._selected[wanted]:
            if times is not None:
                times.run(self._pool, stages, piece)
            elif isinstance(piece, StageTable):
                self._pool.run(piece)
            else:
                piece()
        self.expert_counts.add(sizes.get("T", 0))
        outputs = ((name, *self._outputs[name]) for name in wanted)
        return {name: whole[: sizes[axis]].copy() for name, axis, whole in outputs}

    def load_cached(self) -> None:
        """Loads the kernels that need not be compiled."""
        self.tables.load_cached(self._pool.level)

    def load_rest(self) -> None:
        """Compiles the kernels that no step has wanted yet, one by one, in a thread of its own, which `closed` ends."""
        if not self.tables.missing:
            return

        def work() -> None:
            for name in list(self.tables.missing):
                if self.closed:
                    return
                if name in self.tables.missing:
                    self.tables.load([name], self._pool.level)

        threading.Thread(target=work, name="quarrel-compile").start()

    def explain(self) -> list[ExplainLine]:
        """A line for each node."""
        lines = []
        for i, c in enumerate(self.choices):
            notes = self._notes.get(i, [])
            kernels = "; ".join(dict.fromkeys(name for name, _ in notes))
            declined = dict.fromkeys(reason for _, reasons in notes for reason in reasons)
            name = c.implementation.name + (f" ({kernels})" if kernels else "")
            lines.append(ExplainLine(c.node.path, c.node.op.name, str(c.node.spec), name, (*c.declined, *declined)))
        return lines


def _shape(value: Value, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(sizes[d] if isinstance(d, str) else d for d in value.dims)


def _dtype(value: Value) -> type:
    return np.int32 if value.kind == "i32" else np.float32


def _buffer(value: Value, sizes: Mapping[str, int]) -> np.ndarray:
    # Vector loads may run past the end, never past this margin.
    return np.zeros(int(np.prod(_shape(value, sizes))) + 64, _dtype(value))


def _uses(nodes: Sequence[Node], program: Program, lowering: Lowering) -> tuple[dict[int, set[str]], dict[int, int]]:
    """In which forms each value is read, and by which node last; outputs outlive every node."""
    forms: dict[int, set[str]] = {}
    last: dict[int, int] = {}
    for i, node in enumerate(nodes):
        for position, operand in enumerate(node.inputs):
            if isinstance(operand, Value):
                forms.setdefault(operand.id, set()).update(forms_read(lowering, node, position))
                last[operand.id] = i
    for value in program.outputs.values():
        forms.setdefault(value.id, set()).add("f32")
        last[value.id] = len(nodes)
    return forms, last


class CpuStep:
    """See `ops.step.Step`."""

    def __init__(self, compiled: Compiled, limits: Limits, compute: Compute, n_vocab: int) -> None:
        self.limits, self.compute = limits, compute
        self._compiled: Compiled | None = compiled
        self._n_vocab, self._n_positions = n_vocab, table_of_positions(compiled.program)
        self._last: Array | None = None
        self._first = True

    def _open(self) -> Compiled:
        if self._compiled is None:
            raise RequestError("the step is closed: compile the model again")
        return self._compiled

    def launch(self, inputs: StepInputs, want: Want) -> Done:
        """The step runs on the caller's thread and the pool's, so it is over when this returns."""
        return Done(self(inputs, want))

    def __call__(self, inputs: StepInputs, want: Want) -> StepOutputs:
        return self._run(inputs, want, None)

    def profile(self, inputs: StepInputs, want: Want) -> Profiled:
        """See `ops.profile.Profiles`: the same stages, each of which notes when it begins."""
        times = StageTimes()
        outputs = self._run(inputs, want, times)
        return Profiled(outputs, *times.of(self._open().parts))

    def _run(self, inputs: StepInputs, want: Want, times: StageTimes | None) -> StepOutputs:
        compiled = self._open()
        inputs = with_ids(inputs, self._last)
        inputs.check(self.limits, self._n_vocab)
        if self._n_positions < 1 << 31:
            self._check_positions(inputs.positions)
        if compiled.states:
            self._check_slots(inputs)
        wanted = outputs_of(want)
        if any(name not in compiled.program.outputs for name in wanted):
            raise RequestError(f"this model gives {', '.join(compiled.program.outputs)}, not {want}")
        if "tokens" in wanted and inputs.sample is None:
            raise RequestError("a step that returns tokens wants its sampling inputs, got none")
        if "tokens" not in wanted:
            inputs = replace(inputs, sample=None)
        arrays = {}
        for name in compiled.program.inputs:
            if (array := inputs.named(name)) is not None:
                arrays[name] = array
        if "masks" in arrays and not inputs.masks_are_sound(self.limits.max_seqs, compiled.words):
            raise RequestError(f"step inputs are unusable: masks of other than {compiled.words} words")
        outputs = StepOutputs(**compiled.run(arrays, results_of(want, compiled.program.outputs), times))
        if self._first:
            self._first = False
            compiled.load_rest()
        if outputs.tokens is not None:
            self._last = outputs.tokens
        return outputs

    def _check_positions(self, positions: Array) -> None:
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high >= self._n_positions:
            raise RequestError(f"step inputs are unusable: positions {low} to {high}, wanted 0 to {self._n_positions - 1}")

    def _check_slots(self, inputs: StepInputs) -> None:
        slots = inputs.state_slots
        if slots is None or len(slots) != len(inputs.kv_len) or slots.min() < 0 or slots.max() >= self.limits.states:
            found = "none" if slots is None else slots.tolist()
            raise RequestError(
                f"a model with recurrent layers wants one state slot below {self.limits.states} per sequence, got {found}"
            )

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for cache in self._open().caches:
            for source, target in pairs:
                cache.k[target] = cache.k[source]
                cache.v[target] = cache.v[source]

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        for state in self._open().states:
            for source, target in pairs:
                state[target] = state[source]

    def form(self) -> CacheForm:
        """See `ops.transfer.Transfers`, as of those below."""
        compiled = self._open()
        kind = compiled.caches[0].kind if compiled.caches else "float32"
        layers = tuple((c.k.shape[2], c.k[0, 0, 0].nbytes, c.v[0, 0, 0].nbytes) for c in compiled.caches)
        states = tuple(s.shape[1:] for s in compiled.states)
        return CacheForm(kind, self.limits.block_size, layers, states, self.limits.window_groups)

    def read_blocks(self, blocks: Sequence[int], into: Sequence[Array] = ()) -> list[Array]:
        own = (array for c in self._open().caches for array in (c.k, c.v))
        found = (np.ascontiguousarray(array[list(blocks)]).view(np.uint8) for array in own)
        return placed(found, into)

    def write_blocks(self, blocks: Sequence[int], arrays: Sequence[Array], layer: int = 0) -> None:
        own = [array for c in self._open().caches[layer:] for array in (c.k, c.v)]
        for array, given in zip(own, arrays):
            array[list(blocks)] = np.ascontiguousarray(given).view(array.dtype)

    def transferred(self) -> Callable[[], None]:
        return nothing

    def pin(self, memory: Array) -> Callable[[], None]:
        return nothing

    def read_states(self, slots: Sequence[int]) -> list[Array]:
        return [state[list(slots)] for state in self._open().states]

    def write_states(self, slots: Sequence[int], arrays: Sequence[Array]) -> None:
        for state, given in zip(self._open().states, arrays, strict=True):
            state[list(slots)] = given

    def finite_states(self, slot: int) -> bool:
        """See `ops.step.KeepsStates`."""
        return all(bool(np.isfinite(state[slot]).all()) for state in self._open().states)

    def explain(self) -> list[ExplainLine]:
        """Who took what; of linear maps also the kernels that their table chose, and why others declined."""
        return self._open().explain()

    def expert_counts(self) -> dict[str, np.ndarray]:
        """See `ops.step.CountsExperts`."""
        return self._open().expert_counts.counts()

    def memory(self) -> MemoryPlan:
        compiled = self._open()
        cache = sum(c.k.nbytes + c.v.nbytes for c in compiled.caches) + sum(s.nbytes for s in compiled.states)
        return MemoryPlan(compiled.weights.nbytes(), compiled.weights.in_place(), cache, len(compiled.tables.arena))

    def close(self) -> None:
        if self._compiled is not None:
            self._compiled.closed = True
        self._compiled = None
