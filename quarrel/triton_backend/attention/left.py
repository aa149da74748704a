"""What stands before an attention and is left to it: the rotation and the append of a new token, and the norms before them.

In every step without prompts an attention does the work of its ROPE_APPEND. In a step of one sequence it also norms query,
key and value, and rotates a query whose keys are another layer's; in other steps those nodes have launches of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quarrel.ops.attention import ATTENTION, ROPE_APPEND, AttentionSpec
from quarrel.ops.contract import Compute, Value
from quarrel.ops.norm import NORM, NormSpec
from quarrel.ops.program import Node
from quarrel.ops.rope import ROPE, RopeSpec
from quarrel.triton_backend.runtime.arrays import DTYPES, Cache
from quarrel.triton_backend.runtime.launch import power_of_two
from quarrel.triton_backend.runtime.site import Batch, Launch, Site


@dataclass(frozen=True)
class Left:
    """Places among the nodes: of an ATTENTION and of what it does beside its own work."""

    attention: int
    rope: int
    """A ROPE_APPEND, or a ROPE of queries alone."""
    norms: tuple[int, ...] = ()
    """NORMs of query, key and value, or of the first of them."""
    appends: bool = True

    @property
    def nodes(self) -> tuple[int, ...]:
        return (*self.norms, self.rope)

    @property
    def of_one(self) -> tuple[int, ...]:
        """Those with a launch of their own in steps that are not `of_one`."""
        return self.norms if self.appends else self.nodes


def of_one(batch: Batch) -> bool:
    """Whether a step is of one sequence with one new token, which `attend_head` or `attend_one` takes."""
    return batch.T == batch.S == 1 and not batch.deep


def left_to_attention(nodes: Sequence[Node], kept: set[int], compute: Compute) -> list[Left]:
    """What is left to attentions: ROPE_APPENDs whose queries one of them over the same cache reads and nobody else, ROPEs
    of such queries, and the norms before both. A cache may serve several layers, each with a block table of its own.

    Heads are of a power of two, whole and of one axis, but for those of more than 128 values, of which `attend_one` and
    `attend_head` take any. In float32 norms, and rotations without an append, keep their launches, as nothing is fused.
    """
    found = []
    maker = {v.id: i for i, node in enumerate(nodes) for v in node.outputs}
    readers: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        for id in {v.id for v in node.inputs if isinstance(v, Value)}:
            readers.setdefault(id, []).append(i)
    for i, node in enumerate(nodes):
        if node.op not in (ROPE_APPEND, ROPE) or node.outputs[0].id in kept:
            continue
        by = readers.get(node.outputs[0].id, [])
        if len(by) != 1 or nodes[by[0]].op is not ATTENTION or nodes[by[0]].inputs[0] is not node.outputs[0]:
            continue
        appends, attends = node.op is ROPE_APPEND, nodes[by[0]]
        fits = _appends_for(node, attends, nodes) if appends else compute != "float32" and _turns(node.spec, attends.spec)
        if fits:
            norms = () if compute == "float32" else _norms(nodes, i, attends.spec, maker, readers, kept)
            found.append(Left(by[0], i, norms, appends))
    return found


def _appends_for(node: Node, attends: Node, nodes: Sequence[Node]) -> bool:
    """Whether this ROPE_APPEND's keys are for that attention alone, which can do its work."""
    q, k = node.spec.q, node.spec.k
    table, cache = attends.inputs[3:5]
    over = [n for n in nodes if n.op is ATTENTION and n.inputs[3] is table and n.inputs[4] == node.inputs[6]]
    return q.n_rot == k.n_rot and _can_rotate(q) and cache == node.inputs[6] and len(over) == 1


def _turns(spec: RopeSpec, attends: AttentionSpec) -> bool:
    """Whether an attention can do this rotation of its queries."""
    return _can_rotate(spec) and (spec.n_heads, spec.head_dim) == (attends.n_heads, attends.head_dim)


def _can_rotate(spec: RopeSpec) -> bool:
    whole = spec.n_rot == spec.head_dim and spec.axes == 1
    return spec.head_dim == power_of_two(spec.head_dim) >= 16 and (whole or spec.head_dim > 128)


def _turned(node: Node) -> tuple[Value, ...]:
    """Query, key and value of a ROPE_APPEND, or the query of a ROPE."""
    return node.inputs[: 3 if node.op is ROPE_APPEND else 1]  # type: ignore[return-value]


def _norms(
    nodes: Sequence[Node],
    i: int,
    attends: AttentionSpec,
    maker: Mapping[int, int],
    readers: Mapping[int, Sequence[int]],
    kept: set[int],
) -> tuple[int, ...]:
    """The NORMs of the heads of query, key and value that node i alone reads, up to the first that has none."""
    found: list[int] = []
    for value, heads in zip(_turned(nodes[i]), (attends.n_heads, attends.n_kv, attends.n_kv)):
        at = maker.get(value.id)
        if at is None or value.id in kept or readers[value.id] != [i] or nodes[at].op is not NORM:
            break
        eps = nodes[found[0]].spec.eps if found else nodes[at].spec.eps
        if nodes[at].spec != NormSpec("rms", attends.head_dim, eps, heads):
            break
        found.append(at)
    return tuple(found)


def joined(site: Site, value: Value, cache: Cache) -> Node | None:
    """The node that makes these queries, if it leaves its work to the attention behind it: a ROPE_APPEND in steps without
    prompts, a ROPE in those that are `of_one`."""
    narrow = site.compute != "float32" or cache.k.shape[3] <= 128
    return site.left_of(value) if narrow and cache.k.dtype == DTYPES[site.compute] else None


def unless_of_one(site: Site, attends: Node, alone: Launch) -> Launch:
    """The launch of a node that this attention stands for in steps that are `of_one`."""
    q, cache = attends.inputs[0], attends.inputs[4]
    if joined(site, q, site.cache(cache)) is None:  # type: ignore[arg-type]
        return alone
    return lambda batch: None if of_one(batch) else alone(batch)


def norms_of(site: Site, node: Node) -> list[Node]:
    """The NORMs before a node that is `joined`: of its query, key and value, or of the first of them."""
    return [norm for norm in map(site.left_of, _turned(node)) if norm is not None]
