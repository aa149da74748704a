"""What ships of the page is what its sources were built into: hashes only, no Node."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

import quarrel.server

ROOT = Path(__file__).resolve().parents[2]
STATIC = Path(quarrel.server.__file__).parent / "static"
PAGE = ROOT / "page"
BUILT = json.loads((STATIC / "built.json").read_text("utf-8"))


def digests(paths: list[Path], root: Path) -> dict[str, str]:
    return {p.relative_to(root).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in paths}


def test_what_ships_is_what_was_built() -> None:
    files = [p for p in STATIC.rglob("*") if p.is_file() and p.name != "built.json"]
    assert digests(files, STATIC) == BUILT["files"]


def test_what_was_built_is_of_these_sources() -> None:
    if not PAGE.is_dir():
        pytest.skip("no checkout")
    files = [p for folder in ("src", "public") for p in (PAGE / folder).rglob("*") if p.is_file()]
    found = digests([*files, PAGE / "build.mjs", PAGE / "package-lock.json"], PAGE)
    assert found == BUILT["sources"], "run `npm ci && npm run build` in page/"


def test_the_page_asks_for_files_that_are_there() -> None:
    text = "".join((STATIC / name).read_text("utf-8") for name in ("index.html", "api.html", "manifest.webmanifest"))
    asked = set(re.findall(r"/static/([\w./-]+)", text))
    assert asked
    assert [name for name in asked if not (STATIC / name).is_file()] == []


def test_every_language_has_every_word() -> None:
    if not PAGE.is_dir():
        pytest.skip("no checkout")

    def words(language: str) -> dict[str, frozenset[str]]:
        text = (PAGE / "src" / "lang" / f"{language}.js").read_text("utf-8")
        pairs = re.findall(r'"([\w-]+)": "((?:[^"\\]|\\.)*)"', text)
        return {key: frozenset(re.findall(r"\{(\w+)\}", value)) for key, value in pairs}

    english = words("en")
    assert len(english) > 100
    for path in (PAGE / "src" / "lang").glob("*.js"):
        assert words(path.stem) == english, path.stem
