"""The ring of weights by its own text in an emulator, and against float64.

The emulator cannot see which lane holds what, how shared memory is swizzled, nor if the launch before this one is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from quarrel.gguf import GGMLType
from quarrel.ops import draw
from quarrel.triton_backend.elementwise import ring_x
from quarrel.triton_backend.experts.ring import gather_by_expert
from quarrel.triton_backend.formats.pack import blank, put
from quarrel.triton_backend.formats.table import RING
from quarrel.triton_backend.linear import ring, ring_kernels
from quarrel.triton_backend.linear.ring import Cut, Ending, Product, Rows
from quarrel.triton_backend.runtime.arrays import Packed
from quarrel.triton_backend.runtime.launch import INTERPRETED, cdiv, launch
from tests.triton_backend import gluon_emulator, ptx_emulator

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="a GPU runs the kernel itself")
LIMIT = 8e-3
"""Of a result's error, to the root of the mean square of all: weights are rounded to float16."""


def emulated(kernel: Any, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
    """A launch of `ring`, its arguments as the emulator has them."""
    assert kernel is ring_kernels.ring
    copies: dict[int, gluon_emulator.Copies] = {}
    known = (gluon_emulator.given(x, copies) for x in args)
    constants = {name: x for name, x in named.items() if name in kernel.arg_names}
    arguments = dict(zip(kernel.arg_names, known, strict=False))
    gluon_emulator.run(kernel, (*grid, 1), arguments | constants | {"PDL": True}, {})


class Weights(NamedTuple):
    packed: Packed
    dense: Any


def weights(type: GGMLType, rows: int, k: int, seed: int, scale: float = 0.05) -> Weights:
    raw = draw.weight(np.random.default_rng(seed), type, rows, k, scale)
    if type == GGMLType.MXFP4 and scale > 1:
        raw.raw.reshape(rows, -1, 17)[..., 0] += 16
    made = blank(type, rows, k, torch.device("cpu"))
    put(made, type, 0, torch.from_numpy(np.ascontiguousarray(raw.raw)))
    return Weights(made, raw.dense().astype(np.float64))


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


def unwritten(*shape: int) -> torch.Tensor:
    return torch.full(shape, torch.nan)


def product(
    given: Sequence[Weights], n: int, activation: str = "none", biases: Sequence[torch.Tensor] = ()
) -> Product:  # fmt: skip
    site = SimpleNamespace(launch=emulated, generation=9)
    return Product(site, [w.packed for w in given], n, activation, biases)  # type: ignore[arg-type]


def in_order(x: torch.Tensor, made: Product, width: int) -> Rows:
    """Rows of x as the kernel reads them."""
    count, k = x.shape
    room = torch.full((count, made.padded), torch.nan, dtype=torch.float16)
    launch(ring_x.arrange, (count, cdiv(made.padded, 1024)), room, x, K=k, KP=made.padded, C=1024, early=False)
    descriptor = made.rows(room, count, width)
    return Rows(descriptor, descriptor.base, descriptor.base, count)


def check(got: torch.Tensor, want: Any) -> None:
    assert got.shape == want.shape
    error = np.abs(got.double().numpy() - want) / np.sqrt(np.mean(want**2))
    assert error.max() <= LIMIT, f"error {error.max()} at {np.unravel_index(error.argmax(), error.shape)}"


def silu(gate: Any, up: Any) -> Any:
    return gate / (1 + np.exp(-gate)) * up


def oai(gate: Any, up: Any) -> Any:
    gate = np.minimum(gate, 7)
    return gate / (1 + np.exp(-1.702 * gate)) * (np.clip(up, -7, 7) + 1)


def relu2(x: Any) -> Any:
    return np.maximum(x, 0) ** 2


ACTIVATIONS: dict[str, Callable[..., Any]] = {"none": lambda x: x, "relu2": relu2, "silu": silu, "oai": oai}


@pytest.fixture(name="programs", autouse=True)
def _programs(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """How many programs there are, and stages of each."""

    def choose(programs: int, stages: int) -> None:
        monkeypatch.setattr(Product, "multiprocessors", programs)
        monkeypatch.setattr(Product, "_stages", lambda *_: stages)

    choose(2, 2)
    return choose


ONE = [
    ("Q4_0", 72, 672, 5, Cut(8, 1, 4), "none"),
    ("Q4_0", 40, 768, 20, Cut(16, 1, 4, 2), "relu2"),
    ("Q5_0", 72, 672, 9, Cut(8, 1, 4), "none"),
    ("Q5_0", 131, 896, 5, Cut(8, 1, 8), "relu2"),
    ("Q5_0", 40, 1280, 5, Cut(8, 1, 4, 2), "none"),
    ("Q8_0", 72, 672, 9, Cut(8, 1, 4), "relu2"),
    ("Q8_0", 131, 768, 5, Cut(8, 1, 8, 2), "none"),
    ("Q4_K", 131, 1280, 9, Cut(8, 1, 4, 2), "none"),
    ("Q5_K", 72, 768, 17, Cut(16, 1, 4), "relu2"),
    ("Q6_K", 131, 768, 9, Cut(8, 1, 8, 2), "none"),
    ("MXFP4", 72, 672, 33, Cut(32, 1, 4), "relu2"),
]
GATED = [
    ("Q4_0", 72, 672, 9, Cut(8, 1, 4), "silu"),
    ("Q5_0", 40, 672, 9, Cut(8, 1, 4, 2), "silu"),
    ("Q5_0", 72, 768, 5, Cut(8, 1, 8), "oai"),
    ("Q8_0", 72, 672, 9, Cut(8, 1, 4), "silu"),
    ("Q8_0", 72, 768, 5, Cut(8, 1, 8, 2), "oai"),
    ("Q4_K", 72, 768, 9, Cut(8, 1, 4, 2), "silu"),
    ("Q5_K", 72, 768, 17, Cut(16, 1, 8), "oai"),
    ("Q6_K", 72, 768, 9, Cut(8, 1, 4), "silu"),
    ("MXFP4", 72, 672, 9, Cut(8, 1, 8), "oai"),
]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("format", "n", "k", "rows", "cut", "activation"), [*ONE, *GATED])
def test_a_map_is_right(
    format: str, n: int, k: int, rows: int, cut: Cut, activation: str, bias: bool, programs: Callable[[int, int], None]
) -> None:
    if not bias:
        programs(1, 3)
    number = 2 if activation in ("silu", "oai") else 1
    given = [weights(GGMLType[format], n, k, i) for i in range(number)]
    biases = [normal(3 + i, n) for i in range(number)] if bias else []
    x, y = normal(5, rows, k), unwritten(rows, n)
    made = product(given, n, activation, biases)
    made.launch(y, in_order(x, made, cut.width), cut)
    sums = [x.half().double().numpy() @ w.dense.T for w in given]
    if bias:
        sums = [s + b.numpy() for s, b in zip(sums, biases, strict=True)]
    check(y, ACTIVATIONS[activation](*sums))


def test_every_format_has_cases() -> None:
    for cases in ONE, GATED:
        assert {format for format, *_ in cases} == set(RING)


@pytest.mark.parametrize("format", RING)
def test_every_weight_is_decoded(format: str, programs: Callable[[int, int], None]) -> None:
    """Rows of x that have one column each."""
    programs(1, 2)
    given, cut = weights(GGMLType[format], 64, 256, 1), Cut(64, 1, 4)
    made, y = product([given], 64), unwritten(256, 64)
    made.launch(y, in_order(torch.eye(256), made, cut.width), cut)
    error = np.abs(y.T.double().numpy() - given.dense).reshape(64, 8, 32)
    worst = (error.max(2) / np.abs(given.dense).reshape(64, 8, 32).max(2)).max()
    assert worst <= 2.0**-9


@pytest.mark.parametrize("format", ["Q4_0", "Q4_K", "Q6_K", "MXFP4"])
def test_scales_that_outgrow_float16_are_divided(format: str) -> None:
    given = weights(GGMLType[format], 40, 512, 1, 3000.0)
    x, y, cut = normal(5, 5, 512), unwritten(5, 40), Cut(8, 1, 4)
    assert ring.shift_of(given.packed) > 0
    made = product([given], 40)
    made.launch(y, in_order(x, made, cut.width), cut)
    check(y, x.half().double().numpy() @ given.dense.T)


K, COUNT = 1280, 10
"""Five steps, or three of two super-blocks."""


@pytest.mark.parametrize("span", [1, 2])
@pytest.mark.parametrize("parts", [2, 3])
def test_parts_of_k_in_turn_have_the_bits_of_parts_added_in_order(parts: int, span: int) -> None:
    n, cut = 72, Cut(8, 1, 4, span)
    given, bias, residual = weights(GGMLType.Q4_K, n, K, 1), normal(2, n), normal(3, COUNT, n)
    x = normal(4, COUNT, K)
    made = product([given], n, biases=[bias])
    rows = in_order(x, made, cut.width)
    sums = unwritten(parts, COUNT, n)
    made.launch(sums, rows, cut, parts, COUNT * n)
    steps = cdiv(K, 256 * span)
    for part, got in enumerate(sums):
        columns = slice(part * steps // parts * 256 * span, (part + 1) * steps // parts * 256 * span)
        check(got, x.half().double().numpy()[:, columns] @ given.dense[:, columns].T)
    total = sums[0]
    for part in sums[1:]:
        total = total + part
    y = unwritten(COUNT, n)
    made.launch(y, rows, cut, ending=Ending(parts))
    assert torch.equal(y, total + bias)
    made.launch(y, rows, cut, ending=Ending(parts, residual, 0.7))
    assert torch.equal(y, residual + 0.7 * (total + bias))


@pytest.mark.parametrize(("count", "width"), [(9, 8), (100, 128)])
def test_a_residual_is_added(count: int, width: int) -> None:
    n, k, cut = 72, 512, Cut(width, 1, 4)
    given, residual, x, y = weights(GGMLType.Q4_0, n, k, 1), normal(3, count, n), normal(4, count, k), unwritten(count, n)
    made = product([given], n)
    made.launch(y, in_order(x, made, width), cut, ending=Ending(1, residual, 0.7))
    check(y, residual.double().numpy() + 0.7 * (x.half().double().numpy() @ given.dense.T))


@pytest.mark.parametrize("parts", [1, 3])
def test_three_maps_in_one_matrix(parts: int) -> None:
    ns, cut = (64, 128, 40), Cut(8, 1, 4)
    given = weights(GGMLType.Q8_0, sum(ns), 1024, 1)
    x, bias = normal(4, COUNT, 1024), normal(2, sum(ns))
    ys = [unwritten(COUNT, n) for n in ns]
    made = product([given], sum(ns), biases=[bias])
    made.launch(
        ys[0], in_order(x, made, cut.width), cut, ending=Ending(parts, further=(ys[1], ys[2]), rows=ns)
    )  # fmt: skip
    want = x.half().double().numpy() @ given.dense.T + bias.numpy()
    for y, part in zip(ys, np.split(want, np.cumsum(ns)[:-1], 1), strict=True):
        check(y, part)


@pytest.mark.parametrize(
    ("format", "k", "n", "cut", "activation"),
    [
        ("Q4_K", 768, 80, Cut(8, 1, 4, 2), "silu"),
        ("MXFP4", 672, 48, Cut(8, 1, 4), "oai"),
        ("Q5_0", 672, 80, Cut(8, 1, 8), "relu2"),
        ("Q6_K", 768, 132, Cut(8, 1, 4), "none"),
    ],
)
def test_rows_of_experts(
    format: str, k: int, n: int, cut: Cut, activation: str, programs: Callable[[int, int], None]
) -> None:
    """Of five experts two have no pairs, and one has more than an item takes."""
    programs(3, 3)
    experts, used = 5, 2
    ids = np.array([[1, 4], [3, 1], [1, 4], [1, 3], [4, 1], [1, 3], [1, 4], [1, 3], [1, 4], [3, 1], [1, 4]], np.int32)
    number = 2 if activation in ("silu", "oai") else 1
    given = [weights(GGMLType[format], experts * n, k, i) for i in range(number)]
    biases = [normal(3 + i, experts, n) for i in range(number)]
    made = product(given, n, activation, biases)
    x, y = normal(6, len(ids), k), unwritten(ids.size, n)
    rows = torch.full((ids.size, made.padded), torch.nan, dtype=torch.float16)
    items, order, starts = (torch.full((size,), -1, dtype=torch.int32) for size in (1 + 4 * 8, ids.size, experts + 1))
    launch(
        gather_by_expert, (ids.size + 1, cdiv(made.padded, 1024)), rows, items, x, order, starts,
        torch.from_numpy(ids.reshape(-1)), ids.size, k, EXPERTS=experts, PADDED=8, PER_TOKEN=used, KP=made.padded,
        BT=cut.width, C=1024, GROUPS=32, early=False,
    )  # fmt: skip
    multiplied = Rows(made.rows(rows, ids.size, cut.width), items, order)
    made.launch(y, multiplied, cut)
    want = np.empty((ids.size, n))
    for pair, expert in enumerate(ids.reshape(-1)):
        row = x[pair // used].half().double().numpy()
        of = slice(expert * n, (expert + 1) * n)
        sums = [w.dense[of] @ row + b[expert].numpy() for w, b in zip(given, biases, strict=True)]
        want[pair] = ACTIVATIONS[activation](*sums)
    check(y, want)
    # Weights that are on their way before x, or that are read once more, change no bit.
    for more in ({"known": True}, {"likely": experts}):
        again = unwritten(ids.size, n)
        made.launch(again, multiplied._replace(**more), cut)
        assert torch.equal(again, y)


@pytest.mark.parametrize("meets", [True, False])
def test_nothing_is_copied_over_what_a_warp_may_still_read(meets: bool) -> None:
    """A GPU's warps are not at one place of the text, as the emulator's are."""
    machine = gluon_emulator.Machine()
    room = gluon_emulator.Shared(torch.zeros(8, 64), gluon_emulator.Type(torch.float32), machine.read)
    layout = SimpleNamespace(swizzle_byte_width=0)
    source = gluon_emulator.Copies(SimpleNamespace(base=torch.ones(8, 64), block_shape=[4, 64], layout=layout))
    bar = gluon_emulator.Barrier(1, 1)
    room.slice(0, 4).load(None)
    machine.copy(source, [0, 0], bar, room.slice(4, 4))
    if meets:
        machine.barrier()
        machine.copy(source, [0, 0], bar, room.slice(0, 4))
    else:
        with pytest.raises(AssertionError, match="no barrier since"):
            machine.copy(source, [0, 0], bar, room.slice(0, 4))


def test_an_output_may_take_the_register_of_an_input() -> None:
    words = [np.array([5], np.uint32), np.array([3], np.uint32)]
    (both,) = ptx_emulator.run("or.b32 a, $1, $2; mov.b32 $0, a;", "=r,r,r", words)
    assert both == 7
    with pytest.raises(AssertionError, match=r"\$2 is read"):
        ptx_emulator.run("mov.b32 $0, $1; or.b32 $0, $0, $2;", "=r,r,r", words)
