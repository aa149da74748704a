"""The step: the unit that a device captures. The engine fills host ints, the backend owns every buffer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from quarrel.errors import RequestError
from quarrel.ops.adjust import MOST_LISTED
from quarrel.ops.contract import Array, Compute, Concrete, Op, RawWeight, WeightRef
from quarrel.ops.kv import KVType
from quarrel.ops.program import Program

ComputeChoice = Literal["auto", "float32", "float16", "bfloat16", "fp8"]
"""What the caller may ask for. `float32` means exact arithmetic on the dequantised values; `fp8` is float16 with products
of many rows in E4M3, where a backend has them."""

AttentionChoice = Literal["auto", "own", "cudnn"]
"""Who attends to long prompts: cuDNN where a backend has it and it applies, or our own kernels, which `auto` is."""


@dataclass(frozen=True)
class Limits:
    """What a step is sized for."""

    max_tokens: int
    """Rows of one step, prefill chunks included."""
    max_seqs: int
    max_blocks_per_seq: int
    n_blocks: int
    block_size: int = 32
    n_states: int = 0
    """Slots for the state of recurrent layers; 0 is one per sequence. More than that hold snapshots."""
    kv_cache: KVType = "auto"
    """What is kept of keys and values (`ops/kv.py`)."""
    attention: AttentionChoice = "auto"
    deterministic: bool = False
    """A row's result has the same bits in every batch, however its prompt is cut. The CPU backend never does otherwise."""

    n_adapters: int = 0
    """Adapters that a sequence may name, by 1 to so many; 0 is none."""

    window_groups: int = 0
    """Groups of layers with a window that have block tables of their own (`ops/windows.py`)."""

    decoded_bytes: int = 0
    """What weights may take that a backend decodes once and keeps, beside their own form."""

    @property
    def states(self) -> int:
        """Slots for recurrent state, at least one per sequence."""
        return max(self.n_states, self.max_seqs)


@dataclass(frozen=True)
class Lists:
    """What rows lay on single tokens; see `ops.adjust`."""

    list_end: Array  # [R] int32
    list_ids: Array  # [L] int32
    list_counts: Array  # [L] float32
    list_biases: Array  # [L] float32
    repetition: Array  # [R] float32, 1 is off
    presence: Array  # [R] float32, 0 is off
    frequency: Array  # [R] float32, 0 is off

    def sound(self, rows: int, n_vocab: int) -> bool:
        """Whether they are lists of so many rows, of ids below `n_vocab`."""
        end, ids = self.list_end, self.list_ids
        return (
            rows > 0
            and all(len(a) == rows for a in (end, self.repetition, self.presence, self.frequency))
            and len(ids) == len(self.list_counts) == len(self.list_biases) == int(end[-1])
            and int(end[0]) >= 0
            and int(np.diff(end, prepend=0).max()) <= MOST_LISTED
            and bool((end[1:] >= end[:-1]).all())
            and _within(ids, 0, n_vocab)
        )


LIST_INPUTS = tuple(f.name for f in fields(Lists))


@cache
def no_lists(rows: int) -> Lists:
    """Of rows whose logits are drawn from as they are."""
    none, off, ids = np.zeros(0, np.float32), np.zeros(rows, np.float32), np.zeros(0, np.int32)
    return Lists(np.zeros(rows, np.int32), ids, none, none, np.ones(rows, np.float32), off, off)


@dataclass(frozen=True)
class Masks:
    """Which tokens rows may draw; see `ops.adjust`."""

    mask_row: Array  # [R] int32, the row's one of `masks`, or -1
    masks: Array  # [M, words] int32, M at most a row for each sequence

    def sound(self, rows: int, most: int) -> bool:
        """Whether they are masks of so many rows, at most `most` of them."""
        count = len(self.masks)
        return len(self.mask_row) == rows and count <= most and _within(self.mask_row, -1, count)


MASK_INPUTS = tuple(f.name for f in fields(Masks))


