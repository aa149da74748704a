"""Compiles every Triton kernel of Quarrel for GPUs that need not be here, and reports registers, spills and shared memory.

The launches are recorded from the real launchers, built over tensors without storage, so the list cannot drift from what a
step runs. A kernel fails the gate if it outgrows its registers or asks for more shared memory than the target has.

    python tools/triton_aot.py                         # every kernel, every target; prints a table, then one JSON line
    python tools/triton_aot.py --targets sm_90 --formats Q4_K,Q6_K --computes float16

A refactoring that must not change any kernel is checked by the hashes of their PTX, which need no assembler:

    python tools/triton_aot.py --targets sm_90 --ptx before.json        # {variant: sha256 of its PTX}
    python tools/triton_aot.py --targets sm_90 --ptx after.json --against before.json
    python tools/triton_aot.py --compare before.json after.json         # the same comparison, compiling nothing

The names of kernels, of their files and line numbers do not enter the hash, so a kernel may be renamed or moved.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as LaidOut
from triton.tools.tensor_descriptor import TensorDescriptor

from quarrel.gguf import GGMLType
from quarrel.ops.activation import CAP, GATED, PLAIN, CapSpec, GatedSpec, PlainSpec, cap, gated, plain
from quarrel.ops.adjust import ADJUST, AdjustSpec
from quarrel.ops.attention import ATTENTION, KV_APPEND, ROPE_APPEND, AttentionSpec, KVAppendSpec, RopeAppendSpec
from quarrel.ops.contract import CacheRef, Compute, ConstRef, Op, Operand, Param, StateRef, Value, WeightRef
from quarrel.ops.delta import DELTA, DELTA_MIX, DeltaMixSpec, DeltaSpec
from quarrel.ops.embedding import EMBEDDING, GATHER_ROWS, EmbeddingSpec, GatherRowsSpec, embedding, gather_rows
from quarrel.ops.encode import ADD_ROW, ENCODE, MEAN_ROWS, AddRowSpec, EncodeSpec, MeanRowsSpec
from quarrel.ops.formats import WEIGHT_TYPES
from quarrel.ops.heads import HEAD_LINEAR, HeadLinearSpec
from quarrel.ops.kv import KV_TYPES, KVType
from quarrel.ops.linear import (
    ADD,
    LINEAR,
    LINEAR_ADD,
    NORM_GATE_UP,
    NORM_LINEAR,
    AddSpec,
    LinearAddSpec,
    LinearSpec,
    NormGateUpSpec,
    NormLinearSpec,
    add,
    linear,
    linear_add,
    norm_gate_up,
    norm_linear,
)
from quarrel.ops.logprobs import LOGPROBS, MOST_LOGPROBS, LogprobsSpec
from quarrel.ops.lora import CHOSEN_LINEAR, ChosenLinearSpec
from quarrel.ops.mixer import MAMBA2_MIX, SCAN1_GATE, Mamba2MixSpec
from quarrel.ops.moe import (
    EXPERT_DOWN,
    EXPERT_UP,
    ROUTE,
    ExpertDownSpec,
    ExpertUpSpec,
    RouteSpec,
    expert_down,
    expert_up,
    route,
)
from quarrel.ops.norm import NORM, NormSpec, norm
from quarrel.ops.null import Builder
from quarrel.ops.program import KVLayer, Node, Program, StateLayer
from quarrel.ops.registry import lower
from quarrel.ops.rope import ROPE, RopeSpec, rope, rotated_by
from quarrel.ops.sample import SAMPLE, SampleSpec
from quarrel.ops.state import CONV, GATED_NORM, SCAN1, SCAN2, ConvSpec, GatedNormSpec, Scan1Spec, Scan2Spec, conv
from quarrel.triton_backend.backend import REGISTRY
from quarrel.triton_backend.elementwise import post_norm
from quarrel.triton_backend.formats.table import INTEGERS, NATIVE
from quarrel.triton_backend.formats.weights import META, Blank
from quarrel.triton_backend.plan import Plan
from quarrel.triton_backend.runtime.arrays import DTYPES, Slot
from quarrel.triton_backend.runtime.cache import allocate, allocate_state
from quarrel.triton_backend.runtime.launch import INTERPRETED, Grid, options
from quarrel.triton_backend.runtime.site import Batch, Tables

# The most shared memory that one program may ask for, in bytes.
TARGETS = {"sm_80": (80, 163 << 10), "sm_90": (90, 227 << 10), "sm_120": (120, 99 << 10)}
SLACK = 16
"""Bytes of stack that are no fault: ptxas 13 spills 8 or 16 of its own accord to reach a rounder number of registers, one
kernel here and another there by version and target. A kernel that outgrows its registers takes 40 to 500."""
TOKENS = (1, 8, 16, 32, 64, 128, 512, 1024)
MANY = tuple(Batch(n, n, n, True, False, items) for n, items in ((1, 64), (8, 8), (64, 64), (64, 1024), (128, 128)))
"""Steps of many keys or many sequences, one token each."""
LONGER = Batch(1, 1, 1, True, False, 16)
"""One sequence of 5 to 16 splits."""
DEEP = Batch(1, 1, 1, True, False, 64, deep=True)
WHOLE = Batch(512, 1, 1, False, True, 1, ((0, 0, 512),))
"""A prompt that cuDNN would take."""
MEASURED = {"attend_latent_many": 960, "attend_latent_one": 136, "attend_fixed_many": 96, "up_with_shared": 40}
"""Bytes of stack of kernels that spill and were measured to be faster so (`attention/latent.py: tiles`, `shared.py`), or
that spill outside of loops alone: where the result of `attend_fixed_many` goes. `attend_latent_one` had 112 when it was
measured."""


Place = tuple[int, ...]
"""Where a value stands among the arguments: its place, and within a record the places of its part."""


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel, as a step would compile it."""

    kernel: str
    module: str
    compute: str
    signature: tuple[tuple[str, Any], ...]
    constants: tuple[tuple[Place, Any], ...]
    attrs: tuple[Place, ...]
    options: tuple[tuple[str, Any], ...]

    def label(self) -> str:
        named = ((self.signature[path[0]][0], v) for path, v in self.constants if len(path) == 1)
        parts = (v._asdict().items() if hasattr(v, "_asdict") else ((k, v),) for k, v in named if k.isupper())
        shown = {k: v for part in parts for k, v in part if v not in (False, None, "") and k != "COMPUTE"}
        return " ".join(f"{k}={v if v is not True else 'yes'}" for k, v in shown.items())


