"""The documentation site, into build/site: the pages as they lie in the repository, what they link to, and a reference.

    python -m tools.site

Needs the extra `docs`. A link or an anchor that leads nowhere ends it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

import quarrel

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ROOT / "mkdocs.yml"
REFERENCE = "reference.md"
"""Made here from docstrings; every other page is a file of the repository."""


def settings() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(SETTINGS.read_text("utf-8"))
    return found


def pages() -> list[str]:
    """The pages of the navigation, in order, by their paths in the repository."""

    def walk(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for below in entry.values() if isinstance(entry, dict) else entry:
                yield from walk(below)

    return list(walk(settings()["nav"]))


def reference() -> str:
    """A page with an entry for each public name."""
    homes = quarrel._HOMES
    entries = [f"::: {homes[name]}.{name}" for name in quarrel.__all__ if name in homes]
    return "# Reference\n\nWhat `import quarrel` brings, from the docstrings.\n\n" + "\n\n".join(entries) + "\n"


def gather(target: Path) -> None:
    """Pages and the files that they link to, where they lie in the repository."""
    shutil.rmtree(target, ignore_errors=True)
    for page in pages():
        place = target / page
        place.parent.mkdir(parents=True, exist_ok=True)
        if page == REFERENCE:
            place.write_text(reference(), "utf-8")
            continue
        text = (ROOT / page).read_text("utf-8")
        for link in re.findall(r"\]\((?!\w+:)([^)#\s]+)", text):
            found = ((ROOT / page).parent / link).resolve()
            linked = found.relative_to(ROOT)
            if found.is_file() and linked.suffix != ".md":
                (target / linked).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(found, target / linked)
            elif found.is_dir():
                text = text.replace(f"]({link})", f"]({link.rstrip('/')}/README.md)")
        place.write_text(text, "utf-8")


if __name__ == "__main__":
    gather(ROOT / settings()["docs_dir"])
    sys.exit(subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(SETTINGS)]).returncode)