@cache
def no_masks(rows: int) -> Masks:
    """Of rows that may draw any token."""
    return Masks(np.full(rows, -1, np.int32), np.zeros((0, 1), np.int32))


@dataclass(frozen=True)
class SampleInputs:
    """One row per row of `out_rows`; see `ops.sample`."""

    temperature: Array  # [R] float32, 0 is greedy
    top_k: Array  # [R] int32, 0 is off
    top_p: Array  # [R] float32, 1 is off
    min_p: Array  # [R] float32, 0 is off
    uniform: Array  # [R] float32 in [0, 1)
    lists: Lists | None = None
    masks: Masks | None = None


class Rows(Protocol):
    """Rows of numbers, wherever they lie; an array is one."""

    @property
    def nbytes(self) -> int: ...

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Rows: ...

    def __array__(self, dtype: Any = None, /) -> Array: ...


@dataclass(frozen=True, eq=False)
class Joined:
    """Rows one behind the other that lie apart, perhaps on a device."""

    pieces: Sequence[Rows]

    def __len__(self) -> int:
        return sum(map(len, self.pieces))

    def array(self) -> Array:
        """All of them on the host, float32."""
        return np.concatenate([np.asarray(piece, np.float32) for piece in self.pieces])


@dataclass(frozen=True)
class StepInputs:
    """A ragged batch: sequence s owns tokens `query_start[s]:query_start[s + 1]`, each with its slot in the cache."""

    ids: Array  # [T] int32
    positions: Array  # [T] int32
    slots: Array  # [T] int32, block * block_size + offset
    query_start: Array  # [S + 1] int32
    kv_len: Array  # [S] int32, keys in the cache once this step's tokens are appended
    block_table: Array  # [S, B] int32, rows padded with 0
    out_rows: Array  # [R] int32, indices into the T tokens whose results are wanted
    sample: SampleInputs | None = None
    state_slots: Array | None = None  # [S] int32, where recurrent layers keep each sequence's state
    adapter: Array | None = None  # [T] int32, which adapter each token's row takes, 0 is none
    from_last: Array | None = None  # [T] int32, the row of the launch before whose token is this id, or -1 for `ids`
    window_slots: Array | None = None  # [W, T] int32, `slots` of each group of layers with a window
    window_tables: Array | None = None  # [W, S, B] int32, their block tables; 0 where a block is no longer read
    stream: Array | Rows | None = None  # [T, E] float32, of the layers before, or of a model to predict further from
    per_layer: Array | None = None  # [T, W] float32, what the program of the layers before gave under this name
    places: Array | None = None  # [T, axes] int32, what rotates by more than one position
    see_to: Array | None = None  # [T] int32, the last position that a token sees: its own, or its image's last one
    image_rows: Array | None = None  # [T] int32, the row of `images` in a token's place, or -1
    images: Array | Joined | None = None  # [N, W] float32, rows of encoded images, N from 1 to T
    patches: Array | None = None  # [T, P] float32, what a tower encodes
    window_start: Array | None = None  # [S + 1] int32, where windows of its tokens begin; there may be fewer sequences

    def named(self, name: str) -> Array | None:
        """An input of a program; None if it is not there."""
        plain, _, group = name.partition(".")
        if group:
            arrays = self.window_slots if plain == "slots" else self.window_tables
            return None if arrays is None else arrays[int(group) - 1]
        if name in LIST_INPUTS:
            lists = self.sample and (self.sample.lists or no_lists(len(self.out_rows)))
            return None if lists is None else getattr(lists, name)
        if name in MASK_INPUTS:
            masks = self.sample and (self.sample.masks or no_masks(len(self.out_rows)))
            return None if masks is None else getattr(masks, name)
        owner = self if hasattr(self, name) else self.sample
        found = None if owner is None else getattr(owner, name)
        return found.array() if isinstance(found, Joined) else found

    def check(self, limits: Limits, n_vocab: int) -> None:
        """Raises `RequestError` if anything is out of range; a device never has to."""
        tokens, seqs = len(self.ids), len(self.kv_len)
        rules: list[tuple[str, bool]] = [
            (f"{tokens} tokens for a step of at most {limits.max_tokens}", 0 < tokens <= limits.max_tokens),
            (f"{seqs} sequences for a step of at most {limits.max_seqs}", 0 < seqs <= limits.max_seqs),
            (f"token ids outside 0..{n_vocab - 1}", _within(self.ids, 0, n_vocab)),
            ("positions and slots unlike the ids", len(self.positions) == len(self.slots) == tokens),
            ("slots outside the cache", _within(self.slots, 0, limits.n_blocks * limits.block_size)),
            ("block table outside the cache", _within(self.block_table, 0, limits.n_blocks)),
            ("slots or block tables unlike the groups of layers with a window", self.has_groups(limits.window_groups)),
            ("slots of a window outside the cache", _inside(self.window_slots, limits.n_blocks * limits.block_size)),
            ("block table of a window outside the cache", _inside(self.window_tables, limits.n_blocks)),
            ("out_rows outside the step", _within(self.out_rows, 0, tokens)),
            ("adapters unlike the ids", _length(self.adapter) == (tokens if limits.n_adapters else 0)),
            ("adapters that there are not", self.adapter is None or _within(self.adapter, 0, limits.n_adapters + 1)),
            ("stream unlike the ids", all(a is None or len(a) == tokens for a in (self.stream, self.per_layer))),
            ("images unlike the ids", self.has_images(tokens)),
            ("from_last unlike the ids", self.from_last is None or len(self.from_last) == tokens),
            ("lists of tokens unlike the rows, or too long", self.sample is None or self.lists_are_sound(n_vocab)),
            ("masks of tokens unlike the rows", self.masks_are_sound(limits.max_seqs)),
            ("query_start not from 0 to the token count", _covers(self.query_start, tokens, seqs)),
            ("window_start unlike query_start", self.window_start is None or _covers(self.window_start, tokens, seqs)),
            (
                "more keys than the block table holds",
                _within(self.kv_len, 1, limits.block_size * self.block_table.shape[1] + 1),
            ),
        ]
        for what, ok in rules:
            if not ok:
                raise RequestError(f"step inputs are unusable: {what}; this is the caller's batch, not the model")

    def lists_are_sound(self, n_vocab: int) -> bool:
        """Whether what rows lay on single tokens can be followed."""
        lists = None if self.sample is None else self.sample.lists
        return lists is None or lists.sound(len(self.out_rows), n_vocab)

    def masks_are_sound(self, most: int, words: int | None = None) -> bool:
        """Whether the masks are of this step's rows, and have so many words."""
        masks = None if self.sample is None else self.sample.masks
        if masks is None:
            return True
        return masks.sound(len(self.out_rows), most) and words in (None, masks.masks.shape[1])

    def has_images(self, tokens: int) -> bool:
        """Whether what is there for images fits so many tokens."""
        rows, images = self.image_rows, self.images
        if any(a is not None and len(a) != tokens for a in (self.places, self.see_to, rows, self.patches)):
            return False
        return (rows is None) == (images is None) and (
            rows is None or images is None or (0 < len(images) <= tokens and _within(rows, -1, len(images)))
        )

    def has_groups(self, groups: int) -> bool:
        """Whether slots and block tables are there for so many groups of layers with a window, shaped as the plain ones."""
        slots, tables = self.window_slots, self.window_tables
        if not groups or slots is None or tables is None:
            return groups == 0 and slots is None and tables is None
        return slots.shape == (groups, len(self.slots)) and tables.shape == (groups, *self.block_table.shape)