@dataclass(frozen=True)
class Report:
    """What the assembler said."""

    kernel: str
    compute: str
    label: str
    target: str
    registers: int
    stack: int
    spills: int
    shared: int
    wide_loads: int
    matrix_ops: int
    seconds: float

    def fault(self) -> str | None:
        limit = TARGETS[self.target][1]
        if self.stack > MEASURED.get(self.kernel, SLACK):
            return f"spills: {self.stack} bytes of stack, {self.spills} local loads and stores"
        return f"{self.shared} bytes of shared memory, {limit} allowed" if self.shared > limit else None


# Query heads, key heads, head_dim, rotation and rotated values of real models; a quick run takes the first three.
HEADS = (
    (32, 8, 128, "norm", 128),
    (32, 32, 80, "neox", 32),
    (8, 4, 256, "neox", 256),
    (32, 32, 96, "neox", 96),
    (9, 3, 64, "norm", 64),
    (28, 4, 128, "neox", 128),
)


def specs(formats: Sequence[GGMLType], quick: bool) -> Iterator[tuple[Op, Any]]:
    """What real models ask for: their widths, head shapes and options."""
    for type in formats:
        yield LINEAR, LinearSpec(type, 4096, 4096)
        yield EMBEDDING, EmbeddingSpec(type, 32000, 4096)
        norm, same = NormSpec("rms", 4096, 1e-5), LinearSpec(type, 14336, 4096)
        yield NORM_GATE_UP, NormGateUpSpec(norm, same, same, "silu")
        small = LinearSpec(type, 5632, 2048)
        yield NORM_GATE_UP, NormGateUpSpec(NormSpec("rms", 2048, 1e-5), small, small, "silu")
        maps = tuple(LinearSpec(t, n, 4096) for t, n in ((type, 4096), (type, 1024), (GGMLType.Q6_K, 1025)))
        yield NORM_LINEAR, NormLinearSpec(norm, maps)
        yield NORM_LINEAR, NormLinearSpec(norm, tuple(LinearSpec(type, n, 4096) for n in (4096, 1024, 1024)))
        delta = tuple(LinearSpec(t, n, 4096) for t, n in ((GGMLType.Q6_K, 8192), (type, 32), (type, 32), (type, 4096)))
        yield NORM_LINEAR, NormLinearSpec(norm, delta)
        # A map that normalises its row itself (GLM-4.7-Flash).
        yield NORM_LINEAR, NormLinearSpec(NormSpec("rms", 768, 1e-5), (LinearSpec(type, 5120, 768),))
        yield EXPERT_UP, ExpertUpSpec(type, 32, 4, 2880, 2880 if type == GGMLType.MXFP4 else 2048, "silu")
        yield EXPERT_DOWN, ExpertDownSpec(type, 32, 4, 2048, 2048)
    yield LINEAR, LinearSpec(formats[0], 576, 576, bias=True, out="f32")
    yield EXPERT_UP, ExpertUpSpec(formats[0], 32, 4, 2880, 2880, "oai", bias=True)
    yield EXPERT_UP, ExpertUpSpec(formats[0], 128, 6, 1856, 2688, "relu2", gated=False)
    yield ROUTE, RouteSpec(32, 4, "softmax_topk")
    yield ROUTE, RouteSpec(128, 8, "softmax")
    yield ROUTE, RouteSpec(128, 6, "sigmoid", scale=2.5, bias=True, n_groups=8, groups_used=4)
    yield CONV, ConvSpec(6144, 4)
    yield SCAN2, Scan2Spec(64, 64, 8, 128)
    yield MAMBA2_MIX, Mamba2MixSpec(Scan2Spec(48, 64, 1, 128), 4, 1e-5)
    yield MAMBA2_MIX, Mamba2MixSpec(Scan2Spec(64, 64, 8, 128), 4, 1e-5)
    yield DELTA, DeltaSpec(16, 32, 128, 128, 1e-6)
    yield DELTA_MIX, DeltaMixSpec(DeltaSpec(16, 32, 128, 128, 1e-6), 4, 1e-6)
    yield DELTA_MIX, DeltaMixSpec(DeltaSpec(16, 48, 128, 128, 1e-6, grouped=True), 4, 1e-6)
    yield SCAN1, Scan1Spec(5120, 16)
    yield SCAN1_GATE, Scan1Spec(5120, 16)
    yield GATED_NORM, GatedNormSpec(8, 512, 1e-5)
    yield CHOSEN_LINEAR, ChosenLinearSpec(GGMLType.F32, 3, 16, 4096)
    yield CHOSEN_LINEAR, ChosenLinearSpec(GGMLType.F32, 3, 4096, 16, base=True, out="act")
    yield PLAIN, PlainSpec("relu2", 9216)
    yield PLAIN, PlainSpec("gelu_erf", 1536)
    yield ADD_ROW, AddRowSpec(384)
    yield MEAN_ROWS, MeanRowsSpec(768)
    yield ENCODE, EncodeSpec(12, 32, 0.18)
    yield ENCODE, EncodeSpec(12, 64, 0.125)
    yield LINEAR_ADD, LinearAddSpec(LinearSpec(formats[0], 4096, 14336))
    yield ADD, AddSpec(4096)
    yield GATED, GatedSpec("silu", 14336)
    yield GATED, GatedSpec("gelu_tanh", 9216)
    yield GATED, GatedSpec("sigmoid", 512, per_row=True)
    yield CAP, CapSpec(256000, 1.0, 30.0)
    yield GATHER_ROWS, GatherRowsSpec(4096)
    yield NORM, NormSpec("rms", 4096, 1e-5)
    yield NORM, NormSpec("rms", 128, 1e-6, groups=32)
    yield NORM, NormSpec("layer", 768, 1e-12)
    yield ADJUST, AdjustSpec(128256)
    yield SAMPLE, SampleSpec(128256)
    yield LOGPROBS, LogprobsSpec(128256, MOST_LOGPROBS)
    for heads, n_kv, dim, style, rot in HEADS[:3] if quick else HEADS:
        rope = [RopeSpec(style, n, dim, rot) for n in (heads, n_kv)]  # type: ignore[arg-type]
        yield ROPE_APPEND, RopeAppendSpec(*rope)
        yield ROPE, rope[0]
        yield KV_APPEND, KVAppendSpec(n_kv, dim)
        yield ATTENTION, AttentionSpec(heads, n_kv, dim, dim**-0.5)
    yield ATTENTION, AttentionSpec(64, 8, 64, 0.125, window=128, sinks=True)
    for heads in (16, 20, 128):  # DeepSeek-V2-Lite, GLM-4.7-Flash, DeepSeek V3
        yield ATTENTION, AttentionSpec(heads, 1, 64, 0.07, latent=512)
        yield ROPE_APPEND, RopeAppendSpec(RopeSpec("norm", heads, 576, 64), RopeSpec("norm", 1, 64, 64), 512)
        yield HEAD_LINEAR, HeadLinearSpec(GGMLType.Q8_0, heads, 512, 192, 64)
        yield HEAD_LINEAR, HeadLinearSpec(formats[0], heads, 256, 512)
    yield ROPE_APPEND, RopeAppendSpec(*(RopeSpec("neox", n, 256, 64, axes=3) for n in (16, 2)))  # Qwen 3.5
    yield ATTENTION, AttentionSpec(16, 2, 512, 1.0)  # Gemma 4
    yield GATED, GatedSpec("gelu_tanh", 256, width=10752, start=512)
    yield ENCODE, EncodeSpec(3, 256, 0.0625, 1, 256)  # EmbeddingGemma
    yield ROUTE, RouteSpec(128, 8, "softmax", gains=True)
    if not quick:
        yield ATTENTION, AttentionSpec(16, 8, 256, 0.0625, window=4096, cap=50.0)


