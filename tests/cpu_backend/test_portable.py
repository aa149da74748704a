"""Kernels for processors that this machine is not: they must compile, and use the instructions that they are there for."""

from __future__ import annotations

import os
from dataclasses import replace

import llvmlite.binding as llvm
import pytest

from quarrel.cpu_backend import elementwise, norm, recurrent
from quarrel.cpu_backend.attention import attention, rope
from quarrel.cpu_backend.attention.integer import in_integers
from quarrel.cpu_backend.experts.products import expert_floats
from quarrel.cpu_backend.formats.table import BLOCKS
from quarrel.cpu_backend.linear.activations import quantize, to_bfloat16
from quarrel.cpu_backend.linear.floats import PAIRS, float_linear
from quarrel.cpu_backend.linear.matvec import matvec
from quarrel.cpu_backend.linear.tile import tile
from quarrel.cpu_backend.runtime import features, jit, runner
from quarrel.cpu_backend.runtime.abi import KernelDef
from quarrel.cpu_backend.sampling.logprobs import logprobs
from quarrel.cpu_backend.sampling.sample import sample

EVERYTHING = os.environ.get("QUARREL_TEST_ALL") == "1"
TRIPLES = {"x86_64": "x86_64-unknown-linux-gnu", "aarch64": "aarch64-unknown-linux-gnu"}


def machine(level: features.Level) -> llvm.TargetMachine:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    try:
        target = llvm.Target.from_triple(TRIPLES[level.arch])
    except RuntimeError:
        pytest.skip(f"this LLVM cannot generate {level.arch} code")
    return target.create_target_machine(cpu=level.cpu, features=level.features, opt=3, reloc="pic", codemodel="small")


def kernels(level: features.Level) -> list[KernelDef]:
    shape = attention.Shape(4, 2, 80, 16, 0.1, window=64, cap=30.0, sinks=True, kind="float16")
    every = [
        quantize(),
        to_bfloat16(),
        elementwise.gated("silu", True, False),
        norm.norm("layer", True),
        rope.rope_append("neox", level, "float16", 40, 160, 1),
        rope.rope_append("neox", level, "float16", 40, 160, 3),
        rope.kv_append(level, "fp8"),
        rope.kv_append(level, "fp8_e5m2"),
        attention.attention(shape, level),
        attention.attention(replace(shape, kind="fp8"), level),
        attention.attention(in_integers(replace(shape, kind="int8"), level), level),
        recurrent.scan2(64, 128, 4),
        sample(1000),
        logprobs(20),
        float_linear("F16", level, 77),
    ]
    formats = [*BLOCKS.values()]
    if level.name != "neon" and not EVERYTHING:  # others a third, each another one
        formats = formats[[*features.LEVELS].index(level.name) % 3 :: 3]
    every += [matvec(fmt, level, fmt.elements == 32) for fmt in formats]
    return [*every, *(tile(BLOCKS[name], level, False, 512) for name in ("Q4_K", "Q8_0"))]


@pytest.mark.parametrize("name", [n for n in features.LEVELS if n != "generic"])
def test_every_kernel_compiles_for_every_level(name: str) -> None:
    level = features.LEVELS[name]
    target = machine(level)
    for kernel in kernels(level):
        text = str(target.emit_assembly(jit.optimised(jit.emit_ir("kernel", kernel.emit), level, target)))
        # A library call, such as a software conversion of halves, would not be found when the kernel is loaded.
        assert not [line for line in text.splitlines() if line.split()[:1] in (["bl"], ["callq"], ["call"])], kernel.name


@pytest.mark.parametrize(
    ("name", "instruction"),
    [("avx512vnni", "vpdpbusd"), ("avxvnni", "vpdpbusd"), ("avx2", "vpmaddubsw"), ("neon", "sdot")],
)
def test_byte_products_use_the_level_s_instruction(name: str, instruction: str) -> None:
    level = features.LEVELS[name]
    target = machine(level)
    for kernel in (matvec(BLOCKS["Q4_K"], level, False), tile(BLOCKS["Q4_K"], level, False, 512)):
        text = str(target.emit_assembly(jit.optimised(jit.emit_ir("kernel", kernel.emit), level, target)))
        assert instruction in text, kernel.name


def test_pairs_of_bfloat16_use_the_level_s_instruction() -> None:
    level = features.LEVELS["avx512bf16"]
    target = machine(level)
    for kernel in (float_linear(PAIRS, level, 1024), float_linear(PAIRS, level, 77), expert_floats(PAIRS, level, 512)):
        text = str(target.emit_assembly(jit.optimised(jit.emit_ir("kernel", kernel.emit), level, target)))
        assert "vdpbf16ps" in text, kernel.name
        assert "vfmadd" not in text, kernel.name
        assert not [line for line in text.splitlines() if line.split()[:1] == ["callq"]], kernel.name


@pytest.mark.parametrize("name", list(features.LEVELS))
def test_the_runner_compiles(name: str) -> None:
    level = features.LEVELS[name]
    if level.arch not in TRIPLES:
        pytest.skip(f"no triple known for {level.arch}")
    target = machine(level)
    for emit, params in ((runner.emit_start, 1), (lambda k: runner.emit_run(level, k), 3)):
        assert target.emit_object(jit.optimised(jit.emit_ir("runner", emit, params), level, target))


@pytest.mark.parametrize(("name", "sets"), [("neon", "msr"), ("avx2", "ldmxcsr"), ("generic", "ldmxcsr")])
def test_the_runner_turns_subnormals_off_and_puts_the_mode_back(name: str, sets: str) -> None:
    level = features.LEVELS[name]
    if level.arch not in TRIPLES or (name == "generic" and level.arch != "x86_64"):
        pytest.skip("the portable level is of this machine's architecture")
    target = machine(level)
    module = jit.optimised(jit.emit_ir("runner", lambda k: runner.emit_run(level, k), 3), level, target)
    text = str(target.emit_assembly(module))
    assert len([line for line in text.splitlines() if sets in line and "runner" not in line]) == 2
