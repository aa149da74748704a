"""Finds a model in a local Ollama store: a name leads to a manifest, its layers to blobs. `gguf/store.py` writes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quarrel.errors import ModelError, ModelNotFound, UnsupportedModel

LAYER = "application/vnd.ollama.image."
# Where the Linux packages and the install script keep the service's models.
SERVICE_STORES = (
    Path("/usr/share/ollama/.ollama/models"),
    Path("/var/lib/ollama/.ollama/models"),
    Path("/var/lib/ollama/models"),
)
MAX_TEXT = 4 << 20
DEFAULTS = ("registry.ollama.ai", "library", "")
"""Host and namespace of a name that has none."""

# A part cannot start with a dot or hold a separator, so no name can leave the store.
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}")
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,349}")
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")


@dataclass(frozen=True)
class OllamaName:
    """A name with its defaults filled in: [host/][namespace/]model[:tag]."""

    host: str
    namespace: str
    model: str
    tag: str

    def __str__(self) -> str:
        """As short as it can be typed."""
        parts = [self.host, self.namespace, self.model]
        while len(parts) > 1 and parts[0] == DEFAULTS[3 - len(parts)]:
            del parts[0]
        return f"{'/'.join(parts)}:{self.tag}"

    @classmethod
    def parse(cls, text: str) -> OllamaName | None:
        """None where the text breaks Ollama's rules, for instance by a part that starts with a dot."""
        path, _, tag = text.rpartition(":") if ":" in text.rsplit("/", 1)[-1] else (text, "", "latest")
        parts = path.split("/")
        if len(parts) > 3:
            return None
        host, namespace, model = *DEFAULTS[: 3 - len(parts)], *parts
        if not _HOST.fullmatch(host) or not all(_PART.fullmatch(part) for part in (namespace, model, tag)):
            return None
        return cls(host, namespace, model, tag)


@dataclass(frozen=True)
class OllamaModel:
    """What a manifest leads to. The texts are those of its template, system and params layers."""

    paths: tuple[Path, ...]
    template: str | None
    system: str | None
    params: str | None
    projector: Path | None = None
    """By which the model sees images."""


def stores() -> list[Path]:
    """The folders that may hold models here, most specific first."""
    own = os.environ.get("OLLAMA_MODELS")
    return [*([Path(own)] if own else []), Path.home() / ".ollama" / "models", *SERVICE_STORES]


def find(name: OllamaName, folders: list[Path]) -> OllamaModel | None:
    """The model of that name in the first store that has it. Raises ModelError for a manifest that cannot be used."""
    for store in folders:
        try:
            manifest = manifest_of(name, store)
            if manifest is not None:
                return _read(store, manifest)
        except PermissionError:
            continue  # the service's store may be closed to us, and another may still have the model
    return None


def manifest_of(name: OllamaName, store: Path) -> Path | None:
    """The file that says what a model of the store is made of."""
    return _child(store / "manifests", name.host, name.namespace, name.model, name.tag)


def _child(folder: Path, *parts: str) -> Path | None:
    """A file below `folder`; Ollama compares names without regard to case, so an exact entry is only preferred."""
    for i, part in enumerate(parts):
        exact = folder / part
        if not exact.exists():
            if not folder.is_dir():
                return None
            same = sorted(entry for entry in folder.iterdir() if entry.name.lower() == part.lower())
            if not same:
                return None
            exact = same[0]
        if exact.is_dir() == (i == len(parts) - 1):
            return None
        folder = exact
    return folder


def _read(store: Path, path: Path) -> OllamaModel:
    texts: dict[str, str] = {}
    models: list[Path] = []
    projectors: list[Path] = []
    kinds = set()
    for kind, digest, size in layers_of(path):
        kinds.add(kind)
        if kind in ("model", "projector"):
            (models if kind == "model" else projectors).append(_blob(store, path, digest, size))
        elif kind in ("template", "system", "params"):
            blob = _blob(store, path, digest, size)
            if blob.stat().st_size > MAX_TEXT:
                raise ModelError(f"the {kind} of the Ollama manifest {path} is larger than {MAX_TEXT} bytes")
            texts[kind] = blob.read_text("utf-8", "replace")
    if "adapter" in kinds:
        raise UnsupportedModel(f"the Ollama model {path} adds a LoRA adapter, which Quarrel does not apply: merge it first")
    if not models:
        if "tensor" in kinds:
            raise UnsupportedModel(f"the Ollama model {path} is stored as safetensors, not GGUF: pull a tag that is GGUF")
        raise ModelError(f"the Ollama manifest {path} names no model layer: pull the model again")
    rest = (texts.get("template"), texts.get("system"), texts.get("params"))
    return OllamaModel(tuple(models), *rest, projectors[0] if projectors else None)


def layers_of(manifest: Path | bytes, *, every: bool = False, where: str = "") -> Iterator[tuple[str, str, int | None]]:
    """Kind, digest ("sha256:" and 64 digits) and size of each layer. every: the configuration too, as a layer.

    where: what the manifest is called in an error, where it is given as bytes. Raises ModelError.
    """
    if isinstance(manifest, Path):
        where, size = str(manifest), manifest.stat().st_size
        if size > MAX_TEXT:
            raise ModelError(f"the Ollama manifest {where} is larger than {MAX_TEXT} bytes")
        manifest = manifest.read_bytes()
    if len(manifest) > MAX_TEXT:
        raise ModelError(f"the Ollama manifest {where} is larger than {MAX_TEXT} bytes")
    try:
        found: Any = json.loads(manifest)
        for layer in (*found["layers"], *((found["config"],) if every and "config" in found else ())):
            kind, digest, size = layer["mediaType"], layer["digest"], layer.get("size")
            if not isinstance(kind, str) or not isinstance(digest, str) or not isinstance(size, int | None):
                raise TypeError("a layer has fields of the wrong type")
            match = _DIGEST.fullmatch(digest)
            if match is None:
                sound = "wanted sha256: and 64 hexadecimal digits"
                raise ModelError(f"the Ollama manifest {where} holds {digest[:80]!r}, {sound}")
            yield kind.removeprefix(LAYER), f"sha256:{match[1]}", size
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"the Ollama manifest {where} is malformed: {error!r}") from None


def _blob(store: Path, manifest: Path, digest: str, size: int | None) -> Path:
    # Old versions of Ollama wrote the colon into the file's name.
    blobs = [store / "blobs" / digest.replace(":", separator) for separator in "-:"]
    blob = next((blob for blob in blobs if blob.is_file()), None)
    if blob is None:
        raise ModelNotFound(f"the Ollama manifest {manifest} names {blobs[0]}, which is not there: pull the model again")
    if size is not None and blob.stat().st_size != size:
        raise ModelError(f"{blob} has {blob.stat().st_size} bytes, wanted {size}: pull the model again")
    return blob
