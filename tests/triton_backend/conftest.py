"""The kernels run on a CUDA device if there is one, else in Triton's interpreter, chosen before they load."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    # Only while the kernels load: elsewhere in this process `auto` must not find an interpreter to serve from.
    loaded = "triton" in sys.modules
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("quarrel.triton_backend.backend")
    importlib.import_module("quarrel.triton_backend.collective.one_shot")
    importlib.import_module("quarrel.triton_backend.attention.split_starts")
    if before is None:
        del os.environ["TRITON_INTERPRET"]
    assert not loaded or before == "1", "Triton was imported before these tests could choose its interpreter"

import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from quarrel.triton_backend.backend import TritonBackend, create
from quarrel.triton_backend.runtime.launch import INTERPRETED
from tests.triton_backend.remembered import remember

# It checks integers for overflow at a third of its time, and throws what it finds away.
interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
if INTERPRETED:
    remember()
_PATCH = interpreter._patch_lang
_LANGUAGE = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})


def patch_once(fn: Any) -> Any:
    """The interpreter puts its functions into Triton's language for every call of a device function; a launch is enough."""
    patched = not any(tl.core.is_builtin(module.load) for module in (tl, tl.core))
    return interpreter._LangPatchScope() if patched else _PATCH(_LANGUAGE)


interpreter._patch_lang = patch_once
DOT = InterpreterBuilder.create_dot


def dot(self: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
    """Products of a tile whose rows have the same bits wherever in it they stand, as on a GPU. NumPy's in float32 do not
    on some CPUs; in float64 they differ in last bits, which rounding drops."""
    if d.data.dtype != np.float32:
        return DOT(self, a, b, d, *how)
    wide = DOT(self, a, b, TensorHandle(np.zeros_like(d.data, np.float64), tl.float64), *how)
    return TensorHandle(wide.data.astype(np.float32) + d.data, d.dtype.scalar)


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


@pytest.fixture(name="backend")
def _backend() -> TritonBackend:
    return create()
