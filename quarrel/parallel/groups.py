"""The groups that the members of a model form, and the device of each."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quarrel.errors import QuarrelError
from quarrel.models.stages import place_of
from quarrel.ops.collective import Joins
from quarrel.ops.step import Backend
from quarrel.parallel.meeting import Meeting

if TYPE_CHECKING:
    from quarrel.parallel.group import TorchGroup


@dataclass
class Groups:
    """What a member is part of. sums: the ranks that cut the same layers. chain: one rank of each stage, where the last
    stage's is the first: the stream goes from one to the next, from GPU to GPU of one host, else through hosts' memory."""

    sums: TorchGroup | None = None
    chain: TorchGroup | None = None

    @property
    def how(self) -> str:
        """What adds, in words."""
        return "nothing" if self.sums is None else self.sums.how

    def abort(self) -> None:
        """See `TorchGroup.abort`."""
        for group in filter(None, (self.sums, self.chain)):
            group.abort()

    def close(self) -> None:
        for group in filter(None, (self.sums, self.chain)):
            group.close()


def join(meeting: Meeting, rank: int, ranks: int, stages: int, backend: Backend, device: Any, peer_sums: bool) -> Groups:
    """The groups of a rank, once all ranks are there; `backend` then compiles for its sums."""
    from quarrel.parallel.group import TorchGroup

    stage, member = place_of(rank, ranks, stages)
    width, groups = ranks // stages, Groups()
    if width > 1:
        assert isinstance(backend, Joins)
        own = backend.peer_sums if peer_sums else None
        groups.sums = TorchGroup(meeting, f"stage-{stage}", member, width, device, own)
        backend.join(groups.sums)
    if stages > 1:
        here = device if meeting.one_host else device_of("cpu", 0)
        groups.chain = TorchGroup(meeting, f"chain-{member}", rank // width, stages, here, sums=False)
        groups.chain.connect_chain()
    return groups


def device_of(backend: str, index: int) -> Any:
    """The torch device of this number, made the current one."""
    import torch

    if backend != "triton" or os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available():
        return torch.device("cpu")
    found = torch.cuda.device_count()
    if index >= found:
        raise QuarrelError(f"this machine has {found} GPUs: use a smaller tensor_parallel", "tensor_parallel")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
