"""Fetches models from the Hugging Face hub into its local cache, where every other tool finds them too.

The package `huggingface_hub` knows the addresses, the user's token, the retries and the progress bar. It drops what an
interrupted run had fetched, though, so the partial file and its way into the cache are kept here.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from quarrel.errors import DownloadError, ModelNotFound, installing
from quarrel.gguf.hub import HubName, choose, is_projector, projector
from quarrel.gguf.lock import hold

_REVISION = re.compile(r"[0-9a-f]{40}")
_ETAG = re.compile(r"[A-Za-z0-9_-]{1,128}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


Report = Callable[[str, int, int], None]
"""Told a file's name, the bytes of it that are here, and how many there will be."""


def download(name: HubName, cache: Path, *, progress: bool | Report = True) -> tuple[Path, ...]:
    """Fetches a model, all its shards, and returns their paths in the cache; what sees for it comes along. progress: bars
    on a terminal, or a function of the file, the bytes that are there and all of them.

    An interrupted download goes on where it stopped. Sizes are checked, and digests where the hub states them. Raises
    DownloadError where the package `huggingface_hub` or the network is missing, or a file does not arrive whole;
    ModelNotFound where the hub has no such repository or file.
    """
    try:
        from huggingface_hub import errors, utils
    except ImportError:
        raise DownloadError(f"downloading needs the package huggingface_hub: {installing('hub')}") from None
    # Read here, not when huggingface_hub was imported, so that what the user sets is what counts.
    endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    report = None if isinstance(progress, bool) else progress
    if progress is not True:
        utils.disable_progress_bars()
    try:
        return tuple(_files(name, cache, endpoint, report))
    except (errors.RepositoryNotFoundError, errors.EntryNotFoundError, errors.RevisionNotFoundError) as error:
        raise ModelNotFound(f"{endpoint} has no {name.repo_id} that we may read: {_sentence(error)}") from None
    except (ModelNotFound, DownloadError):
        raise
    except Exception as error:  # the hub's HTTP library, and so its errors, differ between versions
        raise DownloadError(f"{name.repo_id} could not be downloaded from {endpoint}: {_sentence(error)}") from error
    finally:
        if progress is not True:
            utils.enable_progress_bars()


def _files(name: HubName, cache: Path, endpoint: str, report: Report | None) -> Iterator[Path]:
    from huggingface_hub import HfApi

    info = HfApi(endpoint=endpoint).model_info(name.repo_id, files_metadata=True)
    sizes = {file.rfilename: file.size for file in info.siblings or ()}
    if info.sha is None or not _REVISION.fullmatch(info.sha):
        raise DownloadError(f"{endpoint} calls the revision of {name.repo_id} {info.sha!r}, wanted 40 hexadecimal digits")
    folder = cache / name.folder
    files = choose(sizes, name)
    for file in files:
        yield _file(name, file, sizes[file], folder, info.sha, endpoint, report)
    wanted = files[0].endswith(".gguf") and not is_projector(files[0])
    if wanted and (eyes := projector(sizes, files[0])) is not None:
        _file(name, eyes, sizes[eyes], folder, info.sha, endpoint, report)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text(info.sha)


def _file(
    name: HubName, file: str, size: int | None, folder: Path, revision: str, endpoint: str, report: Report | None
) -> Path:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    pointer = folder / "snapshots" / revision / file
    if pointer.is_file() and (size is None or pointer.stat().st_size == size):
        return pointer
    url = hf_hub_url(name.repo_id, file, revision=revision, endpoint=endpoint)
    found = get_hf_file_metadata(url)
    if found.etag is None or not _ETAG.fullmatch(found.etag) or found.size is None:
        raise DownloadError(f"{url} states no usable size and digest, so the file could not be checked: try again later")
    if size is not None and found.size != size:
        raise DownloadError(f"{url} has {found.size} bytes, but the repository lists {size}: try again later")
    blob = folder / "blobs" / found.etag
    if not blob.is_file() or blob.stat().st_size != found.size:
        blob.parent.mkdir(parents=True, exist_ok=True)
        _transfer(url, blob, found.size, file, report)
    pointer.parent.mkdir(parents=True, exist_ok=True)
    pointer.unlink(missing_ok=True)
    pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    return pointer


class _Reported:
    """A file that says how long it is after each write."""

    def __init__(self, stream: BinaryIO, report: Callable[[int], None]) -> None:
        self._stream, self._report = stream, report

    def write(self, data: bytes) -> int:
        written = self._stream.write(data)
        self._report(self._stream.tell())
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _transfer(url: str, blob: Path, size: int, shown: str, report: Report | None) -> None:
    """Fills the blob's partial file, from where it ends, and moves it into place when it is whole."""
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    part = blob.with_name(blob.name + ".part")
    # Compressed transfer would make the stated size meaningless, and a small answer arbitrarily large.
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    with part.open("ab") as stream:
        hold(stream, part)
        if stream.tell() > size:
            stream.truncate(0)
            stream.seek(0)
        target: Any = stream if report is None else _Reported(stream, lambda done: report(shown, done, size))
        http_get(url, target, resume_size=stream.tell(), headers=headers, expected_size=size, displayed_filename=shown)
        stream.flush()
        _check(part, blob.name, size)
        part.replace(blob)


def _check(part: Path, etag: str, size: int) -> None:
    wrong = ""
    if (found := part.stat().st_size) != size:
        wrong = f"{found} bytes, wanted {size}"
    elif _SHA256.fullmatch(etag):  # for large files the hub's tag is the digest of the content
        with part.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != etag:
            wrong = f"the digest {digest}, wanted {etag}"
    if wrong:
        part.unlink()  # going on from a wrong beginning would never end well
        raise DownloadError(f"{part.name} arrived with {wrong}: download it again")


def _sentence(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
