"""Nodes of experts that a step of few rows computes together: a router and its choice, a shared expert, sums onto the
stream.

`fuse.py` says what they are, and asks for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from quarrel.gguf import GGMLType
from quarrel.ops.activation import GATED, PLAIN
from quarrel.ops.contract import Value
from quarrel.ops.linear import ADD, LINEAR, LINEAR_ADD, LinearAddSpec, LinearSpec
from quarrel.ops.moe import EXPERT_DOWN, EXPERT_UP, ROUTE, ExpertUpSpec
from quarrel.ops.norm import NORM
from quarrel.ops.program import Node
from quarrel.triton_backend.experts import joined as joined_experts
from quarrel.triton_backend.experts import matvec as expert_matvec
from quarrel.triton_backend.experts import route
from quarrel.triton_backend.experts.choose import Chooses
from quarrel.triton_backend.experts.experts import ExpertLaunch
from quarrel.triton_backend.experts.joined import Joined
from quarrel.triton_backend.experts.shared import WithShared, build_down, build_up
from quarrel.triton_backend.formats.table import has_matvec
from quarrel.triton_backend.fusion import Build, Fusion
from quarrel.triton_backend.linear import matvec
from quarrel.triton_backend.linear.maps import UNLIMITED
from quarrel.triton_backend.runtime.site import Launch, Site

SHARED_ACTIVATIONS = ("silu", "relu2")
BATCH = 128
"""Rows up to which gate and up of a shared expert are one launch; for longer steps each is decoded by itself."""


def router(
    nodes: Sequence[Node],
    i: int,
    before: int | None,
    maker: Mapping[int, int],
    readers: Mapping[int, Sequence[int]],
    kept: set[int],
) -> Fusion | None:
    if before is None or nodes[before].op is not LINEAR or not route.takes_router(nodes[i].spec):
        return None
    linear = nodes[before]
    if linear.spec.type is not GGMLType.F32:
        return None
    x = linear.inputs[0]
    assert isinstance(x, Value)
    norm = maker.get(x.id, -1)
    # Whoever else reads the norm comes behind the choice, so the norm may wait until then.
    inside = norm >= 0 and nodes[norm].op is NORM and x.id not in kept and matvec.can_norm(nodes[norm].spec)
    if not inside or any(at < i and at != before for at in readers[x.id]):
        return Fusion({before: None, i: lambda site, _: route.build_router(site, linear, nodes[i])}, route.ROUTED)

    def build(site: Site, _: Launch) -> Launch:
        first = nodes[norm]
        return route.build_router(site, linear, nodes[i], (first, matvec.build_norm(site, first)))

    return Fusion({norm: None, before: None, i: build}, route.ROUTED)


def chosen(
    nodes: Sequence[Node],
    i: int,
    fusions: Sequence[Fusion],
    source: Callable[[int, int], int | None],
    readers: Mapping[int, Sequence[int]],
    kept: set[int],
) -> Fusion | None:
    """A router whose choice one row's experts make themselves: nobody waits for the last of its logits. Their sum is added
    to the stream, or read by a norm of its own (Gemma 4)."""
    ids, weights = nodes[i].outputs
    linear, by = source(i, 0), sorted({*readers.get(ids.id, ()), *readers.get(weights.id, ())})
    router = next((f for f in fusions if i in f.parts), None)
    if router is None or linear is None or not route.may_leave(nodes[i].spec):
        return None
    if len(by) != 2 or {ids.id, weights.id} & kept:
        return None
    up, down = by
    if [nodes[up].op, nodes[down].op] != [EXPERT_UP, EXPERT_DOWN] or source(down, 0) != up:
        return None
    streams, (y,) = [f for f in fusions if down in f.parts], nodes[down].outputs
    normed = y.id not in kept and all(nodes[at].op is NORM for at in readers.get(y.id, ()))
    if [len(f.parts) for f in streams] != [2] and (streams or not normed):
        return None
    last, specs = streams[0].last if streams else down, [nodes[up].spec, nodes[down].spec]
    formats = {ref.type for ref in nodes[up].inputs[2 : 3 + specs[0].gated]}  # type: ignore[union-attr]
    if len(formats) > 1 or not all(has_matvec(s.type, s.k) for s in specs):
        return None

    def logits(site: Site, _: Launch) -> Launch:
        norm = _norm_of(site, nodes, router, (i, linear))
        return route.build_router(site, nodes[linear], nodes[i], norm, chooses=False)

    def build_up(site: Site, _: Launch) -> Launch:
        left = route.left_to_experts(site, nodes[linear], nodes[i])
        return expert_matvec.matvec_up(site, nodes[up], site.slot(ids), left)

    def build_down(site: Site, _: Launch) -> Launch:
        left, (out,) = route.left_to_experts(site, nodes[linear], nodes[i]), nodes[last].outputs
        stream, scale = (None, 1.0) if last == down else (nodes[last].inputs[0], nodes[last].spec.scale)
        return expert_matvec.matvec_down(site, nodes[down], out, stream, scale, left)  # type: ignore[arg-type]

    before: dict[int, Build | None] = {n: None for n in router.parts if n != i}
    return Fusion(before | {i: logits, up: build_up, down: None, last: build_down})


def _chooses(
    nodes: Sequence[Node],
    i: int,
    fusions: Sequence[Fusion],
    source: Callable[[int, int], int | None],
    made: Joined,
) -> Build:
    """A router that adds the shared expert to what it chooses."""
    router, linear = next((f for f in fusions if i in f.parts and f.rows == route.ROUTED), None), source(i, 0)
    if router is None or linear is None:
        return lambda site, _: route.build_route(site, nodes[i], made.more_of(site))

    def build(site: Site, _: Launch) -> Launch:
        norm = _norm_of(site, nodes, router, (i, linear))
        return route.build_router(site, nodes[linear], nodes[i], norm, more=made.more_of(site))

    return build


def _norm_of(site: Site, nodes: Sequence[Node], router: Fusion, others: Sequence[int]) -> tuple[Node, Launch] | None:
    """The norm that a router's launch begins with, if there is one beside these nodes."""
    first = next((n for n in router.parts if n not in others), None)
    return None if first is None else (nodes[first], matvec.build_norm(site, nodes[first]))