@dataclass(frozen=True)
class Mode:
    """What a step is asked for beside its program."""

    deterministic: bool = False
    kv: KVType = "auto"
    float8: bool = False


PLAIN_MODE = Mode()


def record(op: Op, spec: Any, compute: Compute, generation: int, mode: Mode = PLAIN_MODE) -> Iterator[Variant]:
    """The kernels that a step of one call to `op` launches on a device of this major capability."""
    seen: list[Variant] = []

    def note(
        kernel: Any, grid: Grid, *args: Any, warps: int = 4, stages: int = 2, early: bool | None = None, **constants: Any
    ) -> None:
        given = constants if early is None else constants | {"PDL": early}
        chosen = dict(options(warps, stages, early)) | {k: given.pop(k) for k in ("maxnreg",) if k in given}
        seen.append(variant(kernel, compute, args, given, chosen))

    params = op.params(spec)
    places = {i: n for n, i in enumerate(i for i, p in enumerate(params) if p.kind == "state")}
    operands = [StateRef(places[i]) if i in places else operand(i, p, spec) for i, p in enumerate(params)]
    values = {o.id: o for o in operands if isinstance(o, Value)}
    outputs = tuple(Value(100 + i, r.kind, r.dims(spec), r.name) for i, r in enumerate(op.results(spec)))
    nodes = around(Node(op, spec, tuple(operands), outputs, op.name))
    made = {v.id for node in nodes for v in node.outputs}
    inputs = (v for node in nodes for v in node.inputs if isinstance(v, Value))
    values = {v.id: v for v in (*values.values(), *inputs) if v.id not in made}
    choices = lower(Program(nodes, {str(i): v for i, v in values.items()}, {}, ()), REGISTRY)
    act = DTYPES[compute]
    types = {"act": act, "f32": torch.float32, "i32": torch.int32}
    slots = {i: Slot(torch.empty(1, dtype=types[v.kind], device=META)) for i, v in values.items()}
    inner = getattr(spec, "append", spec)
    latent = getattr(inner, "latent", 0)
    caches = (
        [allocate(KVLayer(inner.n_kv, inner.head_dim, latent=latent), 4, 32, act, META, mode.kv)]
        if hasattr(inner, "n_kv")
        else []
    )
    states = [allocate_state(StateLayer(params[i].dims(spec) or spec.state), 4, META) for i in places]  # type: ignore[arg-type]
    ints = Slot(torch.empty(1, dtype=torch.int32, device=META))
    rows = {"T": 1024, "S": 64, "R": 64, "items": 64}
    kept, work = {v.id for v in nodes[-1].outputs}, Tables(ints, ints)
    plan = Plan(
        choices,
        slots,
        kept,
        rows,
        Blank(compute),
        caches,
        states,
        work,
        compute,
        META,
        note,
        mode.deterministic,
        generation,
        float8=mode.float8,
        decoded_bytes=mode.float8 << 40,
        cudnn_from=0 if mode.deterministic else WHOLE.T,
    )  # type: ignore[arg-type]
    for batch in (*(Batch(tokens, 1, 1, tokens == 1, tokens > 1, 1) for tokens in TOKENS), LONGER, *MANY, DEEP, WHOLE):
        for go in plan.launches:
            go(replace(batch, adjusts=True))
    yield from seen


