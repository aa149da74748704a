"""Nodes that a step of few rows computes together: fewer launches, where the time between launches is most of a step.

    router    a float32 linear map and the choice of experts from its logits: one launch; for several rows, two better ones
    shared    up (and gate) of a shared expert with the activation: one launch, as for an expert that is always chosen;
              gate and up of several rows likewise, as in a dense layer
    normed    a norm added to the stream, with the layer's scale if there is one: one launch, of any rows; of one row with
              the norm that follows it, as matvecs read that, and with two norms before it whose sum it takes
    rotated   a norm of heads and their rotation: one launch, of any rows
    heads     norms beside each other, of queries, keys and values: one launch, of any rows
    conv      a convolution between two gates, in steps without prompts: one launch
    own gate  a gate of few columns in the map of them: one launch for two, of one row (`linear/own_row.py`)
    stream    the experts' sum added to the stream where it is made, and the shared expert's down onto that; of any rows
    latent    before attention over compressed keys the norm of its values, the rotation and the append, in steps without
              prompts; of one row, behind it the map of heads that adds its splits: one launch and two
    experts   of one row with a shared one: two launches for both of the above and the chosen experts (`experts/shared.py`),
              behind a router that makes the logit of the shared one's gate, too; of a few rows, the shared one among
              those that are chosen (`experts/joined.py`)

Steps of more rows than a fusion has run its nodes by themselves. The values between are nobody else's; whatever a fused
launch reads has to live until the last node that it stands for (`lifetimes`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from quarrel.gguf import GGMLType
from quarrel.ops.activation import CAP, GATED, PLAIN
from quarrel.ops.attention import ATTENTION, ROPE_APPEND
from quarrel.ops.contract import Compute, Value
from quarrel.ops.heads import HEAD_LINEAR
from quarrel.ops.linear import ADD, LINEAR, LINEAR_ADD, LinearAddSpec, LinearSpec
from quarrel.ops.moe import EXPERT_DOWN, EXPERT_UP, ROUTE, ExpertUpSpec
from quarrel.ops.norm import NORM
from quarrel.ops.program import Node
from quarrel.ops.rope import ROPE
from quarrel.ops.state import CONV
from quarrel.triton_backend.attention import latent, rope
from quarrel.triton_backend.elementwise import head_norms
from quarrel.triton_backend.elementwise.activation import build_rounded
from quarrel.triton_backend.elementwise.head_norms import HeadNorms
from quarrel.triton_backend.elementwise.norm_add import NormAdd
from quarrel.triton_backend.experts import joined, route
from quarrel.triton_backend.experts import matvec as expert_matvec
from quarrel.triton_backend.experts.choose import Chooses
from quarrel.triton_backend.experts.experts import ExpertLaunch
from quarrel.triton_backend.experts.joined import Joined
from quarrel.triton_backend.experts.shared import WithShared, build_down, build_up
from quarrel.triton_backend.formats import int8x2
from quarrel.triton_backend.formats.table import has_matvec
from quarrel.triton_backend.linear import matvec, own_row
from quarrel.triton_backend.linear.maps import UNLIMITED
from quarrel.triton_backend.recurrent.short_conv import ShortConv
from quarrel.triton_backend.runtime.site import Batch, Launch, Site

Build = Callable[[Site, Launch], Launch]
"""From a node's own launch, for steps of other rows."""
SHARED_ACTIVATIONS = ("silu", "relu2")
BATCH = 128
"""Rows up to which gate and up of a shared expert are one launch; for longer steps each is decoded by itself."""


@dataclass(frozen=True)
class Fusion:
    """What some nodes do in a step of `least` to so many rows: nothing where there is no build."""

    parts: Mapping[int, Build | None]
    rows: int = 1
    least: int = 1
    packs: Callable[[Site], None] | None = None
    """Before the first node is built."""
    notes: Mapping[int, str] = field(default_factory=dict)
    """What `explain` says of nodes."""
    decodes: bool = False
    """Nothing in a step with prompts."""

    @property
    def first(self) -> int:
        return min(self.parts)

    @property
    def last(self) -> int:
        return max(self.parts)


