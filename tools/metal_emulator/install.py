"""The emulator in the place of MLX's Metal call, so that a whole MLX program runs on Linux."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from quarrel.errors import BackendUnavailable
from tools.metal_emulator.kernel import metal_kernel
from tools.metal_emulator.session import Session, session
from tools.metal_emulator.settings import Settings


@contextmanager
def install(settings: Settings | None = None) -> Iterator[Session]:
    """Replaces `mx.fast.metal_kernel` and switches mx.compile off, for as long as the context lasts.

    Yields the session, whose `launches` say what ran. Kernels made inside keep working outside; kernels that MLX itself
    made before are not replaced. An emulated call needs the values of its inputs, hence no mx.compile.
    """
    try:
        import mlx.core as mx
    except ImportError as error:
        raise BackendUnavailable("install() stands in for MLX, which is not installed; pip install 'mlx[cpu]'") from error
    fast: Any = mx.fast
    original = fast.metal_kernel
    fast.metal_kernel = metal_kernel
    mx.disable_compile()
    try:
        with session(settings or Settings()) as current:
            yield current
    finally:
        fast.metal_kernel = original
        mx.enable_compile()