def around(node: Node) -> tuple[Node, ...]:
    """A node, and for ROPE_APPEND the attention that does its work in steps without prompts; around one over compressed
    keys a norm and the maps of its heads, too."""
    if node.op is not ROPE_APPEND:
        return (node,)
    q, k, latent = node.spec.q, node.spec.k, node.spec.latent
    spec = AttentionSpec(q.n_heads, k.n_heads, k.head_dim, 1.0, latent=latent)
    ints = tuple(Value(200 + i, "i32", ("S",), name) for i, name in enumerate(("query_start", "kv_len", "block_table")))
    y = Value(300, "act", ("T", spec.width if not latent else q.n_heads * latent), "y")
    attends = Node(ATTENTION, spec, (node.outputs[0], *ints, CacheRef(0)), (y,), "attention")
    if not latent:
        return node, attends
    gain = WeightRef("gain", GGMLType.F32, 1, latent)
    x, c = Value(400, "act", ("T", latent), "x"), node.inputs[2]
    heads = HeadLinearSpec(GGMLType.Q4_K, q.n_heads, 256, latent)
    z, out = Value(301, "act", ("T", heads.out_width), "z"), Value(302, "act", ("T", 2048), "out")
    weights = (
        WeightRef(name, GGMLType.Q4_K, n, k) for name, n, k in (("b", heads.rows, latent), ("o", 2048, heads.out_width))
    )
    return (
        Node(NORM, NormSpec("rms", latent, 1e-5), (x, gain), (c,), "norm"),  # type: ignore[arg-type]
        node,
        attends,
        Node(HEAD_LINEAR, heads, (y, next(weights)), (z,), "heads"),
        Node(LINEAR, LinearSpec(GGMLType.Q4_K, 2048, heads.out_width), (z, next(weights)), (out,), "linear"),
    )


def operand(i: int, param: Param, spec: Any) -> Operand:
    dims = param.dims(spec)
    if param.kind == "weight":
        inner = getattr(spec, "linear", spec)
        if isinstance(spec, NormLinearSpec | NormGateUpSpec):
            maps = spec.linears if isinstance(spec, NormLinearSpec) else (spec.gate,)
            inner = next((lin for lin in maps if lin.n == dims[0]), spec)
        if len(dims) == 2 and hasattr(inner, "type") and "bias" not in param.name:
            return WeightRef(f"{i}", inner.type, dims[0], dims[1])  # type: ignore[arg-type]
        rows, k = dims if len(dims) == 2 else (1, dims[0])
        return WeightRef(f"{i}", GGMLType.F32, rows, k)  # type: ignore[arg-type]
    if param.kind == "cache":
        return CacheRef(0)
    if param.kind == "const":
        return ConstRef(f"{i}", (0.0,) * dims[0])  # type: ignore[operator]
    # A float32 residual stream is what norms read; everything else has the kind that the contract gives.
    kind = "f32" if param.name == "x" and isinstance(spec, NormSpec) and spec.groups == 1 else param.kind
    return Value(i, kind, dims, param.name)


_POINTERS = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int8: "*i8",
    torch.uint8: "*u8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64",
    torch.float64: "*fp64", torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip


def variant(kernel: Any, compute: str, args: Sequence[Any], constants: dict[str, Any], told: dict[str, Any]) -> Variant:
    """Specialised as Triton does: pointers and multiples of 16 are marked, ones become constants; records part by part."""
    fixed: dict[Place, Any] = {}
    attrs: list[Place] = []

    def specialised(given: Any, path: Place, plain: bool) -> Any:
        """The type of an argument, or of the part of one at `path`; `plain` for one that is not to be specialised."""
        if isinstance(given, tuple):
            parts = [specialised(part, (*path, i), plain) for i, part in enumerate(given)]
            return type(given)(*parts) if hasattr(given, "_fields") else tuple(parts)
        if isinstance(given, TensorDescriptor | LaidOut):
            shape, element = ", ".join(map(str, given.block_shape)), _POINTERS[given.base.dtype][1:]
            return f"tensordesc<{element}[{shape}]{f',{given.layout!r}' if isinstance(given, LaidOut) else ''}>"
        if isinstance(given, torch.Tensor):
            attrs.append(path)
            return _POINTERS[given.dtype]
        if isinstance(given, float):
            return "fp32"
        if given == 1 and not plain:
            fixed[path] = 1
            return "constexpr"
        if given % 16 == 0 and not plain:
            attrs.append(path)
        return "i32" if abs(given) < 1 << 31 else "i64"

    values = dict(zip((param.name for param in kernel.params), args)) | constants
    order = []
    for i, param in enumerate(kernel.params):
        if param.is_constexpr:
            fixed[(i,)] = values[param.name]
            order.append((param.name, "constexpr"))
        else:
            order.append((param.name, specialised(values[param.name], (i,), param.do_not_specialize)))
    switches = tuple(told.items())
    return Variant(
        kernel.__name__, kernel.fn.__module__, compute, tuple(order), tuple(fixed.items()), tuple(attrs), switches
    )


