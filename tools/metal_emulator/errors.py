"""What the emulator raises beside the project's own errors."""

from __future__ import annotations

from collections.abc import Sequence

from quarrel.errors import QuarrelError
from tools.metal_emulator.findings import Finding


class MetalCompileError(QuarrelError):
    """The Metal source does not compile; `diagnostics` are the compiler's lines, one error each."""

    def __init__(self, name: str, diagnostics: Sequence[str]) -> None:
        self.diagnostics = tuple(diagnostics)
        super().__init__(f"Metal kernel {name} does not compile:\n" + "\n".join(self.diagnostics))


class MetalFindings(QuarrelError):
    """A kernel ran and broke rules; `findings` says which."""

    def __init__(self, name: str, findings: Sequence[Finding]) -> None:
        self.findings = tuple(findings)
        count = f"{len(self.findings)} finding" + ("s" if len(self.findings) != 1 else "")
        super().__init__(f"Metal kernel {name} has {count}:\n" + "\n".join(str(f) for f in self.findings))
