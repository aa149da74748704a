"""Which classes of Hugging Face's transformers can be converted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from quarrel.convert.config import Config
from quarrel.convert.decoders import DECODERS
from quarrel.convert.encoders import ENCODERS
from quarrel.convert.hybrids import HYBRIDS
from quarrel.convert.rules import Architecture
from quarrel.errors import UnsupportedModel

CLASSES: Mapping[str, Architecture | Callable[[Config], Architecture]] = MappingProxyType(
    {name: arch for table in (DECODERS, ENCODERS, HYBRIDS) for names, arch in table.items() for name in names.split()}
)
"""By `architectures` of config.json."""


def architecture(config: Config) -> Architecture:
    """The architecture of a folder's model; raises UnsupportedModel for one that is not known."""
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    if not isinstance(name, str) or name not in CLASSES:
        said = f"the architecture of {config.path} is {str(name)[:80]!r}"
        raise UnsupportedModel(f"{said}; this version converts {', '.join(sorted(CLASSES))}")
    found = CLASSES[name]
    return found if isinstance(found, Architecture) else found(config)
