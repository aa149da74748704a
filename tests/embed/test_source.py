"""Rows of every kind of file, and what is wrong with bad ones."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quarrel.embed import source as source_module
from quarrel.embed.source import Row, Wanted, open_source
from quarrel.errors import RequestError


def rows(path: Path, wanted: Wanted | None = None) -> list[Row]:
    return list(open_source(str(path), wanted or Wanted()).rows())


def test_lines_of_a_text_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("one\r\n\n  \ntwo é\nbad \xff\nlast".encode("latin-1").replace(b"\xe9", "é".encode()))
    got = rows(path)
    assert [(r.number, r.text, r.fault) for r in got if not r.fault] == [
        (0, "one", None),
        (1, "two é", None),
        (3, "last", None),
    ]
    assert got[2].fault == "it is not UTF-8 at byte 4"
    assert got[-1].position == open_source(str(path), Wanted()).total == path.stat().st_size


def test_json_lines(tmp_path: Path) -> None:
    lines = [
        json.dumps({"body": "good", "key": 7, "year": 1990, "tags": ["a"]}),
        "{nonsense",
        "[1]",
        json.dumps({"key": "k"}),
        json.dumps({"body": None, "key": "k"}),
        json.dumps({"body": 5, "key": "k"}),
        json.dumps({"body": " ", "key": "k"}),
        json.dumps({"body": "no key"}),
        '{"body": "half a pair \\ud800", "key": 1}',
        "[" * 5000,
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    got = rows(path, Wanted("body", "key", ("year", "tags", "absent")))
    assert (got[0].doc_id, got[0].columns, got[0].fault) == ("7", {"year": "1990", "tags": '["a"]', "absent": None}, None)
    faults = [r.fault or "" for r in got[1:]]
    said = (
        "it is no JSON",
        "it is a JSON list, wanted an object",
        "its body is missing, wanted a text",
        "its body is null",
        "its body is int",
        "its body is empty",
        "its key is missing or null, wanted an id",
        "its body is not UTF-8",
        "it is no JSON",
    )
    assert [fault.startswith(wanted) for fault, wanted in zip(faults, said, strict=True)] == [True] * 9


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbftext,key\n"two\nlines, quoted",1\nshort\n\n,2\nbad \xff,3\nfine,4\n')
    got = rows(path, Wanted(id="key"))
    assert [(r.number, r.text, r.doc_id) for r in got if not r.fault] == [(0, "two\nlines, quoted", "1"), (4, "fine", "4")]
    assert [r.fault for r in got if r.fault] == ["it has 1 cells, wanted 2", "its text is empty", "its text is not UTF-8"]
    with pytest.raises(RequestError, match="has no column 'body'; it has text, key"):
        rows(path, Wanted("body"))
    path.write_bytes(b"")
    with pytest.raises(RequestError, match="has no column 'text'"):
        rows(path)


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", None, "c"], "n": [1, 2, 3]}), path)
    source = open_source(str(path), Wanted(others=("n",)))
    assert (source.total, source.unit) == (3, "row")
    got = list(source.rows())
    assert [(r.text, r.columns["n"]) for r in got if not r.fault] == [("a", "1"), ("c", "3")]
    assert got[1].fault == "its text is null, wanted a text"
    with pytest.raises(RequestError, match="has no column 'x'; it has text, n"):
        open_source(str(path), Wanted("x"))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(RequestError, match="no Parquet file that can be read"):
        open_source(str(path), Wanted())


def test_a_line_without_end_is_one_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "MAX_LINE", 100)
    path = tmp_path / "a.txt"
    path.write_text("x" * 1000 + "\nfine\n" + "y" * 350)
    got = rows(path)
    assert [(r.number, r.fault) for r in got] == [
        (0, "the line is longer than 100 bytes"),
        (1, None),
        (2, "the line is longer than 100 bytes"),
    ]


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"the input is 'a.doc', wanted a file that ends in .txt"):
        open_source(str(tmp_path / "a.doc"), Wanted())
    with pytest.raises(FileNotFoundError):
        open_source(str(tmp_path / "none.txt"), Wanted())
