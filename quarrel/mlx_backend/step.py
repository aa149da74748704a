"""The step on MLX: lazy graphs, evaluated while the host prepares the next; decode steps are traced once by mx.compile.

A step takes the recurrent states and returns them. Caches stay where they are: kernels write into them, and the order of
who reads and writes is that of a small array which each step returns and the next one takes (`_after`). A decode step is
traced for each number of sequences and each width of the block table, which is padded to a power of two; other steps differ
too much from each other to be worth a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import mlx.core as mx
import numpy as np

from quarrel.errors import RequestError
from quarrel.mlx_backend.experts.counts import ExpertCounts
from quarrel.mlx_backend.linear.kernels import declined as linear_declined
from quarrel.mlx_backend.plan import Plan, Resident
from quarrel.mlx_backend.runtime import transfer
from quarrel.mlx_backend.runtime.cache import copy_blocks, copy_rows, put_rows
from quarrel.mlx_backend.runtime.kernel import emulated
from quarrel.mlx_backend.runtime.launch import Batch, Cache, batch_of
from quarrel.mlx_backend.weights import stored_as
from quarrel.ops.contract import Array, CacheRef, Compute, StateRef, Value
from quarrel.ops.embedding import EmbeddingSpec
from quarrel.ops.registry import Choice
from quarrel.ops.step import (
    LIST_INPUTS,
    MASK_INPUTS,
    ExplainLine,
    Limits,
    MemoryPlan,
    StepInputs,
    StepOutputs,
    Want,
    outputs_of,
    results_of,
)
from quarrel.ops.transfer import CacheForm, nothing, placed

_SAMPLE = ("temperature", "top_k", "top_p", "min_p", "uniform")
_ENTRIES = ("list_ids", "list_counts", "list_biases")


class Pending:
    """A step that the device may still be computing (`ops.step.Pending`)."""

    def __init__(self, outputs: Mapping[str, mx.array]) -> None:
        self._outputs = outputs

    def result(self) -> StepOutputs:
        """Waits for it."""
        whole = ("tokens", "best")
        kinds = {name: mx.int32 if name in whole else mx.float32 for name in self._outputs}
        return StepOutputs(**{n: np.array(a.astype(kinds[n])) for n, a in self._outputs.items()})


class MlxStep:
    """A compiled program (`ops.step.Step`)."""

    def __init__(
        self, plan: Plan, resident: Resident, inputs: Mapping[str, Value], outputs: Mapping[str, Value], limits: Limits
    ) -> None:
        self.limits = limits
        self.compute: Compute = plan.compute
        self._plan: Plan | None = plan
        self._resident, self._inputs, self._outputs = resident, dict(inputs), dict(outputs)
        self._traced: dict[tuple[int, int, str], Callable[..., list[mx.array]]] = {}
        self._last: mx.array | None = None
        self._experts = ExpertCounts([c.node for c in plan.choices])
        self._counts = self._experts.none()
        self._after = mx.zeros(1, mx.int32)
        mx.eval(self._after)
        self._n_vocab, self._n_positions = (_smallest_table(plan.choices, name) for name in ("ids", "positions"))

    @property
    def inputs(self) -> Collection[str]:
        """What its program takes."""
        return self._inputs.keys()

    @property
    def n_vocab(self) -> int:
        """Ids that its embeddings have rows for."""
        return self._n_vocab

    def largest(self, inputs: StepInputs) -> float:
        """Of the magnitudes of all values that a step rounds to its arithmetic; infinite if one is no number."""
        want: Want = "logits" if self.gives("logits") else "hidden"
        batch, arrays = self._batch(inputs), self._arrays(inputs, want)
        plan, resident = self._open(), _bound(list(self._resident), _flat(self._resident), self._after)
        ids = {self._inputs[name].id: array for name, array in arrays.items()}
        rounded = [v for c in plan.choices for v in c.node.outputs if v.kind == "act"]
        found, _ = plan.run(batch, ids, resident, rounded)
        most = [float(mx.max(mx.abs(a)).item()) for a in found if a.size]
        return max((m if np.isfinite(m) else np.inf for m in most), default=0.0)

    def gives(self, want: Want) -> bool:
        """Whether the program has the outputs of this wish."""
        return all(name in self._outputs for name in outputs_of(want))

    def __call__(self, inputs: StepInputs, want: Want) -> StepOutputs:
        """Runs once; the result is on the host when this returns."""
        return self.launch(inputs, want).result()

    def launch(self, inputs: StepInputs, want: Want) -> Pending:
        """Hands the step to the device and returns."""
        self._check(inputs, want)
        out = self._run(self._batch(inputs), self._arrays(inputs, want), want)
        self._last = out.get("tokens", self._last)
        mx.async_eval(*out.values(), self._counts, self._after, *_states(self._resident))
        return Pending(out)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole cache blocks (source, destination) in every layer, after the launches so far."""
        if not pairs:
            return
        mx.eval(self._after)
        for cache in self._resident.values():
            if isinstance(cache, Cache):
                copy_blocks(cache, pairs, self.limits.block_size)

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies the state in slots (source, destination) of every layer, after the launches so far."""
        if not pairs:
            return
        for ref, state in self._resident.items():
            if isinstance(ref, StateRef) and isinstance(state, mx.array):
                self._resident[ref] = copy_rows(state, pairs, "state slots")

    def form(self) -> CacheForm:
        """See `ops.transfer.Transfers`, as of those below."""
        return transfer.form_of(self._caches(), _states(self._resident), self.limits)

    def read_blocks(self, blocks: Sequence[int], into: Sequence[Array] = ()) -> list[Array]:
        mx.eval(self._after)
        found = (a for c in self._caches() for a in transfer.read_blocks(c, blocks, self.limits.block_size))
        return placed(found, into)

    def write_blocks(self, blocks: Sequence[int], arrays: Sequence[Array], layer: int = 0) -> None:
        mx.eval(self._after)
        for cache, k, v in zip(self._caches()[layer:], arrays[::2], arrays[1::2]):
            transfer.write_blocks(cache, blocks, k, v)

    def transferred(self) -> Callable[[], None]:
        return nothing

    def pin(self, memory: Array) -> Callable[[], None]:
        return nothing

    def read_states(self, slots: Sequence[int]) -> list[Array]:
        return [np.array(state[mx.array(list(slots))]) for state in _states(self._resident)]

    def write_states(self, slots: Sequence[int], arrays: Sequence[Array]) -> None:
        refs = [ref for ref in self._resident if isinstance(ref, StateRef)]
        for ref, given in zip(refs, arrays, strict=True):
            self._resident[ref] = put_rows(self._resident[ref], mx.array(list(slots)), mx.array(given))

    def _caches(self) -> list[Cache]:
        return [cache for cache in self._resident.values() if isinstance(cache, Cache)]

    def finite_states(self, slot: int) -> bool:
        """See `ops.step.KeepsStates`."""
        return all(bool(mx.isfinite(state[slot]).all()) for state in _states(self._resident))

    def expert_counts(self) -> dict[str, Array]:
        """See `ops.step.CountsExperts`."""
        return self._experts.read(self._counts)

    def explain(self) -> list[ExplainLine]:
        """Who took what, and in which format its weight is stored if not its own."""
        return [
            ExplainLine(
                c.node.path,
                c.node.op.name,
                str(c.node.spec),
                c.implementation.name + self._stored_as(c),
                (*c.declined, *linear_declined(c.node.spec)),
            )
            for c in self._open().choices
        ]

    def memory(self) -> MemoryPlan:
        """Device bytes; MLX keeps no buffers of fixed size for activations."""
        return MemoryPlan(self._open().weights.nbytes(), 0, sum(a.nbytes for a in _flat(self._resident)), 0)

    def close(self) -> None:
        """Drops every array; a second call does nothing."""
        if self._plan is not None:
            self._plan.drop()
        self._plan, self._last = None, None
        self._resident, self._traced = {}, {}
        mx.clear_cache()

    def _open(self) -> Plan:
        if self._plan is None:
            raise RequestError("the step is closed: compile the model again")
        return self._plan

    def _check(self, inputs: StepInputs, want: Want) -> None:
        self._open()
        wanted = outputs_of(want)
        if not self.gives(want):
            raise RequestError(f"this program has no {want}: ask for one of {', '.join(self._outputs)}")
        if "tokens" in wanted and inputs.sample is None:
            raise RequestError("tokens are wanted without sampling controls: fill StepInputs.sample")
        inputs.check(self.limits, self._n_vocab)
        rows, (seqs, width) = len(inputs.out_rows), inputs.block_table.shape
        slots, recurrent = inputs.state_slots, any(isinstance(ref, StateRef) for ref in self._resident)
        known = 0 if self._last is None else len(self._last)
        words = int(self._inputs["masks"].dims[1]) if "masks" in self._inputs else None
        rules = [
            (f"positions outside 0..{self._n_positions - 1}", _within(inputs.positions, self._n_positions)),
            (f"{rows} rows wanted of at most {self.limits.max_tokens}", rows <= self.limits.max_tokens),
            (f"a block table of {seqs} rows for {len(inputs.kv_len)} sequences", seqs == len(inputs.kv_len)),
            (f"{width} blocks for a sequence of at most {self.limits.max_blocks_per_seq}",
             width <= self.limits.max_blocks_per_seq),
            ("recurrent layers without state_slots", slots is not None or not recurrent),
            (f"state slots that are not one of 0..{self.limits.states - 1} for each sequence",
             slots is None or (len(slots) == seqs and _within(slots, self.limits.states))),
            (f"from_last past the {known} tokens of the launch before",
             inputs.from_last is None or int(inputs.from_last.max(initial=-1)) < known),
            (f"sampling controls for other than {rows} rows",
             inputs.sample is None or {len(getattr(inputs.sample, n)) for n in _SAMPLE} == {rows}),
            ("masks of another width", inputs.masks_are_sound(self.limits.max_seqs, words)),
        ]  # fmt: skip
        for what, ok in rules:
            if not ok:
                raise RequestError(f"step inputs are unusable: {what}; this is the caller's batch, not the model")

    def _batch(self, inputs: StepInputs) -> Batch:
        size, kept = self.limits.block_size, self.limits.kv_cache
        return batch_of(inputs.query_start, inputs.out_rows, len(inputs.ids), len(inputs.out_rows), size, kept)

    def _arrays(self, inputs: StepInputs, want: Want) -> dict[str, mx.array]:
        """The program's inputs on the device. Ids that the launch before draws are taken there and not waited for."""
        arrays: dict[str, mx.array] = {}
        for name in self._inputs:
            array = inputs.named(name)
            if array is not None and (name not in (*_SAMPLE, *LIST_INPUTS, *MASK_INPUTS) or "tokens" in outputs_of(want)):
                wide = name.startswith("block_table") or name in _ENTRIES
                arrays[name] = mx.array(_padded(array) if wide else _padded(array.T).T if name == "masks" else array)
        if inputs.from_last is not None and self._last is not None and "ids" in arrays:
            rows = mx.array(inputs.from_last)
            # A row that drew no token counts as id 0: its sequence is over.
            drawn = mx.maximum(self._last[mx.maximum(rows, 0)], 0)
            arrays["ids"] = mx.where(rows >= 0, drawn, arrays["ids"])
        return arrays

    def _run(self, batch: Batch, arrays: dict[str, mx.array], want: Want) -> dict[str, mx.array]:
        names, refs, wanted = list(arrays), list(self._resident), results_of(want, self._outputs)
        plan, ids, experts = self._open(), [self._inputs[n].id for n in names], self._experts
        values = [*(self._outputs[n] for n in wanted), *experts.ids]

        def compute(inputs: list[mx.array], flat: list[mx.array], counts: mx.array, before: mx.array) -> list[mx.array]:
            out, resident = plan.run(batch, dict(zip(ids, inputs)), _bound(refs, flat, before), values)
            results, chosen = out[: len(wanted)], out[len(wanted) :]
            after = _end_of(results[0], [c.written for c in resident.values() if isinstance(c, Cache)])
            return [*results, experts.add(counts, chosen), after, *_states(resident)]

        if batch.tokens.all_decode and batch.out_rows.all_decode and not emulated():
            width = arrays["block_table"].shape[1] if "block_table" in arrays else 0
            key = (batch.tokens.count, width, want)
            if key not in self._traced:
                self._traced[key] = mx.compile(compute)
            compute = self._traced[key]
        results = compute(list(arrays.values()), _flat(self._resident), self._counts, self._after)
        self._counts, self._after, *states = results[len(wanted) :]
        # From here on only the graph holds the old states, which is what lets MLX write into them.
        self._resident.update(zip((ref for ref in refs if isinstance(ref, StateRef)), states, strict=True))
        return dict(zip(wanted, results))

    def _stored_as(self, choice: Choice) -> str:
        type = getattr(getattr(choice.node.spec, "linear", choice.node.spec), "type", None)
        if type is None or stored_as(type, self.compute) == type:
            return ""
        return f" (stored as {stored_as(type, self.compute).name})"