@dataclass(frozen=True)
class StepOutputs:
    """What `Want` names; the rest is None."""

    tokens: Array | None = None  # [R] int32
    logits: Array | None = None  # [R, V] float32
    hidden: Array | None = None  # [R, E] float32
    mean: Array | None = None  # [S, E] float32, of each sequence's rows in this step
    logprobs: Array | None = None  # [R, 1 + top] float32, of the token and of the best ones; see `ops.logprobs`
    best: Array | None = None  # [R, top] int32
    stream: Array | None = (
        None  # [T, E] float32 or, of a program that reads one, [R, E]; whatever is wanted, if there is one
    )
    per_layer: Array | None = None  # [T, W] float32, of the first layers alone: what those behind read besides `stream`
    deep1: Array | None = None  # [R, E] float32, of a tower: what its image adds behind the first layer; with `hidden`
    deep2: Array | None = None
    deep3: Array | None = None


Want = Literal["tokens", "logprobs", "logits", "hidden", "mean", "both", "all"]
"""`logprobs` is tokens and how likely they were; `both` is tokens and logits: some rows are drawn on the device, others by
the engine; `all` is the three."""

_DRAWN = ("tokens", "logprobs", "best")
_OUTPUTS: dict[str, tuple[str, ...]] = {"logprobs": _DRAWN, "both": ("tokens", "logits"), "all": (*_DRAWN, "logits")}