def shared(nodes: Sequence[Node], i: int, makers: Sequence[int | None]) -> Fusion | None:
    """`makers` of gate and up, or of up alone."""
    kind, maps = nodes[i].spec.activation, _alike(nodes, makers)
    if kind not in SHARED_ACTIVATIONS or not maps:
        return None
    spec: LinearSpec = maps[0].spec
    one = ExpertUpSpec(spec.type, 1, 1, spec.n, spec.k, kind, gated=len(maps) == 2, bias=spec.bias)
    refs = [m.inputs[place] for place in range(1, 2 + spec.bias) for m in maps]
    node = Node(EXPERT_UP, one, (maps[0].inputs[0], nodes[i].outputs[0], *refs), nodes[i].outputs, nodes[i].path)
    if not has_matvec(spec.type, spec.k):
        return None

    parts = dict.fromkeys(m for m in makers if m is not None)
    return Fusion({**parts, i: lambda site, _: expert_matvec.matvec_up(site, node, None)})


def shared_rows(nodes: Sequence[Node], i: int, makers: Sequence[int | None]) -> Fusion | None:
    """`makers` of gate and up, of several rows."""
    maps = _alike(nodes, makers)
    if nodes[i].spec.activation not in matvec.ACTIVATIONS or len(maps) != 2:
        return None
    parts: dict[int, Build | None] = dict.fromkeys(m for m in makers if m is not None)
    least = 2 if has_matvec(maps[0].spec.type, maps[0].spec.k) else 1  # matvecs of one row may find x as int8x2 only
    return Fusion(parts | {i: lambda site, _: matvec.build_gate_and_up(site, maps, nodes[i])}, BATCH, least)


