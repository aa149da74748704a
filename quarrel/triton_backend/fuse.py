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
from dataclasses import replace

from quarrel.ops.activation import CAP, GATED, PLAIN
from quarrel.ops.attention import ATTENTION, ROPE_APPEND
from quarrel.ops.contract import Compute, Value
from quarrel.ops.heads import HEAD_LINEAR
from quarrel.ops.linear import ADD, LINEAR, LINEAR_ADD
from quarrel.ops.moe import ROUTE
from quarrel.ops.norm import NORM
from quarrel.ops.program import Node
from quarrel.ops.rope import ROPE
from quarrel.ops.state import CONV
from quarrel.triton_backend.attention import latent, rope
from quarrel.triton_backend.elementwise import head_norms
from quarrel.triton_backend.elementwise.activation import build_rounded
from quarrel.triton_backend.elementwise.head_norms import HeadNorms
from quarrel.triton_backend.elementwise.norm_add import NormAdd
from quarrel.triton_backend.experts import fusions as experts
from quarrel.triton_backend.formats import int8x2
from quarrel.triton_backend.fusion import Build, Fusion, nothing
from quarrel.triton_backend.linear import matvec, own_row
from quarrel.triton_backend.linear.maps import UNLIMITED
from quarrel.triton_backend.recurrent.short_conv import ShortConv


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
            found.append(experts.router(nodes, i, source(i, 0), maker, readers, kept))
        elif node.op is GATED or node.op is PLAIN:
            makers = [source(i, place) for place in range(len(node.inputs))]
            found += [experts.shared(nodes, i, makers), experts.shared_rows(nodes, i, makers), _rounded(nodes, i, makers)]
        elif node.op is ROPE:
            found.append(_rotated(nodes, i, source(i, 0)))
        elif node.op is CONV:
            found.append(_short_conv(nodes, i, source))
        elif node.op is ATTENTION:
            found += _latent(nodes, i, source, readers, kept)
        elif node.op is ADD:
            found += [experts.with_shared(nodes, i, found, source, maker), experts.stream(nodes, i, source)]
            found += _normed(nodes, i, source, readers, kept, compute)
    fusions = [f for f in found if f is not None]
    fusions += _head_norms(nodes, {i for f in fusions for i in f.parts}, int8x2.readers(nodes, compute)[0])
    taken = {i for f in fusions for i in f.parts}
    gates = (_own_gate(nodes, i, source(i, 0), compute) for i, node in enumerate(nodes) if node.op is LINEAR)
    fusions += [f for f in gates if f is not None and not taken & f.parts.keys()]
    chosen = (experts.chosen(nodes, i, fusions, source, readers, kept) for i, n in enumerate(nodes) if n.op is ROUTE)
    fusions += [f for f in chosen if f is not None]
    if joins:
        added = (i for i, node in enumerate(nodes) if node.op is LINEAR_ADD)
        together = [experts.joined(nodes, i, fusions, source, maker, readers, kept) for i in added]
        fusions += [f for f in together if f is not None]
    return fusions


def _rounded(nodes: Sequence[Node], i: int, makers: Sequence[int | None]) -> Fusion | None:
    """The gate of an attention's result, which leaves one row as the map behind it reads it."""
    spec, made = nodes[i].spec, makers[-1]
    if nodes[i].op is not GATED or made is None or nodes[made].op is not ATTENTION or spec.per_row or spec.n % 32:
        return None
    return Fusion({i: lambda site, many: build_rounded(site, nodes[i], many)})


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

    left_out = either(lambda site, _: nothing)
    alone = either(lambda site, _: latent.build_attention(site, attends, before))
    parts: dict[int, Build | None] = dict.fromkeys((append,) if norm is None else (norm, append), left_out)
    found = [Fusion(parts | {i: alone}, UNLIMITED, decodes=True)]
    (y,) = attends.outputs
    behind = [at for at in readers.get(y.id, ()) if y.id not in kept]
    if len(behind) == 1 and nodes[behind[0]].op is HEAD_LINEAR and nodes[behind[0]].spec.rest == 0:
        values = nodes[behind[0]]
        last = either(lambda site, _: latent.build_attention(site, attends, before, values))
        found.append(Fusion(parts | {i: left_out, behind[0]: last}))
    return found
