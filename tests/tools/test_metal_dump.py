"""Texts for Apple's compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("mlx.core")

from tools.metal_dump import dump


def test_every_text_is_whole_and_written_once(tmp_path: Path) -> None:
    count = dump(tmp_path, only="rope_append")
    texts = [path.read_text() for path in sorted(tmp_path.glob("*.metal"))]
    assert count == len(texts) == len(set(texts)) > 3
    assert any("half" in t or "float16_t" in t for t in texts)
    for text in texts:
        assert text.startswith('#include "mlx/backend/metal/kernels/utils.h"')
        assert "[[kernel]] void" in text
        assert "[[buffer(0)]]" in text
    assert "xcrun -sdk macosx metal -c" in (tmp_path / "compile.sh").read_text()