def _flat(resident: Resident) -> list[mx.array]:
    return [a for o in resident.values() for a in (o[:2] if isinstance(o, Cache) else (o,))]


def _states(resident: Resident) -> list[mx.array]:
    return [o for o in resident.values() if not isinstance(o, Cache)]


def _bound(refs: Sequence[CacheRef | StateRef], flat: Sequence[mx.array], before: mx.array) -> Resident:
    """Arrays by who refers to them; caches are written and read behind `before`."""
    arrays = iter(flat)
    return {r: Cache(next(arrays), next(arrays), before) if isinstance(r, CacheRef) else next(arrays) for r in refs}


def _end_of(result: mx.array, written: list[mx.array]) -> mx.array:
    """A number that is there when all kernels of a step are done with the caches: of its first result, which comes of every
    layer. A step that wants no rows ends with its appends."""
    if result.size:
        return result.reshape(-1)[:1].astype(mx.int32)
    return mx.concatenate(written) if written else mx.zeros(1, mx.int32)


def _padded(array: Array) -> Array:
    """More columns of a block table than any sequence has blocks, or more entries of lists than there are: a power of two,
    so that few widths are ever traced."""
    length = array.shape[-1]
    width = 1 << max(0, length - 1).bit_length()
    return np.pad(array, ((0, 0),) * (array.ndim - 1) + ((0, width - length),))


def _within(values: Array, stop: int) -> bool:
    return values.size == 0 or (int(values.min()) >= 0 and int(values.max()) < stop)


def _smallest_table(choices: Sequence[Choice], index: str) -> int:
    """Rows of the smallest embedding that is read at this input of the step; unlimited without one."""
    tables = [c.node for c in choices if isinstance(c.node.spec, EmbeddingSpec)]
    found = (t.spec.n for t in tables if isinstance(t.inputs[0], Value) and t.inputs[0].name == index)
    return min(found, default=1 << 31)
