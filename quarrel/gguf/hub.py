"""Names of models on the Hugging Face hub, and the files that they mean in its local cache."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from quarrel.errors import ModelNotFound
from quarrel.gguf.file import SPLIT_NAME

# Tried in this order where a name does not say which file of a repository it means.
PREFERRED = ("Q4_K_M", "Q4_0", "Q8_0")

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
CONFIG = "config.json"
_OF_FOLDER = re.compile(
    r"[A-Za-z0-9][\w.-]*\.(safetensors|json|jinja|tiktoken|model)|(vocab|merges)\.txt|tokenization_\w+\.py"
    r"|1_Pooling/config\.json|[23]_Dense/(config\.json|model\.safetensors)"
)
"""Of a model in safetensors: weights, what describes them, and the tokenizer, whose program is read and never run."""
_PROJECTOR = re.compile(r"mmproj.*\.gguf$", re.IGNORECASE)
_NO_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)
HOSTS = ("hf.co/", "huggingface.co/")


@dataclass(frozen=True)
class HubName:
    """owner/repo[:choice], where choice is a file of the repository or a quantisation such as Q4_K_M."""

    owner: str
    repo: str
    choice: str | None

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """None where the text is no such name, or would lead out of its folder."""
        for host in HOSTS:
            text = text.removeprefix(host)
        path, colon, choice = text.partition(":")
        owner, _, repo = path.partition("/")
        if not _PART.fullmatch(owner) or not _PART.fullmatch(repo) or ".." in path or "--" in path:
            return None
        if colon and not _inside(choice):
            return None
        return cls(owner, repo, choice or None)

    @property
    def repo_id(self) -> str:
        return f"{self.owner}/{self.repo}"

    @property
    def folder(self) -> str:
        """Its folder in the cache."""
        return f"models--{self.owner}--{self.repo}"


def cache_folder() -> Path:
    """Where huggingface_hub keeps its files, by its own rules."""
    for variable, below in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        if folder := os.environ.get(variable):
            return Path(folder).expanduser() / below
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "huggingface" / "hub"


def find(name: HubName, cache: Path) -> tuple[Path, ...] | None:
    """The files of a model that the cache has whole, from the newest snapshot that has them."""
    for snapshot in _snapshots(cache / name.folder):
        files = {_below(path, snapshot): path for path in snapshot.rglob("*.gguf") if path.is_file()}
        try:
            return tuple(files[file] for file in choose(files, name))
        except ModelNotFound:
            if name.choice is None and _is_whole_folder(snapshot):
                return (snapshot,)
    return None


def choose(files: Iterable[str], name: HubName) -> tuple[str, ...]:
    """The file, or all shards, that a name means among the files of its repository. Where there is no GGUF and the name
    says no more, all that a model in safetensors is of, CONFIG last. Raises ModelNotFound."""
    files = list(files)
    if name.choice is not None and name.choice in files and is_projector(name.choice):
        return (name.choice,)
    whole = _models_among(files)
    if not whole and name.choice is None and (folder := _folder_among(files)):
        return folder
    if not whole:
        raise ModelNotFound(f"{name.repo_id} has no whole GGUF model among its files")
    wanted = [name.choice] if name.choice else [] if len(whole) == 1 else list(PREFERRED)
    for choice in wanted:
        if found := [stem for stem, shards in whole.items() if _matches(choice, stem, shards)]:
            return tuple(whole[min(found, key=lambda stem: (len(stem), stem))])
    if not wanted:
        return tuple(*whole.values())
    raise ModelNotFound(
        f"{name.repo_id} has no file that fits {name.choice or 'a usual quantisation'!r}: name one of"
        f" {', '.join(list(whole)[:20])}"
    )


def is_projector(file: str) -> bool:
    """Whether it is what sees, by its name."""
    return _PROJECTOR.search(PurePosixPath(file).name) is not None


def projector(files: Iterable[str], model: str) -> str | None:
    """The file by which a model among them sees images: in its folder, or in one above; in 16 bits, if there is one."""
    above = [str(folder) for folder in PurePosixPath(model).parents]
    found = {file: PurePosixPath(file) for file in files if _inside(file)}

    def rank(file: str) -> tuple[int, int, str]:
        name = found[file].name.lower()
        return above.index(str(found[file].parent)), 1 if "bf16" in name else 2 * ("f16" not in name), file

    fitting = [f for f, path in found.items() if is_projector(f) and str(path.parent) in above]
    return min(fitting, key=rank, default=None)


def projector_of(model: Path) -> Path | None:
    """The same of a file in the cache."""
    folder = _snapshot_of(model)
    if model == folder:  # a model in safetensors
        return None
    found = projector((_below(path, folder) for path in folder.rglob("*.gguf") if path.is_file()), _below(model, folder))
    return None if found is None else folder / found


def listed(cache: Path) -> Iterator[tuple[str, tuple[Path, ...]]]:
    """All whole models of the cache: how `find` knows each, and its files."""
    for folder in sorted(cache.glob("models--*--*")):
        name = HubName.parse("/".join(folder.name.split("--")[1:]))
        for snapshot in _snapshots(folder)[:1] if name is not None and name.folder == folder.name else ():
            files = [_below(path, snapshot) for path in snapshot.rglob("*.gguf") if path.is_file()]
            models = _models_among(files)
            for shards in models.values():
                choice = f":{shards[0]}" if len(models) > 1 else ""
                yield f"{name.repo_id if name else ''}{choice}", tuple(snapshot / file for file in shards)


def remove(files: Iterable[Path]) -> int:
    """Deletes files of the cache, and what their links alone lead to; and what sees, where no model of the repository is
    left. Returns the bytes that it frees."""
    freed, files = 0, list(files)
    snapshot = _snapshot_of(files[0])
    rest = {path: _below(path, snapshot) for path in snapshot.rglob("*.gguf") if path not in files}
    if not _models_among(rest.values()):
        files += [path for path in rest if _PROJECTOR.search(path.name)]
    for file in files:
        blob = file.resolve()
        file.unlink()
        folder = next(parent for parent in file.parents if parent.name == "snapshots")
        if any(other.resolve() == blob for other in folder.rglob("*") if other.is_symlink()):
            continue
        if blob != file and folder.parent.resolve() in blob.parents:
            freed += blob.stat().st_size
            blob.unlink()
    return freed


def _models_among(files: Iterable[str]) -> dict[str, list[str]]:
    """The files of each whole model, all its shards in order, by its name without `.gguf`."""
    models: dict[str, list[str]] = {}
    complete: dict[str, int] = {}
    for file in sorted(files):
        path = PurePosixPath(file)
        if path.suffix != ".gguf" or not _inside(file) or _NO_MODEL.search(path.name):
            continue
        split = SPLIT_NAME.fullmatch(path.name)
        stem = str(path.with_name(split["stem"] if split else path.stem))
        models.setdefault(stem, []).append(file)
        complete[stem] = int(split["count"]) if split else 1
    return {stem: shards for stem, shards in models.items() if len(shards) == complete[stem]}


def _folder_among(files: Iterable[str]) -> tuple[str, ...]:
    """What a model in safetensors is of; none where a file of it is missing."""
    found = [file for file in files if _OF_FOLDER.fullmatch(file)]
    own = any(file.startswith("model") and file.endswith(".safetensors") for file in found)
    found = [file for file in found if not (own and file.startswith("consolidated"))]
    if CONFIG not in found or not any(file.endswith(".safetensors") for file in found):
        return ()
    return (*sorted(file for file in found if file != CONFIG), CONFIG)


def _is_whole_folder(snapshot: Path) -> bool:
    if not _folder_among(path.name for path in snapshot.iterdir() if path.is_file()):
        return False
    try:
        named = json.loads((snapshot / "model.safetensors.index.json").read_text("utf-8"))["weight_map"].values()
        return all((snapshot / str(file)).is_file() for file in named)
    except FileNotFoundError:
        return True
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False


def _snapshot_of(file: Path) -> Path:
    """The folder of the revision that a file of the cache belongs to."""
    return next(path for path in (file, *file.parents) if path.parent.name == "snapshots")


def _below(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def _snapshots(folder: Path) -> list[Path]:
    try:
        revision = (folder / "refs" / "main").read_text("utf-8", "replace").strip()
        snapshots = sorted((folder / "snapshots").iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    except FileNotFoundError:
        revision = ""
        snapshots = list((folder / "snapshots").glob("*"))
    return sorted(snapshots, key=lambda path: path.name != revision)


def _matches(choice: str, stem: str, shards: list[str]) -> bool:
    if choice.lower().endswith(".gguf"):
        return any(choice in (file, PurePosixPath(file).name) for file in shards)
    return re.search(rf"(^|[-_./]){re.escape(choice)}($|[-_./])", stem, re.IGNORECASE) is not None


def _inside(path: str) -> bool:
    """Whether a relative name stays in its folder, on any system."""
    return bool(path) and not re.search(r"[\\:\0]", path) and all(part not in ("", ".", "..") for part in path.split("/"))
