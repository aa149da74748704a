"""The compiler's complaints, moved to the line of the Metal text that caused them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tools.metal_emulator.findings import Finding, Kind

_LINE = re.compile(r"(?P<file>[^:]+):(?P<line>\d+):\d+: (?P<severity>error|fatal error|note): (?P<message>.*)")
# The emulator's spelling of Metal's words.
_WORDS = {
    "__attribute__((address_space(1)))": "device",
    "__attribute__((address_space(2)))": "constant",
    "__attribute__((address_space(3)))": "threadgroup",
}


def error_lines(output: Sequence[str]) -> list[str]:
    """One "file:line: error: message" for each error; the first lines as they are if none has that form.

    An error inside one of the emulator's headers is put where the text's own code asked for the template.
    """
    errors: list[re.Match[str]] = []
    requested: dict[int, re.Match[str]] = {}
    for line in output:
        match = _LINE.match(line)
        if not match:
            continue
        if match["severity"] != "note":
            errors.append(match)
        elif errors and "requested here" in match["message"] and not match["file"].startswith("/"):
            requested[len(errors) - 1] = match
    if not errors:
        return list(output[:5])
    lines = []
    for i, error in enumerate(errors):
        place = requested.get(i, error) if error["file"].startswith("/") else error
        message = error["message"]
        for spelling, word in _WORDS.items():
            message = message.replace(spelling, word)
        lines.append(f"{place['file']}:{place['line']}: error: {message}")
    return list(dict.fromkeys(lines))


def as_findings(kind: Kind, lines: Sequence[str]) -> list[Finding]:
    """Lines of `error_lines` as findings."""
    findings = []
    for line in lines:
        match = re.match(r"(?P<file>[^:]+):(?P<line>\d+): error: (?P<message>.*)", line)
        if match:
            findings.append(Finding(kind, match["file"].rsplit("/", 1)[-1], int(match["line"]), match["message"]))
        else:
            findings.append(Finding(kind, "", 0, line))
    return findings
