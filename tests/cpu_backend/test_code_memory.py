"""Compiled kernels in a process that has little room beside them."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="maps memory as Linux does")

# Loads functions that read a table beside them, while memory around is taken and given back.
CROWDED = """
import ctypes, mmap, random, sys
import llvmlite.binding as llvm
from quarrel.cpu_backend.runtime import jit
from quarrel.cpu_backend.runtime.features import level as level_of

TEXT = '''
@table = internal constant [64 x double] [{}]
define double @f{}(i64 %i) {{
  %p = getelementptr [64 x double], ptr @table, i64 0, i64 %i
  %v = load double, ptr %p
  ret double %v
}}
'''
random.seed(int(sys.argv[1]))
level = level_of()
engine, machine, taken = jit._engine(level), jit._machine(level), []


def take(size):
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # reserves nothing
    taken.append(mmap.mmap(-1, size, flags=flags, prot=mmap.PROT_READ))


for n in range(150):
    module = llvm.parse_assembly(TEXT.format(", ".join(f"double {float(i + n)}" for i in range(64)), n))
    module.triple = llvm.get_process_triple()
    engine.add_object_file(llvm.ObjectFileRef.from_data(machine.emit_object(module)))
    engine.finalize_object()
    function = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_int64)(engine.get_function_address(f"f{n}"))
    assert function(5) == 5 + n
    for _ in range(random.randrange(12)):
        take(random.choice([4, 4, 8, 16, 64, 300]) << 10)
    if random.random() < 0.3:
        take(1500 << 20)
    while taken and random.random() < 0.6:
        taken.pop(random.randrange(len(taken))).close()
print("whole")
"""


def test_code_and_its_tables_stay_together_where_memory_is_crowded() -> None:
    """Where they lie 2 GiB apart, LLVM ends the process, which happened to a third of such runs."""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CROWDED, str(seed)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for seed in range(6)
    ]
    said = [child.communicate(timeout=120)[0] for child in children]
    assert [text.strip().splitlines()[-1] for text in said] == ["whole"] * 6, said
