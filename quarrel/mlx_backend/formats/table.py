"""The block formats that kernels read as they are: one file and one line each. Any other is dequantised at load."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from quarrel.gguf import GGMLType
from quarrel.mlx_backend.formats.codes import DECODE
from quarrel.mlx_backend.formats.dense import BF16, F16, F32, Dense
from quarrel.mlx_backend.formats.iq4_nl import IQ4_NL
from quarrel.mlx_backend.formats.iq4_xs import IQ4_XS
from quarrel.mlx_backend.formats.layout import Format
from quarrel.mlx_backend.formats.mxfp4 import MXFP4
from quarrel.mlx_backend.formats.nvfp4 import NVFP4
from quarrel.mlx_backend.formats.q2_k import Q2_K
from quarrel.mlx_backend.formats.q3_k import Q3_K
from quarrel.mlx_backend.formats.q4_0 import Q4_0
from quarrel.mlx_backend.formats.q4_1 import Q4_1
from quarrel.mlx_backend.formats.q4_k import Q4_K
from quarrel.mlx_backend.formats.q5_0 import Q5_0
from quarrel.mlx_backend.formats.q5_1 import Q5_1
from quarrel.mlx_backend.formats.q5_k import Q5_K
from quarrel.mlx_backend.formats.q6_k import Q6_K
from quarrel.mlx_backend.formats.q8_0 import Q8_0
from quarrel.mlx_backend.formats.q8_1 import Q8_1
from quarrel.mlx_backend.formats.tq1_0 import TQ1_0
from quarrel.mlx_backend.formats.tq2_0 import TQ2_0

NATIVE: Mapping[GGMLType, Format] = {
    f.type: f
    for f in (
        F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q8_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4,
        NVFP4, TQ1_0, TQ2_0,
    )
}  # fmt: skip


def packed_bytes(type: GGMLType, rows: int, k: int) -> int:
    """Bytes of the planes of a weight, fewer if blocks share scales; `type` is one of `NATIVE`."""
    return sum(p.size(rows, k) * p.dtype.size for p in NATIVE[type].planes)


@cache
def header(*formats: Format) -> str:
    """Metal text with the structs of these formats, each once."""
    dense_first = sorted(formats, key=lambda f: not isinstance(f, Dense))
    return DECODE + "".join(dict.fromkeys(f.struct() for f in dense_first))
