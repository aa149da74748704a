"""What `bench/attend_batch.py` would time, on small loads: where it is wrong, time on a device is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quarrel.ops.attention import ATTENTION, AttentionSpec


@pytest.fixture(name="bench")
def _bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "bench"))
    import attend_batch

    return attend_batch


def test_every_form_gives_the_rows_and_the_appended_keys_of_attend_one(bench: Any) -> None:
    load = bench.Load(AttentionSpec(4, 4, 16, 0.2), 2, 20, 70)
    bed = bench.Bed(load, 1)
    found = {v.name: bed.error(v) for v in bench.VARIANTS if v.takes(load)}
    assert len(found) == len(bench.VARIANTS)
    assert max(found.values()) <= ATTENTION.tolerance["float16"], found


def test_a_form_is_not_tried_where_its_heads_do_not_fit(bench: Any) -> None:
    jobs = bench.jobs_for([bench.Load(AttentionSpec(3, 3, 32, 0.2), 2, 40, 180)])
    assert {v.form.heads for v, _ in jobs if v.form is not None} == {1}
