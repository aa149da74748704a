"""The block formats that kernels compute with as they are: a new one is a file of this folder and its name here."""

from __future__ import annotations

from collections.abc import Mapping

from quarrel.cpu_backend.formats import (
    iq4_nl,
    iq4_xs,
    mxfp4,
    nvfp4,
    q2_k,
    q3_k,
    q4_0,
    q4_1,
    q4_k,
    q5_0,
    q5_1,
    q5_k,
    q6_k,
    q8_0,
    q8_1,
    tq2_0,
)
from quarrel.cpu_backend.formats.block import BlockFormat

BLOCKS: Mapping[str, BlockFormat] = {
    module.FORMAT.name: module.FORMAT
    for module in (q4_0, q4_1, q5_0, q5_1, q8_0, q8_1, iq4_nl, mxfp4, nvfp4, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_xs, tq2_0)
}
"""By GGUF name."""
