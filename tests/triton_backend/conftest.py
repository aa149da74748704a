"""The kernels run on a CUDA device if there is one, else in Triton's interpreter, chosen before they load."""

from __future__ import annotations

import importlib
import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    # Only while the kernels load: elsewhere in this process `auto` must not find an interpreter to serve from.
    loaded = "triton" in sys.modules
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("quarrel.triton_backend.backend")
    importlib.import_module("quarrel.triton_backend.one_shot")
    importlib.import_module("quarrel.triton_backend.starts")
    if before is None:
        del os.environ["TRITON_INTERPRET"]
    assert not loaded or before == "1", "Triton was imported before these tests could choose its interpreter"

from quarrel.triton_backend.backend import TritonBackend, create
from quarrel.triton_backend.runtime import INTERPRETED


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(name="backend")
def _backend() -> TritonBackend:
    return create()