def _alike(nodes: Sequence[Node], makers: Sequence[int | None]) -> list[Node]:
    """The linear maps of one value with one spec that these are, or nothing."""
    maps = [nodes[m] for m in makers if m is not None and nodes[m].op is LINEAR]
    alike = all(m.spec == maps[0].spec and m.inputs[0] == maps[0].inputs[0] for m in maps)
    return maps if alike and len(maps) == len(makers) else []


def with_shared(
    nodes: Sequence[Node],
    i: int,
    found: Sequence[Fusion | None],
    source: Callable[[int, int], int | None],
    maker: Mapping[int, int],
) -> Fusion | None:
    """ADD of a stream, chosen experts and a shared one: two launches for all of them. If that one has a gate, its logit is
    made where the router's are, which is one of the fusions `found`."""
    last = source(i, 1)
    if last is None or nodes[last].op is not LINEAR_ADD:
        return None
    down, rated = source(last, 0), source(last, 1)
    if down is None or rated is None or nodes[down].op is not EXPERT_DOWN:
        return None
    active, up = _unrated(nodes, rated, source), source(down, 0)
    if active is None or nodes[active].op not in (GATED, PLAIN) or not _whole_rows(nodes[active]):
        return None
    if up is None or nodes[up].op is not EXPERT_UP:
        return None
    maps = [source(active, place) for place in range(len(nodes[active].inputs))]
    own = [m for m in maps if m is not None and nodes[m].op is LINEAR]
    rate = None if active == rated else source(rated, 0)
    if len(own) != len(maps) or (active != rated and (rate is None or nodes[rate].op is not LINEAR)):
        return None
    of_rate = None if rate is None else nodes[rate]
    made = WithShared(nodes[up], nodes[down], [nodes[m] for m in own], nodes[active], nodes[last], nodes[i], of_rate)
    if not made.fits():
        return None
    ids = nodes[down].inputs[1]
    assert isinstance(ids, Value)
    choice = maker.get(ids.id, -1)
    router = next((f for f in found if f is not None and choice in f.parts), None)
    linear = None if router is None else source(choice, 0)
    leaves = linear is not None and route.may_leave(nodes[choice].spec)

    def chooses(site: Site) -> Chooses | None:
        return route.left_to_experts(site, nodes[linear], nodes[choice]) if leaves else None  # type: ignore[index]

    parts: dict[int, Build | None] = dict.fromkeys((up, down, *own, rated, last))
    parts[active] = lambda site, _: build_up(site, made, chooses(site))
    parts[i] = lambda site, _: build_down(site, made, chooses(site))
    if rate is None and not leaves:
        return Fusion(parts)
    if router is None or linear is None:
        return None
    # A gate's logit and the router's are of one x, so both begin with its norm.
    if of_rate is not None and nodes[linear].inputs[0] is not of_rate.inputs[0]:
        return None

    def routes(site: Site, _: Launch) -> Launch:
        norm = _norm_of(site, nodes, router, (choice, linear))
        return route.build_router(site, nodes[linear], nodes[choice], norm, chooses=not leaves, rate=made.rate_of(site))

    return Fusion(dict.fromkeys((*router.parts, *(() if rate is None else (rate,)))) | parts | {choice: routes})


def _unrated(nodes: Sequence[Node], rated: int, source: Callable[[int, int], int | None]) -> int | None:
    """A shared expert's activation: this node, or what it multiplies by the sigmoid of a number a row. None: by another."""
    spec = nodes[rated].spec
    if nodes[rated].op is not GATED or not spec.per_row:
        return rated
    return source(rated, 1) if spec.activation == "sigmoid" and spec.up_width == spec.n else None


