"""A model on several devices, as loading sees it: what the largest share needs, and who runs the steps."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quarrel.errors import BackendUnavailable, installing
from quarrel.gguf import FORMATS, GGUFFile
from quarrel.llm.memory import cache_bytes_per_token
from quarrel.models import ModelSpec, Tensors, assemble
from quarrel.models.shard import shard
from quarrel.ops.collective import Joins
from quarrel.ops.contract import WeightRef
from quarrel.ops.program import Program
from quarrel.ops.step import Backend, ComputeChoice, Limits, Step
from quarrel.ops.windows import with_window_groups

if TYPE_CHECKING:
    from quarrel.parallel import Team


class Parallel:
    """The devices of one model. Close it if nothing was compiled."""

    def __init__(
        self,
        paths: Sequence[Path],
        backend: Backend,
        compute: ComputeChoice,
        ranks: int,
        threads: int | None,
        stages: int = 1,
        hosts: str | None = None,
    ) -> None:
        option = "pipeline_parallel" if stages > 1 else "tensor_parallel"
        if not isinstance(backend, Joins):
            raise BackendUnavailable(f"the {backend.name} backend runs on one device: leave {option} out", option)
        if importlib.util.find_spec("torch") is None:
            raise BackendUnavailable(f"{option} needs PyTorch: {installing('cuda')}, or leave it out", option)
        # Only here: one device needs no torch.distributed.
        from quarrel.parallel import Team, Work, compile_shared

        self.ranks, self._backend = ranks, backend
        self._work = Work(tuple(paths), backend.name, compute, ranks, stages=stages, hosts=hosts, threads=threads)
        self._make, self._compile = Team, compile_shared
        # The other processes import what they need while this one plans.
        self._team: Team | None = Team(self._work)

    def free_bytes(self) -> int:
        """Memory that every device has; processes on a machine's CPU share theirs."""
        assert self._team is not None
        free = min(self._backend.free_bytes(), self._team.free_bytes())
        each = self.ranks if self._work.hosts is None else self.ranks // self._work.stages
        return free if self._backend.name == "triton" else free // each

    def largest_share(self, spec: ModelSpec, tensors: Tensors, window_groups: int) -> tuple[Program, int]:
        """The program whose cache is the largest, and bytes of the largest share of the weights. window_groups: of the
        whole model, where its layers with a window are to have blocks of their own."""
        stages = self._work.stages
        programs = [assemble(*shard(spec, tensors, rank, self.ranks, stages=stages)) for rank in range(self.ranks)]
        # Every member gets the same block tables; with whole layers each, their groups may be others.
        grouped = [with_window_groups(program, window_groups) for program in programs]
        if all(program.window_groups == window_groups for program in grouped):
            programs = grouped
        return max(programs, key=lambda p: cache_bytes_per_token(p, "float32")), max(map(weight_bytes, programs))

    def compile(
        self, whole: ModelSpec, file: GGUFFile, limits: Limits, n_ctx: int, progress: Callable[[int, int], None] | None
    ) -> Step:
        """The step of all devices; with new processes after one was lost."""
        team, self._team = self._team or self._make(self._work), None
        return self._compile(team, self._backend, whole, file, limits, n_ctx, progress)

    def close(self) -> None:
        """Ends processes that wait for a model."""
        if self._team is not None:
            self._team.close()


def weight_bytes(program: Program) -> int:
    """Bytes of its weights in the file."""
    refs = {ref for node in program.nodes for ref in node.inputs if isinstance(ref, WeightRef)}
    return sum(r.rows * r.k // FORMATS[r.type].elements * FORMATS[r.type].nbytes for r in refs)
