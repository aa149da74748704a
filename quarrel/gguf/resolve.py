"""From what a user types to the files of a model: a path, an Ollama name, a Hugging Face name, or the bundled demo."""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from quarrel.errors import ModelNotFound
from quarrel.gguf import hub
from quarrel.gguf.file import shard_paths

if TYPE_CHECKING:  # a file by its path needs neither
    from quarrel.gguf import download as transfer
    from quarrel.gguf import ollama

BUNDLED = {
    "demo": "quarrel-demo-11M-Q8_0.gguf",
    "quarrel-demo": "quarrel-demo-11M-Q8_0.gguf",
    "demo-chat": "quarrel-chat-17M-Q8_0.gguf",
}
"""The models that are a part of Quarrel: `demo` continues stories, `demo-chat` talks."""
HUB_SCHEME = "hf://"


@dataclass(frozen=True)
class Resolved:
    """The files of a model, all shards in order, and where they were found: demo, path, ollama or hub; or the folder of a
    model in safetensors.

    The texts are the template, system and params layers of an Ollama model, as they stand there. projector: the file by
    which it sees images, where one lies beside it.
    """

    paths: tuple[Path, ...]
    source: str
    template: str | None = None
    system: str | None = None
    params: str | None = None
    projector: Path | None = None

    @classmethod
    def of_store(cls, model: ollama.OllamaModel) -> Resolved:
        return cls(model.paths, "ollama", model.template, model.system, model.params, model.projector)

    @classmethod
    def of_hub(cls, files: tuple[Path, ...]) -> Resolved:
        return cls(files, "hub", projector=hub.projector_of(files[0]))


def resolve(name: str, *, download: bool = True) -> Resolved:
    """Finds the model called `name`.

    In this order: `demo` and `demo-chat`, the bundled models; `hf://owner/repo[:file or quant]`, from the Hugging Face
    cache or, with `download`, fetched into it; a path to a GGUF file, to any shard of one, or to a folder in safetensors;
    an Ollama name in a local Ollama store; `owner/repo[:file or quant]` in the Hugging Face cache. Raises ModelNotFound,
    which lists where it looked.
    """
    if name in BUNDLED:
        return Resolved((_bundled(BUNDLED[name]),), "demo")
    if name.startswith(HUB_SCHEME):
        return _from_hub(name, download)
    looked = []
    try:
        path = Path(name).expanduser()
        if path.is_file():
            return Resolved(_whole(shard_paths(path)), "path", projector=_beside(path))
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


def pull(name: str, *, progress: bool | transfer.Report = True, registry: str | None = None) -> Resolved:
    """Downloads `hf://owner/repo[:file or quant]` (the scheme may be left out), or finds that it is here already.

    registry: the URL of an Ollama registry, from which names such as `mistral:7b` come. Raises ModelNotFound and
    DownloadError.
    """
    from quarrel.gguf import ollama

    own = None if name.startswith((HUB_SCHEME, *hub.HOSTS)) else ollama.OllamaName.parse(name)
    if own is not None and (registry is not None or "/" not in name):
        return _from_registry(own, registry, progress)
    parsed = _hub_name(name)
    return _fetched(parsed, progress)


def _from_registry(name: ollama.OllamaName, registry: str | None, progress: bool | transfer.Report) -> Resolved:
    from quarrel.gguf import ollama

    found = ollama.find(name, ollama.stores())
    if found is None:
        if registry is None:
            raise ModelNotFound(
                f"{name} is a name of an Ollama registry, and none is given: say --registry https://registry.ollama.ai,"
                f" pull it with ollama, or name a model of Hugging Face, such as {HUB_SCHEME}owner/repo:Q4_K_M"
            )
        from quarrel.gguf import store  # only here: the library of HTTP takes long to import

        with _bar(str(name), progress) as report:
            store.fetch(name, registry, report)
        found = ollama.find(name, ollama.stores())
        assert found is not None
    return Resolved.of_store(found)


@contextmanager
def _bar(name: str, progress: bool | transfer.Report) -> Iterator[Callable[[int, int], None] | None]:
    """Whom a download tells how far it is."""
    if not isinstance(progress, bool):
        yield lambda done, total: progress(name, done, total)
    elif not progress:
        yield None
    else:
        from tqdm import tqdm

        with tqdm(desc=name, unit="B", unit_scale=True, unit_divisor=1024) as bar:

            def show(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            yield show


def _from_stores(name: str, looked: list[str]) -> Resolved | None:
    from quarrel.gguf import ollama

    ollama_name = ollama.OllamaName.parse(name)
    if ollama_name is not None:
        folders = ollama.stores()
        model = ollama.find(ollama_name, folders)
        if model is not None:
            return Resolved.of_store(model)
        looked.append(f"the Ollama stores {', '.join(map(str, folders))} do not have it")
    hub_name = hub.HubName.parse(name)
    if hub_name is not None:
        cache = hub.cache_folder()
        files = hub.find(hub_name, cache)
        if files is not None:
            return Resolved.of_hub(files)
        looked.append(f"the Hugging Face cache {cache} does not have it")
    return None


def _from_hub(name: str, download: bool) -> Resolved:
    parsed = _hub_name(name)
    cache = hub.cache_folder()
    files = hub.find(parsed, cache)
    if files is not None:
        return Resolved.of_hub(files)
    if not download:
        raise ModelNotFound(f"no model {name!r} was found: the Hugging Face cache {cache} does not have it")
    return pull(name)


def _fetched(name: hub.HubName, progress: bool | transfer.Report) -> Resolved:
    from quarrel.gguf import download as transfer

    files = transfer.download(name, hub.cache_folder(), progress=progress)
    return Resolved.of_hub((files[-1].parent,) if files[-1].name == hub.CONFIG else files)


def _hub_name(name: str) -> hub.HubName:
    parsed = hub.HubName.parse(name.removeprefix(HUB_SCHEME))
    if parsed is None:
        raise ModelNotFound(f"{name!r} is no name on the hub, wanted {HUB_SCHEME}owner/repo[:file or quantisation]")
    return parsed


def _beside(model: Path) -> Path | None:
    name = hub.projector((path.name for path in model.parent.glob("mmproj*.gguf")), model.name)
    return None if name is None else model.parent / name


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


def _bundled(file: str) -> Path:
    path = Path(str(importlib.resources.files("quarrel").joinpath("demo", file)))
    if not path.is_file():
        raise ModelNotFound(f"{path} is not there: this installation is incomplete, install quarrel again")
    return path