def outputs_of(want: Want) -> tuple[str, ...]:
    """The program's outputs that a step is to return."""
    return _OUTPUTS.get(want, (want,))


_BESIDES = ("stream", "per_layer", "deep1", "deep2", "deep3")


def results_of(want: Want, outputs: Collection[str]) -> tuple[str, ...]:
    """Those, and what a program has besides: its `stream`, a tower's deeper rows."""
    return (*outputs_of(want), *(name for name in _BESIDES if name in outputs))


class Pending(Protocol):
    """A step on its way."""

    def result(self) -> StepOutputs:
        """Waits for it. A fault of the device is raised here."""


@dataclass(frozen=True)
class Done:
    """A step that was over when its launch returned."""

    outputs: StepOutputs

    def result(self) -> StepOutputs:
        return self.outputs


def with_ids(inputs: StepInputs, last: Array | None) -> StepInputs:
    """The inputs with every id known: those that `from_last` points at are taken from `last`, the tokens before."""
    if inputs.from_last is None:
        return inputs
    replaced = inputs.from_last >= 0
    if replaced.any() and (last is None or int(inputs.from_last.max()) >= len(last)):
        rows = "none" if last is None else len(last)
        raise RequestError(f"step inputs are unusable: from_last names row {inputs.from_last.max()} of {rows} tokens")
    # A row without a number drew -1. Its sequence is over, but its next step may be on the way already: any id will do.
    ids = (
        inputs.ids if last is None else np.where(replaced, np.maximum(last[np.maximum(inputs.from_last, 0)], 0), inputs.ids)
    )
    return replace(inputs, ids=ids.astype(np.int32), from_last=None)


class WeightSource(Protocol):
    """Where a backend gets raw blocks while it packs."""

    def raw(self, ref: WeightRef) -> RawWeight:
        """A read-only view of the rows, in place in the file's mapping."""