def compiled(variant: Variant, target: str) -> Any:
    kernel = getattr(__import__(variant.module, fromlist=["_"]), variant.kernel)
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    return triton.compile(
        source(
            fn=kernel,
            signature=dict(variant.signature),
            constexprs=dict(variant.constants),
            attrs={path: [["tt.divisibility", 16]] for path in variant.attrs},
        ),
        target=GPUTarget("cuda", TARGETS[target][0], 32),
        options=dict(variant.options),
    )


def compile_for(item: tuple[Variant, str]) -> Report:
    """Compiles and assembles one variant for one target."""
    variant, target = item
    began = time.perf_counter()
    made = compiled(variant, target)
    seconds = time.perf_counter() - began
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = _output(tools / "cuobjdump", "-res-usage", file.name)
        text = _output(tools / "nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return Report(
        variant.kernel, variant.compute, variant.label(), target,
        registers=int(found[1]), stack=int(found[2]), spills=len(re.findall(r"\b(?:LDL|STL)\b", text)),
        shared=made.metadata.shared, wide_loads=len(re.findall(r"\bLD(?:G|GSTS)\.E[.A-Z0-9]*\.128", text)),
        matrix_ops=len(re.findall(r"\b[A-Z]*(?:HMMA|GMMA|IMMA)\b", text)), seconds=round(seconds, 2),
    )  # fmt: skip


def ptx_hash(item: tuple[Variant, str]) -> str:
    """The SHA-256 of one variant's PTX, which is not assembled."""

    def without_assembler(*arguments: Any) -> tuple[str, str]:
        if arguments:
            arguments[1]["cubin"] = lambda ptx, metadata: b""
        return "ptx only", "ptx only"

    with knobs.runtime.scope(), knobs.compilation.scope():
        knobs.runtime.add_stages_inspection_hook = without_assembler
        knobs.compilation.disable_line_info = True
        return hashlib.sha256(neutral(compiled(*item).asm["ptx"]).encode()).hexdigest()


