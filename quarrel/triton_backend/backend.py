"""The Triton backend: what the machine offers, which implementations there are, and how a program becomes a step."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial

import torch
import triton
from triton.runtime import driver

from quarrel.errors import BackendUnavailable, OutOfMemory, RequestError
from quarrel.ops.collective import Group
from quarrel.ops.contract import Compute, Concrete, Op, WeightRef
from quarrel.ops.host import HostExperts
from quarrel.ops.program import Program
from quarrel.ops.registry import Choice, Registry, lower
from quarrel.ops.step import ComputeChoice, Limits, WeightSource
from quarrel.ops.weights import weights_of
from quarrel.triton_backend import run_op
from quarrel.triton_backend.ahead import Ahead
from quarrel.triton_backend.attention import cudnn, encoder, latent, paged, rope
from quarrel.triton_backend.collective import group
from quarrel.triton_backend.collective.one_shot import OneShot
from quarrel.triton_backend.elementwise import activation, embedding, norm, post_norm, streams
from quarrel.triton_backend.experts import experts, route
from quarrel.triton_backend.experts import matvec as expert_matvec
from quarrel.triton_backend.experts.host import is_hosted, on_host, pools_of
from quarrel.triton_backend.formats.weights import META, Blank, Weights, device_bytes
from quarrel.triton_backend.inputs import ADDED, InputBuffer, most_items
from quarrel.triton_backend.linear import heads, lora, matvec, ring
from quarrel.triton_backend.plan import Plan
from quarrel.triton_backend.recurrent import conv_scan2, delta, delta_step, mamba2_step, scan1
from quarrel.triton_backend.runtime.arrays import DTYPES
from quarrel.triton_backend.runtime.cache import allocate, allocate_state, cache_bytes
from quarrel.triton_backend.runtime.compile import launch_nothing
from quarrel.triton_backend.runtime.launch import INTERPRETED, Launcher, launch, report_compiling
from quarrel.triton_backend.sampling import adjust, logprobs, sample
from quarrel.triton_backend.step import TritonStep, masks_of

FAMILIES = (
    matvec, expert_matvec, latent, paged, heads, group, activation, embedding, encoder, experts, logprobs, lora, delta,
    delta_step, mamba2_step, norm, conv_scan2, rope, route, adjust, sample, scan1,
    streams,
)  # fmt: skip
REGISTRY = Registry(
    "triton",
    [i for family in FAMILIES for i in family.IMPLEMENTATIONS],
)
_LEAST_CAPABILITY = (8, 0)


def _make_driver() -> None:
    """Triton compiles a part of its driver in C on a machine that is new to it, while files are opened and read here."""
    if not INTERPRETED:
        with suppress(Exception):  # without a GPU, which is said where one is needed
            _ = driver.active.utils


class TritonBackend:
    """CUDA through Triton (`ops.step.Backend`); with TRITON_INTERPRET=1, the same kernels on CPU tensors, for tests."""

    name = "triton"
    step_tokens = 4096
    """Each step of more than about a hundred rows decodes all weights once."""
    peer_sums = OneShot

    def __init__(self, graphs: bool = True, ahead: bool = True) -> None:
        self._graphs = graphs
        self.ahead = ahead and hasattr(os, "fork")
        """Whether kernels are compiled by several processes, before they are launched."""
        report_compiling()
        self._driver = threading.Thread(target=_make_driver, name="driver", daemon=True)
        self._driver.start()
        self._group: Group | None = None
        self._host: HostExperts | None = None

    def unavailable(self) -> str | None:
        """Why this machine cannot run it, or None."""
        if INTERPRETED:
            # Looked up at each call: a test process that once loaded the kernels this way is no place to serve from.
            chosen = os.environ.get("TRITON_INTERPRET") == "1"
            return None if chosen else "its kernels were loaded for Triton's interpreter, which is for tests"
        if not torch.cuda.is_available():
            built = "this build of PyTorch has no CUDA" if torch.version.cuda is None else "PyTorch finds no CUDA device"
            return f"{built}: use an NVIDIA GPU with its driver, or the cpu backend"
        found = torch.cuda.get_device_capability()
        if found < _LEAST_CAPABILITY:
            capability = f"{torch.cuda.get_device_name()} has compute capability {found[0]}.{found[1]}"
            return f"{capability}, wanted 8.0 or above: use the cpu backend"
        return None

    def device(self) -> str:
        """The device in words."""
        if INTERPRETED:
            return f"Triton {triton.__version__}'s interpreter on the CPU"
        major, minor = torch.cuda.get_device_capability()
        return f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}, Triton {triton.__version__}"

    def free_bytes(self) -> int:
        """Memory that a cache may be planned into."""
        if INTERPRETED:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        free, _ = torch.cuda.mem_get_info()
        return free

    def compute_of(self, choice: ComputeChoice) -> Compute:
        """float16 on a GPU; the interpreter computes bfloat16 wrongly without a word, so it is refused there."""
        if choice == "bfloat16" and INTERPRETED:
            raise RequestError("bfloat16 is wrong in Triton's interpreter: ask for float16 or float32, or use a GPU")
        if choice == "fp8":
            if not INTERPRETED and torch.cuda.get_device_capability()[0] != 9:
                raise RequestError(f"products in FP8 need compute capability 9, got {self.device()}: ask for float16")
            return "float16"
        if choice == "auto":
            return "float32" if INTERPRETED else "float16"
        return choice

    def join(self, group: Group) -> None:
        """See `ops.collective.Joins`."""
        self._group = group

    def leave_to_host(self, experts: HostExperts | None) -> None:
        """See `ops.host.HostsExperts`."""
        self._host = experts

    def device_bytes(self, refs: Iterable[WeightRef], compute: Compute) -> int:
        """See `ops.host.HostsExperts`."""
        return device_bytes(refs, compute)

    def copies_bytes(self, program: Program, compute: ComputeChoice) -> int:
        """See `ops.step.CopiesWeights`."""
        arithmetic = self.compute_of(compute)
        return ring.copies_bytes(weights_of(program.nodes), arithmetic, self._generation())

    def compile(
        self,
        program: Program,
        weights: WeightSource,
        limits: Limits,
        compute: ComputeChoice = "auto",
        progress: Callable[[int, int], None] | None = None,
    ) -> TritonStep:
        """Chooses implementations, packs weights on the device, allocates caches and buffers."""
        self._need_device()
        self._driver.join()
        arithmetic = self.compute_of(compute)
        if limits.kv_cache == "bfloat16" and (arithmetic == "float16" or INTERPRETED):
            reason = "values of that range do not fit float16 arithmetic" if not INTERPRETED else "the interpreter is wrong"
            message = f"kv_cache='bfloat16' with compute='{arithmetic}': {reason}; use compute='bfloat16', or fp8"
            raise RequestError(message, "kv_cache", "compute")
        device = self._torch_device()
        kept = {v.id for v in program.outputs.values()}
        chosen = post_norm.fused(lower(program, REGISTRY), kept, arithmetic)
        choices = on_host(chosen, self._host, weights, limits, arithmetic, device)
        refs = weights_of(c.node for c in choices if not is_hosted(c))
        self._check_memory(
            device_bytes(refs, arithmetic)
            + sum(pool.nbytes for pool in pools_of(choices))
            + ring.copies_bytes(refs, arithmetic, self._generation()),
            cache_bytes(program.caches, limits.n_blocks, limits.block_size, limits.kv_cache, DTYPES[arithmetic]),
        )
        make = partial(self._plan, program, choices, limits, arithmetic, compute == "fp8")
        ahead = None
        if self.ahead and device.type == "cuda" and self._group is None and not any(map(is_hosted, choices)):
            twin, _ = make(Blank(arithmetic), META, launch_nothing)
            ahead = Ahead(twin, masks_of(choices, program.outputs))
            ahead.begin(limits)
        try:
            packed = Weights(weights, device, arithmetic, refs, progress)
            plan, inputs = make(packed, device, launch)
            packed.finish()
        except torch.cuda.OutOfMemoryError as error:
            raise OutOfMemory(
                f"{self.device()} ran out of memory while the model was loaded: give it a smaller context or batch"
            ) from error
        return TritonStep(plan, inputs, program.outputs, limits, self._graphs, ahead)

    def _plan(
        self,
        program: Program,
        choices: Sequence[Choice],
        limits: Limits,
        arithmetic: Compute,
        float8: bool,
        weights: Weights | Blank,
        device: torch.device,
        launcher: Launcher,
    ) -> tuple[Plan, InputBuffer]:
        """The program bound to a device, with its buffers."""
        dtype, kept = DTYPES[arithmetic], {v.id for v in program.outputs.values()}
        size, kv = limits.block_size, limits.kv_cache
        caches = [allocate(c, limits.n_blocks, size, dtype, device, kv) for c in program.caches]
        states = [allocate_state(s, limits.states, device) for s in program.states]
        inputs = InputBuffer(limits, device, program.inputs)
        slots = {value.id: inputs.slot(name) for name, value in program.inputs.items()}
        if "tokens" in program.outputs:
            slots[program.outputs["tokens"].id] = inputs.last
        rows = {
            "T": limits.max_tokens,
            "S": limits.max_seqs + ADDED,
            "R": min(limits.max_seqs, limits.max_tokens),
            "items": most_items(limits),
        }
        plan = Plan(
            choices, slots, kept, rows, weights, caches, states, inputs.tables, arithmetic, device, launcher,
            deterministic=limits.deterministic, generation=self._generation(), float8=float8, group=self._group,
            decoded_bytes=limits.decoded_bytes,
            cudnn_from=0 if limits.deterministic else self._cudnn_from(choices, limits),
        )  # fmt: skip
        return plan, inputs

    def _cudnn_from(self, choices: Sequence[Choice], limits: Limits) -> int:
        captured = self._graphs and self._group is None
        return cudnn.tokens_from(limits.attention, [c.node for c in choices], captured)

    def run_op(
        self, op: Op, spec: object, inputs: Sequence[Concrete], compute: ComputeChoice = "auto"
    ) -> tuple[Concrete, ...]:
        """One op on concrete host arrays; caches are consumed and returned."""
        self._need_device()
        return run_op.run_op(REGISTRY, self._torch_device(), op, spec, inputs, self.compute_of(compute))

    def _generation(self) -> int:
        """Major compute capability; 0 in the interpreter."""
        return 0 if INTERPRETED else torch.cuda.get_device_capability()[0]

    def _torch_device(self) -> torch.device:
        return torch.device("cpu") if INTERPRETED else torch.device("cuda", torch.cuda.current_device())

    def _need_device(self) -> None:
        reason = self.unavailable()
        if reason is not None:
            raise BackendUnavailable(f"the triton backend cannot run here: {reason}")

    def _check_memory(self, weights: int, cache: int) -> None:
        free = self.free_bytes()
        if weights + cache > free:
            sizes = ", ".join(f"{what} {n / 2**30:.2f} GiB" for what, n in (("weights", weights), ("cache", cache)))
            raise OutOfMemory(
                f"{sizes} do not fit the {free / 2**30:.2f} GiB free on {self.device()}: use a smaller context or model"
            )


def create(graphs: bool = True) -> TritonBackend:
    """The backend; `graphs` captures decode steps as CUDA graphs."""
    return TritonBackend(graphs)
