"""What changes an Ollama store: further names, names taken away, models fetched from a registry.

All of it is in the user's own store, in Ollama's layout: a manifest of JSON for each name, which lists files by
their digests.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from quarrel.errors import DownloadError, ModelError, ModelNotFound, RequestError
from quarrel.gguf.digest import Digests
from quarrel.gguf.lock import hold
from quarrel.gguf.ollama import LAYER, MAX_TEXT, OllamaName, layers_of, manifest_of, stores

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
PIECE = 1 << 20
SECONDS = 60.0
"""How long a registry may be silent."""

Report = Callable[[int, int], None]
"""Told the bytes that are here, and how many there will be."""


def own_store() -> Path:
    """The user's store, where Ollama too would put what it pulls."""
    given = os.environ.get("OLLAMA_MODELS")
    return Path(given) if given else Path.home() / ".ollama" / "models"


def names_in(store: Path) -> Iterator[OllamaName]:
    """All that a store has a manifest of."""
    for path in sorted((store / "manifests").glob("*/*/*/*")):
        name = OllamaName(*path.relative_to(store / "manifests").parts)
        if path.is_file() and OllamaName.parse(str(name)) == name:
            yield name


def copy(source: OllamaName, target: OllamaName) -> None:
    """Another name for a model of any store; its files are shared where the disk allows it. Raises ModelNotFound."""
    for store in stores():
        found = manifest_of(source, store)
        if found is not None:
            own = own_store()
            if store != own:
                for _, digest, _ in layers_of(found, every=True):
                    _share(store / "blobs" / digest.replace(":", "-"), own, digest)
            _write_manifest(own, target, found.read_bytes())
            return
    raise ModelNotFound(f"no model {str(source)!r} is in the Ollama stores {', '.join(map(str, stores()))}")


def adopt(paths: Sequence[Path], target: OllamaName, projector: Path | None = None) -> None:
    """A name for files of anywhere."""
    own, layers = own_store(), []
    for path in (*paths, *([] if projector is None else [projector])):
        digest = f"sha256:{Digests().of([path]).result()}"
        _share(path.resolve(), own, digest)
        kind = "projector" if path == projector else "model"
        layers.append({"mediaType": f"{LAYER}{kind}", "digest": digest, "size": path.stat().st_size})
    config = b"{}"
    digest = f"sha256:{hashlib.sha256(config).hexdigest()}"
    (own / "blobs").mkdir(parents=True, exist_ok=True)
    (own / "blobs" / digest.replace(":", "-")).write_bytes(config)
    head = {"mediaType": "application/vnd.docker.container.image.v1+json", "digest": digest, "size": len(config)}
    manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": head, "layers": layers}
    _write_manifest(own, target, json.dumps(manifest).encode())


def remove(name: OllamaName) -> int:
    """Takes a name out of the user's store, and the files that no other name there uses. Returns how many bytes that frees.

    Raises ModelNotFound; and ModelError before anything is gone, where another manifest cannot be read.
    """
    own = own_store()
    path = manifest_of(name, own)
    if path is None:
        raise ModelNotFound(f"the Ollama store {own} has no {str(name)!r}")
    digests = {digest for _, digest, _ in layers_of(path, every=True)}
    for other in (own / "manifests").glob("*/*/*/*"):
        if other.is_file() and other != path:
            digests -= {digest for _, digest, _ in layers_of(other, every=True)}
    path.unlink()
    freed = 0
    for digest in digests:
        blob = own / "blobs" / digest.replace(":", "-")
        if blob.is_file():
            freed += blob.stat().st_size if blob.stat().st_nlink == 1 else 0
            blob.unlink()
    return freed


def fetch(name: OllamaName, registry: str, report: Report | None = None) -> None:
    """Fetches a model into the user's store. registry: a URL. An interrupted download goes on where it stopped.

    Every file is checked against its digest. Raises ModelNotFound and DownloadError.
    """
    own, base = own_store(), f"{registry.rstrip('/')}/v2/{name.namespace}/{name.model}"
    if not registry.startswith(("https://", "http://")):
        raise RequestError(f"the registry is {registry!r}, wanted a URL such as https://registry.ollama.ai")
    try:
        with _open(f"{base}/manifests/{name.tag}", {"Accept": MANIFEST}) as answer:
            manifest = answer.read(MAX_TEXT + 1)
        layers = list(layers_of(manifest, every=True, where=f"{base}/manifests/{name.tag}"))
        total, before = sum(size or 0 for _, _, size in layers), 0
        (own / "blobs").mkdir(parents=True, exist_ok=True)
        if total > (free := shutil.disk_usage(own).free):
            raise DownloadError(f"{name} has {total} bytes and {own} has {free} free: make room, or set OLLAMA_MODELS")
        for _, digest, size in layers:
            _blob(f"{base}/blobs/{digest}", own, digest, size or 0, _part_of(report, before, total))
            before += size or 0
        _write_manifest(own, name, manifest)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            raise ModelNotFound(f"{registry} has no {name}") from None
        raise DownloadError(f"{name} could not be downloaded from {registry}: it answers {error.code}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise DownloadError(f"{name} could not be downloaded from {registry}: {reason or type(error).__name__}") from error


def _part_of(report: Report | None, before: int, total: int) -> Callable[[int], None] | None:
    return None if report is None else lambda done: report(before + done, total)


def _open(url: str, headers: dict[str, str]) -> Any:
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=SECONDS)


def _blob(url: str, store: Path, digest: str, size: int, report: Callable[[int], None] | None) -> None:
    blob = store / "blobs" / digest.replace(":", "-")
    if blob.is_file() and blob.stat().st_size == size:
        return
    part, found = blob.with_name(f"{blob.name}-partial-quarrel"), hashlib.sha256()
    with part.open("a+b") as stream:
        hold(stream, part)
        stream.seek(0)
        while piece := stream.read(PIECE):
            found.update(piece)
        done = stream.tell()
        if done < size or not size:
            with _open(url, {"Range": f"bytes={done}-"} if done else {}) as answer:
                if done and answer.status != 206:  # it sends the file from its beginning
                    done, found = 0, hashlib.sha256()
                    stream.truncate(0)
                while piece := answer.read(PIECE):
                    stream.write(piece)
                    found.update(piece)
                    done += len(piece)
                    if done > size:
                        break
                    if report is not None:
                        report(done)
        stream.flush()
        if done < size:
            raise DownloadError(f"{url} broke off at {done} of {size} bytes: run it again, which goes on from there")
        if done != size or f"sha256:{found.hexdigest()}" != digest:
            part.unlink()  # going on from a wrong beginning would never end well
            raise DownloadError(f"{url} arrived with {done} bytes and sha256:{found.hexdigest()}, wanted {size}: try again")
        part.replace(blob)


def _share(blob: Path, store: Path, digest: str) -> None:
    """The file in this store too: the same one, or a copy where it lies on another disk."""
    target = store / "blobs" / digest.replace(":", "-")
    if target.exists() or not blob.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}-partial-quarrel")
    try:
        os.link(blob, target)
    except OSError:
        shutil.copyfile(blob, partial)
        partial.replace(target)


def _write_manifest(store: Path, name: OllamaName, data: bytes) -> None:
    path = store / "manifests" / name.host / name.namespace / name.model / name.tag
    if path.is_dir():
        raise ModelError(f"{path} is a folder, wanted a manifest: remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(data)
    partial.replace(path)
