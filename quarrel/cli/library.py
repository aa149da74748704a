"""The models of this machine, by their names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quarrel.errors import ModelError, ModelNotFound, RequestError
from quarrel.gguf import hub, resolve, store
from quarrel.gguf.ollama import OllamaName, stores
from quarrel.gguf.ollama import find as find_in_stores
from quarrel.gguf.resolve import BUNDLED


@dataclass(frozen=True)
class Model:
    """A name, where it lies (demo, ollama or hub), and its files."""

    name: str
    where: str
    paths: tuple[Path, ...]

    @property
    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths)

    @property
    def changed(self) -> float:
        """Seconds since 1970."""
        return max(path.stat().st_mtime for path in self.paths)


def models() -> Iterator[Model]:
    """All that can be named without a path; what is damaged is left out."""
    for own in ("demo", "demo-chat"):
        yield Model(own, "demo", resolve(own).paths)
    for folder in stores():
        try:
            names = list(store.names_in(folder))
        except OSError:  # the service's store may be closed to us
            continue
        for name in names:
            try:
                found = find_in_stores(name, [folder])
            except (ModelError, ModelNotFound):
                continue
            if found is not None:
                yield Model(str(name), "ollama", found.paths)
    for text, paths in hub.listed(hub.cache_folder()):
        yield Model(f"hf://{text}", "hub", paths)


def remove(name: str) -> int:
    """Deletes the model of that name. Returns the bytes that it frees. Raises ModelNotFound and RequestError."""
    wanted = name.removeprefix("hf://")
    for model in models():
        if model.where == "hub" and model.name.removeprefix("hf://") == wanted:
            return hub.remove(model.paths)
    own = OllamaName.parse(name)
    if own is not None and not name.startswith("hf://"):
        try:
            return store.remove(own)
        except ModelNotFound:
            if any(model.name == str(own) for model in models()):
                raise RequestError(f"{name} lies in a store of another user: delete it with `ollama rm {name}`") from None
    if name in BUNDLED:
        raise RequestError(f"{name} is a part of Quarrel and stays")
    if Path(name).expanduser().exists():
        raise RequestError(f"{name} is a file: names of `quarrel list` are deleted here, files as any file is")
    raise ModelNotFound(f"there is no model {name!r}: `quarrel list` shows what can be deleted")
