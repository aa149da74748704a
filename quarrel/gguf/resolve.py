"""From what a user types to the files of a model: a path, an Ollama name, a Hugging Face name, or the bundled demo."""

from __future__ import annotations

import importlib.resources
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from quarrel.errors import ModelNotFound
from quarrel.gguf import download as transfer
from quarrel.gguf import hub, ollama
from quarrel.gguf.file import shard_paths

DEMO_NAMES = ("demo", "quarrel-demo")
HUB_SCHEME = "hf://"


@dataclass(frozen=True)
class Resolved:
    """The files of a model, all shards in order, and where they were found: demo, path, ollama or hub; or the folder of a
    model in safetensors.

    The texts are the template, system and params layers of an Ollama model, as they stand there.
    """

    paths: tuple[Path, ...]
    source: str
    template: str | None = None
    system: str | None = None
    params: str | None = None


def resolve(name: str, *, download: bool = True) -> Resolved:
    """Finds the model called `name`.

    In this order: `demo`, the bundled model; `hf://owner/repo[:file or quant]`, from the Hugging Face cache or, with
    `download`, fetched into it; a path to a GGUF file, to any shard of one, or to a folder in safetensors; an Ollama name
    in a local Ollama store; `owner/repo[:file or quant]` in the Hugging Face cache. Raises ModelNotFound, which lists where
    it looked.
    """
    if name in DEMO_NAMES:
        return Resolved((_demo(),), "demo")
    if name.startswith(HUB_SCHEME):
        return _from_hub(name, download)
    looked = []
    try:
        path = Path(name).expanduser()
        if path.is_file():
            return Resolved(_whole(shard_paths(path)), "path")
        if (path / "config.json").is_file():
            return Resolved((path,), "folder")
        looked.append(f"{path} is {_instead(path)}")
    except (OSError, ValueError, RuntimeError) as error:
        looked.append(f"it is no path ({error})")
    if not _is_only_a_path(name):
        found = _from_stores(name, looked)
        if found is not None:
            return found
    raise ModelNotFound(
        f"no model {name!r} was found: {'; '.join(looked)}. Name a GGUF file, a model pulled by Ollama,"
        f" or download one with {HUB_SCHEME}owner/repo"
    )


def pull(name: str, *, progress: bool | transfer.Report = True) -> Resolved:
    """Downloads `hf://owner/repo[:file or quant]` (the scheme may be left out), or finds that it is here already.

    Raises ModelNotFound and DownloadError.
    """
    parsed = _hub_name(name)
    return Resolved(transfer.download(parsed, hub.cache_folder(), progress=progress), "hub")


def _from_stores(name: str, looked: list[str]) -> Resolved | None:
    ollama_name = ollama.OllamaName.parse(name)
    if ollama_name is not None:
        folders = ollama.stores()
        model = ollama.find(ollama_name, folders)
        if model is not None:
            return Resolved(model.paths, "ollama", model.template, model.system, model.params)
        looked.append(f"the Ollama stores {', '.join(map(str, folders))} do not have it")
    hub_name = hub.HubName.parse(name)
    if hub_name is not None:
        cache = hub.cache_folder()
        files = hub.find(hub_name, cache)
        if files is not None:
            return Resolved(files, "hub")
        looked.append(f"the Hugging Face cache {cache} does not have it")
    return None


def _from_hub(name: str, download: bool) -> Resolved:
    parsed = _hub_name(name)
    cache = hub.cache_folder()
    files = hub.find(parsed, cache)
    if files is not None:
        return Resolved(files, "hub")
    if not download:
        raise ModelNotFound(f"no model {name!r} was found: the Hugging Face cache {cache} does not have it")
    return pull(name)


def _hub_name(name: str) -> hub.HubName:
    parsed = hub.HubName.parse(name.removeprefix(HUB_SCHEME))
    if parsed is None:
        raise ModelNotFound(f"{name!r} is no name on the hub, wanted {HUB_SCHEME}owner/repo[:file or quantisation]")
    return parsed


def _is_only_a_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or name == "." or (name.endswith(".gguf") and ":" not in name)


def _instead(path: Path) -> str:
    """What is at a path that is no file, or nearest to it."""
    if path.is_dir():
        names = sorted(entry.name for entry in path.glob("*.gguf"))[:4]
        listed = f", in which there {'is' if len(names) == 1 else 'are'} {', '.join(names[:3])}" if names else ""
        return f"a folder{listed}{' and more' if len(names) > 3 else ''}"
    near = get_close_matches(path.stem, [entry.stem for entry in path.parent.glob("*.gguf")], 1)
    return f"no file, but there is {path.parent / near[0]}.gguf" if near else "no file"


def _whole(paths: tuple[Path, ...]) -> tuple[Path, ...]:
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ModelNotFound(f"the model is split in {len(paths)} files, of which {', '.join(missing[:5])} are not there")
    return paths


def _demo() -> Path:
    folder = importlib.resources.files("quarrel").joinpath("demo")
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name) if folder.is_dir() else ():
        if entry.name.endswith(".gguf"):
            return Path(str(entry))
    raise ModelNotFound(f"the demo model is not in {folder}: this installation is incomplete, install quarrel again")
