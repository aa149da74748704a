"""What a model's file says of itself, its weights unread."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quarrel.convert import open_file, seeing_folder
from quarrel.gguf import file_type
from quarrel.llm.explain import quantization_of
from quarrel.llm.open import ModelName, find


@dataclass(frozen=True)
class FileFacts:
    """`keys`: the file's metadata, lists of it None unless wanted. `system` and `params` are of an Ollama store.
    `projector`: by which it sees images, where one lies beside it; the folder itself of a model in safetensors."""

    paths: tuple[Path, ...]
    nbytes: int
    keys: Mapping[str, Any]
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    """Name, block format and dims of each, as the file has them."""
    parameters: int
    quantization: str
    system: str | None = None
    params: str | None = None
    projector: Path | None = None

    @property
    def architecture(self) -> str:
        return str(self.keys.get("general.architecture", ""))

    @property
    def chat_template(self) -> str | None:
        found = self.keys.get("tokenizer.chat_template")
        return found if isinstance(found, str) else None

    def count(self, key: str) -> int:
        """A number that the architecture has under this name, such as `context_length`; 0 for none."""
        found = self.keys.get(f"{self.architecture}.{key}")
        return found if isinstance(found, int) else 0


def file_facts(name: ModelName, *, lists: bool = False) -> FileFacts:
    """Of a model by the names that `load` takes. Raises ModelNotFound and GGUFError. lists: also lists of the metadata."""
    found = find(name)
    with open_file(found.paths) as file:
        metadata = file.metadata
        # A list is not decoded to find out that it is one.
        keys = {key: _plain(metadata[key]) if lists or metadata.length(key) is None else None for key in metadata}
        return FileFacts(
            paths=found.paths,
            nbytes=sum(path.stat().st_size for path in file.files),
            keys=keys,
            tensors=tuple((t.name, t.type.name, tuple(map(int, t.dims))) for t in file.tensors.values()),
            parameters=sum(math.prod(t.dims) for t in file.tensors.values()),
            quantization=file_type(keys.get("general.file_type")) or quantization_of(file),
            system=found.system,
            params=found.params,
            projector=found.projector or seeing_folder(found.paths),
        )


def _plain(value: Any) -> Any:
    """As JSON has it: what is no finite number is null."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if isinstance(value, str):  # pieces of vocabularies need not be texts
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return None if isinstance(value, float) and not math.isfinite(value) else value
