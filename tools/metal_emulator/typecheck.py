"""The address spaces of a Metal text, checked by clang with address spaces as types, and the rules of `ir_rules.py`.

Nothing is executed.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory

from tools.metal_emulator.build import LANGUAGE, MetalSource, header_flags, void
from tools.metal_emulator.cache import METAL_HEADERS, cached, content_key, tree_key
from tools.metal_emulator.diagnostics import as_findings, error_lines
from tools.metal_emulator.findings import Finding, Kind
from tools.metal_emulator.ir_rules import broken
from tools.metal_emulator.rewrite import foreign
from tools.metal_emulator.toolchain import CompilerError, Toolchain, find_toolchain, run_tool

# Metal copies whole structs between address spaces, which C++ does through constructors that know only one. Loads and
# stores through a pointer that is cast on the spot become calls (declared.h); of other copies the compiler says what is
# wrong when the kernel is built to run, and a text that has one is not read by the rules.
_STRUCT_COPIES = ("no matching constructor for initialization", "no viable overloaded '='")
# Names of variables stay, as the rules read them.
_TO_IR = ("-S", "-emit-llvm", "-O0", "-gline-tables-only", "-fno-discard-value-names")
_RULES = Path(__file__).with_name("ir_rules.py")
_WIDE = re.compile(r"\*(\((?:const )?(?:device|threadgroup|constant) [^()]*\*\))")
_PRELUDE = "#include <metal_stdlib>\n#include <mlx_names.h>\n"


def typecheck(source: str, name: str = "kernel", toolchain: Toolchain | None = None) -> list[Finding]:
    """Findings of kind TYPE and NOT_METAL, with lines that count in `source`.

    `source` is whole Metal text, as MLX compiles it after its prelude; templates are checked as far as the text
    instantiates them. MLX's names (bfloat16_t, Limits, ...) are there, its other headers are not.
    """
    return typecheck_source(MetalSource(name, f'#line 1 "{name}.metal"\n{source}', ""), toolchain or find_toolchain())


def typecheck_source(source: MetalSource, toolchain: Toolchain) -> list[Finding]:
    findings = [Finding(Kind.NOT_METAL, file, line, message) for file, line, message in foreign(source.text)]
    rewritten = source.rewritten()
    text = _PRELUDE + _WIDE.sub(r"msl_wide->*\1", rewritten.text) + "\n"
    command = [*toolchain.kernel_compiler, *LANGUAGE, "-DMSL_AS", *_TO_IR, *header_flags(mlx_names=False)]
    key = content_key((toolchain.version, *command, text, tree_key(METAL_HEADERS), _RULES.read_text()))

    def diagnose() -> dict[str, list[object]]:
        path = cached(f"types_{key}.cpp", lambda path: void(path.write_text(text)))
        with TemporaryDirectory() as work:
            ir = Path(work) / "kernel.ll"
            try:
                run_tool([*command, path, "-o", ir])
            except CompilerError as error:
                return {"errors": list(error.lines), "broken": []}
            attributes = {name: [p.attribute for p in each] for name, each in rewritten.kernels.items()}
            return {"errors": [], "broken": [(*b.place, b.message) for b in broken(ir.read_text(), attributes)]}

    answer = cached(f"types_{key}.json", lambda path: void(path.write_text(json.dumps(diagnose()))))
    output = json.loads(answer.read_text())
    errors = error_lines(output["errors"]) if output["errors"] else []
    findings += as_findings(Kind.TYPE, [e for e in errors if not any(copy in e for copy in _STRUCT_COPIES)])
    return findings + [Finding(Kind.TYPE, *place, message) for *place, message in output["broken"] if place[0]]