def neutral(ptx: str) -> str:
    """PTX without comments and line numbers, and with its functions numbered instead of named."""
    ptx = re.sub(r"//.*", "", ptx)
    for i, name in enumerate(dict.fromkeys(re.findall(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)", ptx))):
        ptx = re.sub(rf"(?<![\w$]){re.escape(name)}(?![A-Za-z0-9$])", f"f{i}", ptx)
    lines = (line.strip() for line in ptx.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith((".loc", ".file")))


def ptx_differences(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """What changed between two sets of hashes. A kernel that was only renamed, or has other constants, is no difference."""
    before, after = by_label(old), by_label(new)
    known = [{(label.split()[0], h) for label, hashes in side.items() for h in hashes} for side in (before, after)]
    lines = [f"changed: {label}" for label, hashes in before.items() if label in after and hashes != after[label]]
    for word, side, other, hashes_there in (("gone", before, after, known[1]), ("new", after, before, known[0])):
        for label, hashes in side.items():
            lines += [
                f"{word}: {label}" for h in hashes if label not in other and (label.split()[0], h) not in hashes_there
            ]
    return lines


def by_label(hashes: Mapping[str, str]) -> dict[str, Counter[str]]:
    """The hashes of each label, which several variants share where only their arguments' types differ."""
    labels: dict[str, Counter[str]] = defaultdict(Counter)
    for name, digest in hashes.items():
        labels[re.sub(r" #\d+$", "", name)][digest] += 1
    return dict(labels)


def ptx_names(work: Sequence[tuple[Variant, str]]) -> list[str]:
    """A name for each variant: target, arithmetic, kernel, constants, and a number where that leaves several."""
    seen: Counter[str] = Counter()
    names = []
    for v, target in work:
        name = f"{target} {v.compute} {v.kernel} {v.label()}".strip()
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name} #{seen[name]}")
    return names


def _output(tool: Path, *args: str) -> str:
    return subprocess.run([str(tool), *args], capture_output=True, text=True, check=True).stdout


EXPERT_BLOCKS = (
    (1536, 64, 6, 512, 1024, "softmax", "silu"),
    (2688, 128, 6, 1856, 3712, "sigmoid", "relu2"),
    (2880, 32, 4, 2880, 0, "softmax_topk", "oai"),
    (2048, 256, 8, 512, 512, "softmax", "silu", GGMLType.Q4_K, True),
    (2816, 128, 8, 704, 0, "softmax", "gelu_tanh", GGMLType.Q5_0, False, True),
    (7168, 256, 8, 2048, 2048, "sigmoid", "silu", GGMLType.Q4_K),
)
"""Width, experts, those used, their width, the shared one's, gate and activation of real models; the type of their weights,
whether the shared one has a gate, and whether a norm stands before the stream."""


def expert_block(
    width: int, n: int, used: int, ff: int, shared: int, gate: Any, activation: Any, type: GGMLType = GGMLType.Q8_0,
    rated: bool = False, normed: bool = False,
) -> Program:  # fmt: skip
    """A router, experts and a shared one behind an embedding: what `fuse.py` takes together."""
    b = Builder()

    def ref(name: str, rows: int, k: int, type: GGMLType = type) -> WeightRef:
        return WeightRef(name, type, rows, k)

    stream = embedding(b, b.input("ids"), ref("embd", 64, width))
    h = norm(b, NormSpec("rms", width, 1e-5), stream, ref("gain", 1, width, GGMLType.F32))
    logits = linear(b, h, ref("router", n, width, GGMLType.F32), out="f32")
    shift = ref("shift", 1, n, GGMLType.F32) if gate == "sigmoid" else None
    ids, weights = route(b, RouteSpec(n, used, gate, bias=shift is not None), logits, shift)
    gated_too = activation != "relu2"
    stacks = [ref(name, n * ff, width) for name in (("gate", "up") if gated_too else ("up",))]
    y = expert_up(b, ExpertUpSpec(type, n, used, ff, width, activation, gated_too), h, ids, *stacks)
    down = ref("down", n * width, ff)
    y = expert_down(b, ExpertDownSpec(type, n, used, width, ff), y, ids, weights, down)
    if shared:
        up = linear(b, h, ref("up_s", shared, width))
        if gated_too:
            up = gated(b, GatedSpec("silu", shared), linear(b, h, ref("gate_s", shared, width)), up)
        else:
            up = plain(b, "relu2", up)
        if rated:
            rate = linear(b, h, ref("rate", 1, width, GGMLType.F32))
            up = gated(b, GatedSpec("sigmoid", shared, per_row=True), rate, up)
        y = linear_add(b, y, up, ref("down_s", width, shared))
    if normed:
        y = norm(b, NormSpec("rms", width, 1e-5), y, ref("gain_after", 1, width, GGMLType.F32))
    stream = add(b, stream, y)
    gain_next = ref("gain_next", 1, width, GGMLType.F32)
    (y,) = norm_linear(b, NormSpec("rms", width, 1e-5), stream, [gain_next], [(ref("next", width, width), None)])
    stream = linear_add(b, stream, y, ref("onto", width, width))
    return b.program(hidden=gather_rows(b, stream, b.input("out_rows")))


def encoder_block(kind: Any) -> Program:
    """What stands between an encoder's products: norms of the embedding and of a sum, both read by a linear map."""
    b = Builder()
    width = 768
    after = NormSpec(kind, width, 1e-5, out="f32")

    def ref(name: str, rows: int, k: int, type: GGMLType = GGMLType.F16) -> WeightRef:
        return WeightRef(name, type, rows, k)

    gains = [ref(name, 1, width, GGMLType.F32) for name in ("gain", "bias")[: 2 if kind == "layer" else 1]]
    h = norm(b, after, embedding(b, b.input("ids"), ref("embd", 64, width)), *gains)
    h = norm(b, after, linear_add(b, h, linear(b, h, ref("up", width, width)), ref("down", width, width)), *gains)
    h = linear_add(b, h, linear(b, h, ref("up2", width, width)), ref("out", width, width))
    return b.program(hidden=gather_rows(b, h, b.input("out_rows")))


def sandwich_block(width: int, factor: float, pre: bool) -> Program:
    """A norm added to the stream, and what reads it: maps behind a norm, or a map of the stream itself that is the gate of
    columns."""
    b, spec = Builder(), NormSpec("rms", width, 1e-6)

    def ref(name: str, rows: int, k: int, type: GGMLType = GGMLType.Q8_0) -> WeightRef:
        return WeightRef(name, type, rows, k)

    gain, second = (ref(name, 1, width, GGMLType.F32) for name in ("gain", "second"))
    h = embedding(b, b.input("ids"), ref("embd", 64, width))
    h = add(b, h, norm(b, spec, linear(b, h, ref("down", width, width)), gain))
    h = cap(b, h, factor, 0.0) if factor != 1.0 else h
    if pre:
        gate, up = (ref(name, 1024, width) for name in ("gate", "up"))
        y = norm_gate_up(b, spec, h, [second], (gate, None), (up, None), "gelu_tanh")
    else:
        y = gated(b, GatedSpec("gelu_tanh", 256, width=width, start=256), linear(b, h, ref("one", 256, width)), h)
    h = linear_add(b, h, y, ref("out", width, 1024 if pre else 256))
    return b.program(hidden=gather_rows(b, h, b.input("out_rows")))


def per_layer_block(width: int, each: int, type: GGMLType) -> Program:
    """What Gemma 4 E has behind a feed-forward: a norm added to the stream, a map of it, its gate, and a map of that."""
    b, spec = Builder(), NormSpec("rms", width, 1e-6)

    def ref(name: str, rows: int, k: int, type: GGMLType = type) -> WeightRef:
        return WeightRef(name, type, rows, k)

    gain, second = (ref(name, 1, width, GGMLType.F32) for name in ("gain", "second"))
    h = embedding(b, b.input("ids"), ref("embd", 64, width))
    p = linear(b, h, ref("p", 2 * each, width), out="f32")
    h = add(b, h, norm(b, spec, linear(b, h, ref("down", width, width)), gain))
    gate = linear(b, h, ref("gate", each, width))
    y = gated(b, GatedSpec("gelu_tanh", each, width=2 * each, start=each), gate, p)
    h = add(b, h, norm(b, replace(spec, out="f32"), linear(b, y, ref("proj", width, each)), second))
    return b.program(hidden=gather_rows(b, h, b.input("out_rows")))


def normed_block(heads: int, n_kv: int, dim: int) -> Program:
    """Norms of queries, keys and values, and one that a rotation follows."""
    b, width = Builder(), 1024
    h = embedding(b, b.input("ids"), WeightRef("embd", GGMLType.Q8_0, 64, width))
    counts = (heads, n_kv, n_kv, heads)
    xs = [linear(b, h, WeightRef(f"x{i}", GGMLType.Q8_0, n * dim, width)) for i, n in enumerate(counts)]
    gain = WeightRef("gain", GGMLType.F32, 1, dim)
    ys = [norm(b, NormSpec("rms", dim, 1e-6, n), x, gain) for n, x in zip(counts, xs)]
    turns = RopeSpec("neox", heads, dim, dim)
    ys[3] = rope(b, turns, ys[3], rotated_by(b, turns), ConstRef("freq", (0.0,) * (dim // 2)))
    for i, y in enumerate(ys):
        h = linear_add(b, h, y, WeightRef(f"y{i}", GGMLType.F16, width, counts[i] * dim))
    return b.program(hidden=gather_rows(b, h, b.input("out_rows")))


def pair_block(width: int) -> Program:
    """Two norms whose sum is normalised, added to the stream and normalised again."""
    b, spec = Builder(), NormSpec("rms", width, 1e-6)

    def ref(name: str, rows: int, k: int, type: GGMLType = GGMLType.Q8_0) -> WeightRef:
        return WeightRef(name, type, rows, k)

    gains = [ref(f"gain{i}", 1, width, GGMLType.F32) for i in range(4)]
    h = embedding(b, b.input("ids"), ref("embd", 64, width))
    one, other = (linear(b, h, ref(name, width, width)) for name in ("one", "other"))
    y = add(b, norm(b, replace(spec, out="f32"), one, gains[0]), norm(b, spec, other, gains[1]))
    h = add(b, h, norm(b, spec, y, gains[2]))
    gate, up = (ref(name, 1024, width) for name in ("gate", "up"))
    y = norm_gate_up(b, spec, h, [gains[3]], (gate, None), (up, None), "gelu_tanh")
    h = linear_add(b, h, y, ref("down", width, 1024))
    return b.program(hidden=gather_rows(b, h, b.input("out_rows")))


def gates_block(channels: int, width: int) -> Program:
    """A short convolution between two gates."""
    b = Builder()
    h = embedding(b, b.input("ids"), WeightRef("embd", GGMLType.Q8_0, 64, channels))
    parts = [linear(b, h, WeightRef(name, GGMLType.Q8_0, channels, channels)) for name in ("before", "after", "u")]
    product, state = GatedSpec("identity", channels), b.state(width - 1, channels)
    x = gated(b, product, parts[0], parts[2])
    y = conv(b, x, WeightRef("taps", GGMLType.F32, channels, width), None, state, "identity")
    h = linear_add(b, h, gated(b, product, parts[1], y), WeightRef("out", GGMLType.Q8_0, channels, channels))
    return b.program(hidden=gather_rows(b, h, b.input("out_rows")))


def stream_block(width: int, ffn: int, bias: bool) -> Program:
    """Maps onto the stream, whose parts of K the norm behind adds: one that maps begin with, and one by itself."""
    b, spec, type = Builder(), NormSpec("rms", width, 1e-6), GGMLType.Q4_K if width % 256 == 0 else GGMLType.Q8_0

    def ref(name: str, rows: int, k: int, type: GGMLType = type) -> WeightRef:
        return WeightRef(name, type, rows, k)

    gain = ref("gain", 1, width, GGMLType.F32)
    h = embedding(b, b.input("ids"), ref("embd", 64, width))
    for i in range(2):
        down_bias = ref("bias", 1, width, GGMLType.F32) if bias else None
        h = linear_add(b, h, linear(b, h, ref(f"up{i}", ffn, width)), ref(f"down{i}", width, ffn), down_bias)
        if i == 0:
            y = norm_gate_up(b, spec, h, [gain], (ref("gate", ffn, width), None), (ref("up", ffn, width), None), "silu")
        else:
            y = linear(b, norm(b, spec, h, gain), ref("last_up", ffn, width))
        h = linear_add(b, h, y, ref(f"last{i}", width, ffn))
    return b.program(hidden=gather_rows(b, h, b.input("out_rows")))


NORMED = ((8, 2, 256), (8, 2, 512), (32, 8, 128))
"""Heads, key heads and head_dim of Gemma 4 and Qwen 3."""
SANDWICHES = ((256, 1.0, True), (2560, 0.5, True), (2560, 1.0, False), (5376, 1.0, True))
"""Width, factor, and whether a norm follows."""
STREAMS = ((4096, 14336, False), (2880, 4096, True))
"""Width, columns of the map onto the stream, and whether it has a bias, of Mistral-7B and gpt-oss."""


def record_block(program: Program, compute: Compute, generation: int, counts: Sequence[int] = (1, 8)) -> Iterator[Variant]:
    """The kernels of its steps of so many rows."""
    seen: list[Variant] = []

    def note(
        kernel: Any, grid: Grid, *args: Any, warps: int = 4, stages: int = 2, early: bool | None = None, **constants: Any
    ) -> None:
        given = constants if early is None else constants | {"PDL": early}
        chosen = dict(options(warps, stages, early)) | {k: given.pop(k) for k in ("maxnreg",) if k in given}
        seen.append(variant(kernel, compute, args, given, chosen))

    ints = Slot(torch.empty(1, dtype=torch.int32, device=META))
    slots = {v.id: ints for v in program.inputs.values()}
    kept, rows = {v.id for v in program.outputs.values()}, {"T": 64, "S": 64, "R": 64, "items": 64}
    plan = Plan(
        post_norm.fused(lower(program, REGISTRY), kept, compute), slots, kept, rows, Blank(compute), [],
        [allocate_state(layer, 4, META) for layer in program.states],
        Tables(ints, ints), compute, META, note, False, generation,
    )  # type: ignore[arg-type]  # fmt: skip
    for tokens in counts:
        for go in plan.launches:
            go(Batch(tokens, 1, 1, tokens == 1, tokens > 1, 1))
    yield from seen


def variants(
    formats: Sequence[GGMLType], computes: Sequence[Compute], quick: bool, target: str, mode: Mode = PLAIN_MODE
) -> list[Variant]:
    """Every distinct kernel, once."""
    asked = [(c, op, spec) for c in computes for op, spec in specs(formats, quick)]
    generation = TARGETS[target][0] // 10
    alone = (v for c, op, spec in asked for v in record(op, spec, c, generation, mode))
    programs = (
        []
        if mode.deterministic
        else [
            *(expert_block(*b) for b in EXPERT_BLOCKS),
            *map(encoder_block, ("layer", "rms")),
            *(sandwich_block(*s) for s in SANDWICHES),
            *(per_layer_block(2560, 256, type) for type in formats if type.name in INTEGERS),
            *(normed_block(*n) for n in NORMED),
            pair_block(2816),
            gates_block(2048, 3),
        ]
    )
    together = (v for c in computes for program in programs for v in record_block(program, c, generation))
    leaving = (*(stream_block(*s) for s in STREAMS), expert_block(*EXPERT_BLOCKS[0]))
    left = (v for c in computes for program in leaving for v in record_block(program, c, generation, (64,)))
    return list(dict.fromkeys((*alone, *together, *(() if mode.deterministic else left))))


def every_nth(found: Sequence[Variant], n: int) -> Iterator[Variant]:
    """The first variant of each kernel, and every nth after it."""
    seen: Counter[str] = Counter()
    for variant in found:
        if seen[variant.kernel] % n == 0:
            yield variant
        seen[variant.kernel] += 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--formats", default=",".join(t.name for t in WEIGHT_TYPES if t in NATIVE))
    parser.add_argument("--computes", default="float16,bfloat16,float32")
    parser.add_argument("--kernels", default="", help="only kernels whose name contains this")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--quick", action="store_true", help="fewer head shapes")
    parser.add_argument("--each", type=int, default=1, metavar="N", help="of each kernel, every Nth variant only")
    parser.add_argument("--kv-cache", choices=KV_TYPES, default="auto", help="what is kept of keys and values")
    parser.add_argument("--deterministic", action="store_true", help="what steps run whose rows may not depend on others")
    parser.add_argument("--fp8", action="store_true", help="what steps run with compute fp8")
    parser.add_argument("--list", action="store_true", help="print the variants without compiling them")
    parser.add_argument("--ptx", metavar="FILE", type=Path, help="write the hash of each variant's PTX; assemble nothing")
    parser.add_argument("--against", metavar="FILE", type=Path, help="with --ptx: print what differs from these hashes")
    parser.add_argument(
        "--compare", metavar="FILE", type=Path, nargs=2, help="compare two files of hashes; compile nothing"
    )
    args = parser.parse_args(argv)
    if args.compare:
        return print_differences(*(json.loads(path.read_text()) for path in args.compare))
    if args.against and not args.ptx:
        parser.error("--against needs --ptx: where to write the new hashes")
    if INTERPRETED:
        parser.error("TRITON_INTERPRET is set: nothing can be compiled")
    formats = [GGMLType[f] for f in args.formats.split(",")]
    mode = Mode(args.deterministic, args.kv_cache, args.fp8)
    work = [
        (v, target)
        for target in args.targets.split(",")
        for v in every_nth(
            variants(formats, args.computes.split(","), args.quick, target, mode),
            args.each,
        )
        if args.kernels in v.kernel
    ]
    if args.list:
        for v, target in work:
            print(v.kernel, v.compute, target, v.label())
        return 0
    if args.ptx:
        with ProcessPoolExecutor(args.jobs) as pool:
            hashes = dict(zip(ptx_names(work), pool.map(ptx_hash, work, chunksize=4), strict=True))
        args.ptx.write_text(json.dumps(hashes, indent=0) + "\n")
        return print_differences(json.loads(args.against.read_text()), hashes) if args.against else 0
    with ProcessPoolExecutor(args.jobs) as pool:
        reports = list(pool.map(compile_for, work))
    print("kernel             compute  target  regs stack spill  shared 128b  mma  options")
    for r in reports:
        fault = r.fault()
        print(
            f"{r.kernel:18s} {r.compute:8s} {r.target:7s} {r.registers:4d} {r.stack:5d} {r.spills:5d} {r.shared:7d}"
            f" {r.wide_loads:4d} {r.matrix_ops:4d}  {r.label}{'' if fault is None else '   <-- ' + fault}"
        )
    faults = [r for r in reports if r.fault() is not None]
    print(json.dumps({"triton": triton.__version__, "compiled": len(reports), "faults": [asdict(r) for r in faults]}))
    return 1 if faults else 0


def print_differences(old: Mapping[str, str], new: Mapping[str, str]) -> int:
    lines = ptx_differences(old, new)
    print(*lines, f"{len(old)} variants before, {len(new)} after, {len(lines)} differences", sep="\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
