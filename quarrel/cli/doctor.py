"""`quarrel doctor`: the findings, and what to do about them."""

from __future__ import annotations

import argparse
import dataclasses
from itertools import groupby

from quarrel import doctor
from quarrel.cli.terminal import line, table, visible, write_json

MARKS = {"ready": "ok", "fact": "", "missing": "--", "broken": "!!"}


def run(args: argparse.Namespace) -> int:
    """Status 0 where some backend can run a model, else 1."""
    findings = doctor.examine()
    usable = doctor.usable(findings)
    if args.json:
        write_json({"usable": usable, "findings": [dataclasses.asdict(finding) for finding in findings]})
        return 0 if usable else 1
    for group, members in groupby(findings, key=lambda finding: finding.group):
        line(group)
        rows = []
        for found in members:
            text = f"{found.text} -> {found.advice}" if found.advice else found.text
            rows.append([MARKS[found.state], found.what, visible(text)])
        for text in table(rows):
            line(text)
    line()
    line("This machine can run models." if usable else "No backend can run a model here: see the first lines above.")
    return 0 if usable else 1