def find(nodes: Sequence[Node], compute: Compute, kept: set[int], joins: bool = False) -> list[Fusion]:
    """The fusions among nodes; values of `kept` are results, so they are not passed over. `joins`: the device computes
    shared experts among the chosen ones."""
    if compute == "float32":
        return []
    maker: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        maker |= {v.id: i for v in node.outputs}
        for value in {v.id for v in node.inputs if isinstance(v, Value)}:
            readers.setdefault(value, []).append(i)

    def source(i: int, place: int) -> int | None:
        """The node that makes this input, for this node alone."""
        value = nodes[i].inputs[place]
        if not isinstance(value, Value) or value.id in kept or readers[value.id] != [i]:
            return None
        return maker.get(value.id)

    found: list[Fusion | None] = []
    for i, node in enumerate(nodes):
        if node.op is ROUTE:
            found.append(_router(nodes, i, source(i, 0), maker, readers, kept))
        elif node.op is GATED or node.op is PLAIN:
            makers = [source(i, place) for place in range(len(node.inputs))]
            found += [_shared(nodes, i, makers), _shared_rows(nodes, i, makers), _rounded(nodes, i, makers)]
        elif node.op is ROPE:
            found.append(_rotated(nodes, i, source(i, 0)))
        elif node.op is CONV:
            found.append(_short_conv(nodes, i, source))
        elif node.op is ATTENTION:
            found += _latent(nodes, i, source, readers, kept)
        elif node.op is ADD:
            found += [_with_shared(nodes, i, found, source, maker), _stream(nodes, i, source)]
            found += _normed(nodes, i, source, readers, kept, compute)
    fusions = [f for f in found if f is not None]
    fusions += _head_norms(nodes, {i for f in fusions for i in f.parts}, int8x2.readers(nodes, compute)[0])
    taken = {i for f in fusions for i in f.parts}
    gates = (_own_gate(nodes, i, source(i, 0), compute) for i, node in enumerate(nodes) if node.op is LINEAR)
    fusions += [f for f in gates if f is not None and not taken & f.parts.keys()]
    chosen = (_chosen(nodes, i, fusions, source, maker, readers, kept) for i, n in enumerate(nodes) if n.op is ROUTE)
    fusions += [f for f in chosen if f is not None]
    if joins:
        added = (i for i, node in enumerate(nodes) if node.op is LINEAR_ADD)
        together = [_joined(nodes, i, fusions, source, maker, readers, kept) for i in added]
        fusions += [f for f in together if f is not None]
    return fusions


