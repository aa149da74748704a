"""A container's limit of memory is what the backend has."""

from __future__ import annotations

from pathlib import Path

from quarrel.cpu_backend.backend import container_free


def test_a_containers_limit_counts_less_what_is_used_but_for_pages_of_files(tmp_path: Path) -> None:
    assert container_free(tmp_path) is None
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 400\nactive_file 100\ninactive_file 200\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert container_free(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert container_free(tmp_path) == 600
    (tmp_path / "memory.max").write_text("350\n")
    assert container_free(tmp_path) == 0