def joined(
    nodes: Sequence[Node],
    i: int,
    fusions: Sequence[Fusion],
    source: Callable[[int, int], int | None],
    maker: Mapping[int, int],
    readers: Mapping[int, Sequence[int]],
    kept: set[int],
) -> Fusion | None:
    """LINEAR_ADD of a shared expert onto chosen ones: of a few rows, all of them together behind the router."""
    down, rated = source(i, 0), source(i, 1)
    if down is None or rated is None or nodes[down].op is not EXPERT_DOWN:
        return None
    active = _unrated(nodes, rated, source)
    if active is None:
        return None
    rate = None if active == rated else nodes[rated].inputs[0]
    if nodes[active].op not in (GATED, PLAIN) or not _whole_rows(nodes[active]):
        return None
    up, ids = source(down, 0), nodes[down].inputs[1]
    maps = [m for m in (source(active, place) for place in range(len(nodes[active].inputs))) if m is not None]
    if up is None or nodes[up].op is not EXPERT_UP or not maps or any(nodes[m].op is not LINEAR for m in maps):
        return None
    assert isinstance(ids, Value)
    choice = maker.get(ids.id, -1)
    if choice < 0 or nodes[choice].op is not ROUTE or {v.id for v in nodes[choice].outputs} & kept:
        return None
    if {at for v in nodes[choice].outputs for at in readers.get(v.id, ())} != {up, down}:
        return None
    last = _added(nodes, i, source, readers)
    own = [nodes[m] for m in maps]
    made = Joined(
        nodes[choice], nodes[up], nodes[down], own, nodes[active], nodes[i],
        rate if isinstance(rate, Value) else None, None if last is None else nodes[last],
    )  # fmt: skip
    if not made.fits():
        return None
    end = i if last is None else last
    parts: dict[int, Build | None] = dict.fromkeys((up, down, *maps, active, rated, i))
    parts |= {choice: _chooses(nodes, choice, fusions, source, made), end: lambda site, _: made.build(site)}
    return Fusion(parts, joined_experts.ROWS, joined_experts.LEAST, made.pack, dict.fromkeys((up, down), made.describe()))


def _whole_rows(node: Node) -> bool:
    """An activation of each number by one of its own."""
    return node.op is PLAIN or not (node.spec.per_row or node.spec.up_width != node.spec.n)


def _added(
    nodes: Sequence[Node], i: int, source: Callable[[int, int], int | None], readers: Mapping[int, Sequence[int]]
) -> int | None:
    """The ADD of a node's result, which is read by it alone, to a stream."""
    by = readers.get(nodes[i].outputs[0].id, ())
    (last,) = by if len(by) == 1 else (None,)
    return last if last is not None and nodes[last].op is ADD and source(last, 1) == i else None


def stream(nodes: Sequence[Node], i: int, source: Callable[[int, int], int | None]) -> Fusion | None:
    """ADD of a stream and experts: EXPERT_DOWN, or that and a shared expert's LINEAR_ADD onto it. Of any number of rows."""
    stream, scale = nodes[i].inputs[0], nodes[i].spec.scale
    assert isinstance(stream, Value)
    before = source(i, 1)
    if before is None:
        return None
    out = nodes[i].outputs[0]
    if nodes[before].op is EXPERT_DOWN:
        # The sum is written where the next node would write it.
        return Fusion({before: _onto(nodes[before], out, stream, scale), i: None}, UNLIMITED) if before == i - 1 else None
    if nodes[before].op is not LINEAR_ADD:
        return None
    shared, routed = nodes[before], source(before, 0)
    if routed is None or nodes[routed].op is not EXPERT_DOWN or shared.spec.scale != 1.0:
        return None
    last = replace(shared, spec=LinearAddSpec(shared.spec.linear, scale), outputs=(out,))
    down = nodes[routed]
    return Fusion(
        {
            routed: _onto(down, down.outputs[0], stream, scale),
            before: None,
            i: lambda site, _: matvec.build_linear_add(site, last),
        },
        UNLIMITED,
    )


def _onto(down: Node, out: Value, stream: Value, scale: float) -> Build:
    """EXPERT_DOWN that adds its sum to a stream."""

    def build(site: Site, alone: Launch) -> Launch:
        assert isinstance(alone, ExpertLaunch), alone
        assert alone.onto is not None
        many = alone.onto(site.slot(out), site.slot(stream), scale, site.left_parts(out))
        if alone.one_row is None:
            return many
        one = expert_matvec.matvec_down(site, down, out, stream, scale)
        return lambda batch: (one if batch.T == 1 else many)(batch)

    return build