@dataclass(frozen=True)
class ExplainLine:
    """One line of `quarrel explain`: where, what, by whom, and who declined."""

    path: str
    op: str
    spec: str
    implementation: str
    declined: tuple[str, ...] = ()


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose, as `quarrel explain` prints them."""

    weights: int
    weights_in_place: int
    cache: int
    activations: int
    decoded: int = 0
    """Of weights that are kept decoded too."""

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.activations + self.decoded


class Step(Protocol):
    """A compiled program with its weights and cache."""

    limits: Limits
    compute: Compute

    def __call__(self, inputs: StepInputs, want: Want) -> StepOutputs:
        """Runs once, to its end. What is drawn needs `inputs.sample`."""

    def launch(self, inputs: StepInputs, want: Want) -> Pending:
        """Starts a step; launches run in order, and the inputs may be reused as soon as this returns.

        `inputs.from_last` refers to the rows of the last launch of tokens, whether or not its result was waited for; a
        row that drew no token (-1) counts as id 0 then.
        """

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole cache blocks (source, destination) in every layer, after the launches so far."""

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies the recurrent state in slots (source, destination) of every layer, after the launches so far."""

    def explain(self) -> list[ExplainLine]:
        """Who took what."""

    def memory(self) -> MemoryPlan:
        """What it holds."""

    def close(self) -> None:
        """Gives memory, threads and device handles back; the step is unusable afterwards."""


@runtime_checkable
class CountsExperts(Protocol):
    """A step that counts, where it runs, how often each expert was chosen. Reading waits for the launches so far."""

    def expert_counts(self) -> dict[str, Array]:
        """Tokens that each expert took since the step was compiled, int64 `[n_experts]`, by the path of its layer."""


@runtime_checkable
class KeepsStates(Protocol):
    """A step whose recurrent states can be looked at. Reading waits for the launches so far."""

    def finite_states(self, slot: int) -> bool:
        """Whether the states in this slot, of all layers, hold neither NaN nor infinity; True where there are none."""


@runtime_checkable
class KeepsStream(Protocol):
    """A stage's step whose stream can stay on its device; it takes that of the stage before from there too."""

    def keep_stream(self, inputs: StepInputs, want: Want) -> Rows:
        """Starts a step. Its `stream` where it lies, float32 `[T, E]`, until the next step is started."""


@runtime_checkable
class CopiesWeights(Protocol):
    """A backend some of whose kernels read parts of weights in another order."""

    def copies_bytes(self, program: Program, compute: ComputeChoice) -> int:
        """What it keeps of the program's weights beside them, in its memory."""


@runtime_checkable
class KeepsRows(Protocol):
    """A step of a tower whose rows can stay on its device, which other steps of the same backend read them from."""

    def keep(self, inputs: StepInputs, grids: Sequence[tuple[int, int]], behind: Array | None) -> Sequence[Rows]:
        """Of images of so many rows and columns of `out_rows`, what the program returns with `hidden`, side by side.

        float32; each image has memory of its own. behind: what stands behind each row of an image but its last. Waits for
        nothing."""


@runtime_checkable
class Backend(Protocol):
    """One way to compute. Tests, fuzzers and QUARREL_CHECK use `run_op`."""

    name: str
    step_tokens: int
    """Rows of a prefill step: as many as are worth reading the weights once."""

    def unavailable(self) -> str | None:
        """Why this machine cannot run it, or None."""

    def device(self) -> str:
        """The device in words, such as "NVIDIA H200" or "x86-64, AVX-512 VNNI, 2 threads"."""

    def free_bytes(self) -> int:
        """Memory that a cache may be planned into."""

    def compile(
        self,
        program: Program,
        weights: WeightSource,
        limits: Limits,
        compute: ComputeChoice = "auto",
        progress: Callable[[int, int], None] | None = None,
    ) -> Step:
        """Chooses implementations, packs weights (reporting bytes done and in all), allocates caches and buffers."""

    def run_op(
        self, op: Op, spec: object, inputs: Sequence[Concrete], compute: ComputeChoice = "auto"
    ) -> tuple[Concrete, ...]:
        """One op on concrete host arrays; caches are consumed and returned. Declines as `compile` would."""

    def compute_of(self, choice: ComputeChoice) -> Compute:
        """The arithmetic behind a choice, which names the tolerance that applies."""


def _length(values: Array | None) -> int:
    return 0 if values is None else len(values)


def _within(values: Array, low: int, high: int) -> bool:
    return values.size == 0 or (int(values.min()) >= low and int(values.max()) < high)


def _inside(values: Array | None, high: int) -> bool:
    return values is None or _within(values, 0, high)


def _covers(query_start: Array, tokens: int, seqs: int) -> bool:
    return (
        len(query_start) == seqs + 1
        and int(query_start[0]) == 0
        and int(query_start[-1]) == tokens
        and bool((query_start[1:] >= query_start[:-1]).all())
    )
