"""The address spaces of a Metal text, checked by clang with address spaces as types; nothing is executed."""

from __future__ import annotations

import json

from tools.metal_emulator.build import LANGUAGE, MetalSource, header_flags, void
from tools.metal_emulator.cache import METAL_HEADERS, cached, content_key, tree_key
from tools.metal_emulator.diagnostics import as_findings, error_lines
from tools.metal_emulator.findings import Finding, Kind
from tools.metal_emulator.rewrite import foreign
from tools.metal_emulator.toolchain import CompilerError, Toolchain, find_toolchain, run_tool

# Metal copies whole structs between address spaces, which C++ does through constructors that know only one. What is
# wrong with such a line otherwise, the compiler says when the kernel is built to run.
_STRUCT_COPIES = ("no matching constructor for initialization", "no viable overloaded '='")
_PRELUDE = "#include <metal_stdlib>\n#include <mlx_names.h>\n"


def typecheck(source: str, name: str = "kernel", toolchain: Toolchain | None = None) -> list[Finding]:
    """Findings of kind TYPE and NOT_METAL, with lines that count in `source`.

    `source` is whole Metal text, as MLX compiles it after its prelude; templates are checked as far as the text
    instantiates them. MLX's names (bfloat16_t, Limits, ...) are there, its other headers are not.
    """
    return typecheck_source(MetalSource(name, f'#line 1 "{name}.metal"\n{source}', ""), toolchain or find_toolchain())


def typecheck_source(source: MetalSource, toolchain: Toolchain) -> list[Finding]:
    findings = [Finding(Kind.NOT_METAL, file, line, message) for file, line, message in foreign(source.text)]
    text = f"{_PRELUDE}{source.rewritten().text}\n"
    command = [*toolchain.kernel_compiler, *LANGUAGE, "-DMSL_AS", "-fsyntax-only", *header_flags(mlx_names=False)]
    key = content_key((toolchain.version, *command, text, tree_key(METAL_HEADERS)))

    def diagnose() -> list[str]:
        path = cached(f"types_{key}.cpp", lambda path: void(path.write_text(text)))
        try:
            run_tool([*command, path])
        except CompilerError as error:
            return list(error.lines)
        return []

    answer = cached(f"types_{key}.json", lambda path: void(path.write_text(json.dumps(diagnose()))))
    output = json.loads(answer.read_text())
    errors = error_lines(output) if output else []
    return findings + as_findings(Kind.TYPE, [e for e in errors if not any(copy in e for copy in _STRUCT_COPIES)])