def _chosen(
    nodes: Sequence[Node],
    i: int,
    fusions: Sequence[Fusion],
    source: Callable[[int, int], int | None],
    maker: Mapping[int, int],
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


def lifetimes(fusions: Sequence[Fusion], nodes: Sequence[Node]) -> dict[int, int]:
    """Until which node values live, by their id, where that is later than their own readers say."""
    until: dict[int, int] = {}
    for fusion in fusions:
        read = {v.id for i in fusion.parts for v in nodes[i].inputs if isinstance(v, Value)}
        until |= {value: max(fusion.last, until.get(value, 0)) for value in read}
    return until


def until_added(
    fusions: Sequence[Fusion], nodes: Sequence[Node], adds: Sequence[tuple[int, int]], until: Mapping[int, int]
) -> dict[int, int]:
    """The same of what nodes, each by itself or at the end of fusions, leave to a norm behind them (`left_parts.py`)."""
    longer = dict(until)
    for i, at in adds:
        parts = {i, *(part for f in fusions if f.last == i for part in f.parts)}
        for value in (v for part in parts for v in nodes[part].inputs if isinstance(v, Value)):
            longer[value.id] = max(at, longer.get(value.id, 0))
    return longer


def by_node(fusions: Sequence[Fusion]) -> dict[int, list[Fusion]]:
    """Which fusions a node is part of, by its number: those of the fewest rows last."""
    found: dict[int, list[Fusion]] = {}
    for fusion in sorted(fusions, key=lambda f: -f.rows):
        for i in fusion.parts:
            found.setdefault(i, []).append(fusion)
    return found


def launch_of(site: Site, fusions: Sequence[Fusion], i: int, alone: Launch) -> Launch:
    """A node's launch, which gives way in a step of few rows."""
    for fusion in fusions:
        build = fusion.parts[i]
        alone = _either(_nothing if build is None else build(site, alone), fusion, alone)
    return alone


def _either(together: Launch, fusion: Fusion, alone: Launch) -> Launch:
    def run(batch: Batch) -> None:
        fits = fusion.least <= batch.T <= fusion.rows and not (fusion.decodes and batch.prefill)
        (together if fits else alone)(batch)

    return run


def _nothing(batch: Batch) -> None:
    pass


def _rounded(nodes: Sequence[Node], i: int, makers: Sequence[int | None]) -> Fusion | None:
    """The gate of an attention's result, which leaves one row as the map behind it reads it."""
    spec, made = nodes[i].spec, makers[-1]
    if nodes[i].op is not GATED or made is None or nodes[made].op is not ATTENTION or spec.per_row or spec.n % 32:
        return None
    return Fusion({i: lambda site, many: build_rounded(site, nodes[i], many)})


def _router(
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


def _shared(nodes: Sequence[Node], i: int, makers: Sequence[int | None]) -> Fusion | None:
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


def _shared_rows(nodes: Sequence[Node], i: int, makers: Sequence[int | None]) -> Fusion | None:
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


def _with_shared(
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


def _joined(
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
    return Fusion(parts, joined.ROWS, joined.LEAST, made.pack, dict.fromkeys((up, down), made.describe()))


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


def _stream(nodes: Sequence[Node], i: int, source: Callable[[int, int], int | None]) -> Fusion | None:
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


def _normed(
    nodes: Sequence[Node],
    i: int,
    source: Callable[[int, int], int | None],
    readers: Mapping[int, Sequence[int]],
    kept: set[int],
    compute: Compute,
) -> list[Fusion]:
    """ADD of a stream and a norm, with the factor behind it; and that of one row with the maps that begin with a norm of
    it."""
    norm, (out,) = source(i, 1), nodes[i].outputs
    if norm is None or nodes[norm].op is not NORM or nodes[i].inputs[0] == nodes[i].inputs[1]:
        return []
    last, by = i, readers.get(out.id, ())
    if len(by) == 1 and out.id not in kept and nodes[by[0]].op is CAP and nodes[by[0]].spec.cap == 0.0:
        (last,) = by
        (out,) = nodes[last].outputs
    made = NormAdd(nodes[norm], nodes[i], nodes[last] if last != i else None)
    parts: dict[int, Build | None] = dict.fromkeys((norm, i))
    found = [Fusion(parts | {last: lambda site, _: made.build(site)}, UNLIMITED)]
    onward = min(readers.get(out.id, ()), default=None)
    build = None if onward is None or nodes[onward].inputs[0] != out else matvec.row_builder(nodes[onward])
    rounded = out.id in int8x2.readers([nodes[r] for r in readers.get(out.id, ())], compute)[0]
    if onward is None or build is None or rounded or out.id in kept or out.dims[0] != "T" or not made.fits_a_row():
        return found
    norm_spec, gain = nodes[onward].spec.norm, nodes[onward].inputs[1]
    row, pair = made, _pair(nodes, norm, source)
    if pair is not None and made.takes_pair(nodes[pair[0]], nodes[pair[1]]):
        row = replace(made, pair=(nodes[pair[0]], nodes[pair[1]]))
        parts |= dict.fromkeys(pair)
    parts |= {last: None, onward: lambda site, _: build(site, row.row(site, norm_spec, gain))}  # type: ignore[arg-type]
    return [*found, Fusion(parts)]


def _own_gate(nodes: Sequence[Node], i: int, made: int | None, compute: Compute) -> Fusion | None:
    """LINEAR of a GATED of few columns."""
    if made is None or nodes[made].op is not GATED or not own_row.takes_gated(nodes[made], nodes[i], compute):
        return None
    return Fusion({made: None, i: lambda site, _: own_row.build_gated(site, nodes[made], nodes[i])})


def _pair(nodes: Sequence[Node], i: int, source: Callable[[int, int], int | None]) -> tuple[int, int, int] | None:
    """Two NORMs and the ADD of their results, which node i alone reads."""
    add = source(i, 0)
    if add is None or nodes[add].op is not ADD or nodes[add].spec.scale != 1.0:
        return None
    first, second = source(add, 0), source(add, 1)
    if first is None or second is None or not nodes[first].op is nodes[second].op is NORM:
        return None
    return first, second, add


def _rotated(nodes: Sequence[Node], i: int, norm: int | None) -> Fusion | None:
    """ROPE of a NORM."""
    if norm is None or nodes[norm].op is not NORM or not rope.takes_norm(nodes[i].spec, nodes[norm].spec):
        return None
    return Fusion({norm: None, i: lambda site, _: rope.build_rope(site, nodes[i], nodes[norm])}, UNLIMITED)


def _short_conv(nodes: Sequence[Node], i: int, source: Callable[[int, int], int | None]) -> Fusion | None:
    """CONV of a gate's product, which another gate alone reads."""
    before, after = source(i, 0), i + 1
    if before is None or after == len(nodes) or nodes[before].op is not GATED or nodes[after].op is not GATED:
        return None
    made = ShortConv(nodes[before], nodes[i], nodes[after])
    if source(after, 1) != i or not made.fits():
        return None
    return Fusion({before: None, i: None, after: lambda site, _: made.build(site)}, UNLIMITED, decodes=True)


def _head_norms(nodes: Sequence[Node], taken: set[int], rounded: set[int]) -> list[Fusion]:
    """NORMs beside each other that are no part of another fusion and whose results nobody reads as int8x2."""
    found, i = [], 0
    while i < len(nodes):
        j = i
        while j - i < head_norms.MOST and j < len(nodes) and j not in taken and _beside(nodes[i:j], nodes[j], rounded):
            j += 1
        if j - i > 1:
            made = HeadNorms(nodes[i:j])
            parts: dict[int, Build | None] = dict.fromkeys(range(i, j))
            found.append(Fusion(parts | {j - 1: lambda site, _, made=made: made.build(site)}, UNLIMITED))
        i = max(j, i + 1)
    return found


def _beside(before: Sequence[Node], node: Node, rounded: set[int]) -> bool:
    """Whether a node is a NORM for one launch with these."""
    if node.op is not NORM or not head_norms.takes(node) or node.outputs[0].id in rounded:
        return False

    def facts(node: Node) -> tuple[object, ...]:
        return node.spec.k, node.spec.eps, node.outputs[0].dims[0]

    return all(facts(n) == facts(node) and n.outputs[0] is not node.inputs[0] for n in before)


def _latent(
    nodes: Sequence[Node],
    i: int,
    source: Callable[[int, int], int | None],
    readers: Mapping[int, Sequence[int]],
    kept: set[int],
) -> list[Fusion]:
    """ATTENTION over compressed keys and the ROPE_APPEND before it, with the norm of what that appends; and of one row the
    HEAD_LINEAR behind it."""
    attends, append = nodes[i], source(i, 0)
    if attends.spec.latent < 32 or append is None or nodes[append].op is not ROPE_APPEND:
        return []
    norm = source(append, 2)
    norm = norm if norm is not None and nodes[norm].op is NORM else None
    before = latent.Before(nodes[append], None if norm is None else nodes[norm])
    if nodes[append].inputs[6] != attends.inputs[4] or not before.fits():
        return []

    def either(build: Build) -> Build:
        """Where the cache takes what is appended as it is."""
        return lambda site, alone: build(site, alone) if latent.appends(site, attends) else alone

    nothing = either(lambda site, _: _nothing)
    alone = either(lambda site, _: latent.build_attention(site, attends, before))
    parts: dict[int, Build | None] = dict.fromkeys((append,) if norm is None else (norm, append), nothing)
    found = [Fusion(parts | {i: alone}, UNLIMITED, decodes=True)]
    (y,) = attends.outputs
    behind = [at for at in readers.get(y.id, ()) if y.id not in kept]
    if len(behind) == 1 and nodes[behind[0]].op is HEAD_LINEAR and nodes[behind[0]].spec.rest == 0:
        values = nodes[behind[0]]
        last = either(lambda site, _: latent.build_attention(site, attends, before, values))
        found.append(Fusion(parts | {i: nothing, behind[0]: last}))
    return found


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
