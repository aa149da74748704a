"""Which layers' experts stay in host memory: none where the device has room, else as few as make the rest fit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from quarrel.errors import OutOfMemory, RequestError
from quarrel.gguf import FORMATS
from quarrel.llm.plan import Plan, gib
from quarrel.ops.contract import WeightRef
from quarrel.ops.host import ComputesParts, HostExperts, HostsExperts, expert_refs
from quarrel.ops.program import Program
from quarrel.ops.step import Backend

USEFUL = 2048
"""Tokens: for a context shorter than this, or than the model's own, experts leave the device."""

Make = Callable[[int], Plan]
"""A plan for so many bytes of weights on the device; raises OutOfMemory."""


def placed(
    program: Program,
    make: Make,
    *,
    weights: int,
    wanted: int,
    backend: Backend | None,
    asked: int | None,
    host: Callable[[], ComputesParts],
) -> tuple[Plan, HostExperts | None]:
    """The plan, and whose experts the host computes: of the first `asked` layers, or as few as needed if that is None.

    `wanted` is the context that is hoped for; `backend` is None where experts cannot leave the device. Raises RequestError
    for a number of layers that there are not, OutOfMemory with what would fit.
    """
    layers = {path: sum(map(_bytes, refs)) for path, refs in expert_refs(program).items()}
    able = isinstance(backend, HostsExperts)
    _check(asked, len(layers), able)
    sizes = [0]
    for size in layers.values():
        sizes.append(sizes[-1] + size)

    def fits(count: int) -> bool:
        return _length(make, weights - sizes[count]) >= min(wanted, USEFUL)

    def fitting(least: int) -> int | None:
        """The fewest layers without which the rest fits."""
        low, high = least, len(layers)
        if not able or not fits(high):
            return None
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle + 1, high)
        return low

    if asked is None and layers and able and not fits(0):
        count = fitting(0) or 0
    else:
        count = asked or 0
    try:
        plan = make(weights - sizes[count])
    except OutOfMemory as error:
        more = fitting(count)
        if more is None:
            raise
        raise OutOfMemory(
            f"{error}; with the experts of {more} layers in host memory ({gib(sizes[more])}) the rest would fit:"
            f" use experts_on_cpu={more}"
        ) from None
    if count == 0:
        return plan, None
    computing = host()
    if sizes[count] > computing.free_bytes():
        raise OutOfMemory(
            f"the experts of {count} layers need {gib(sizes[count])} of host memory, and {gib(computing.free_bytes())} are"
            " free there: use a smaller model, or leave fewer layers to the host"
        )
    paths = frozenset(list(layers)[:count])
    largest = max(list(layers.values())[:count])
    streams = plan.spare >= largest
    plan = replace(plan, host=sizes[count], host_layers=count, scratch=plan.scratch + largest * streams)
    return plan, HostExperts(computing, paths, streams)


@contextmanager
def left_to_host(backend: Backend, host: HostExperts | None) -> Iterator[None]:
    """What the backend compiles meanwhile leaves these experts to the host."""
    if host is None or not isinstance(backend, HostsExperts):
        yield
        return
    backend.leave_to_host(host)
    try:
        yield
    finally:
        backend.leave_to_host(None)


def _length(make: Make, weights: int) -> int:
    """The context that this leaves, 0 for none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return make(weights).n_ctx
        except OutOfMemory:
            return 0


def _check(asked: int | None, layers: int, able: bool) -> None:
    if asked is not None and (isinstance(asked, bool) or not isinstance(asked, int) or asked < 0):
        raise RequestError(f"experts_on_cpu is {asked!r}, wanted a whole number of layers")
    if not asked:
        return
    if not layers:
        raise RequestError(f"experts_on_cpu is {asked}, and this model has no experts: leave it out")
    if not able:
        raise RequestError(
            f"experts_on_cpu is {asked}, and experts can leave the memory of one GPU only: use the triton backend for it,"
            " without tensor_parallel and QUARREL_CHECK"
        )
    if asked > layers:
        raise RequestError(f"experts_on_cpu is {asked}, wanted 0 to {layers}, the layers with experts")


def _bytes(ref: WeightRef) -> int:
    block = FORMATS[ref.type]
    return ref.rows * (ref.k // block.elements) * block.nbytes
