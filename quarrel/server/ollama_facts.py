"""Models as Ollama's API describes them: from the heads of their files, loaded or not."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from quarrel.errors import QuarrelError
from quarrel.gguf.digest import Digests
from quarrel.llm import FileFacts, file_facts, find
from quarrel.server.entries import Entry
from quarrel.server.errors import Refused
from quarrel.server.names import Name
from quarrel.server.ollama_bodies import Options
from quarrel.server.variants import GO_PLAIN

Json = dict[str, Any]
Named = tuple[Name, Entry]
WAIT = 1.0
"""Seconds that a list of models waits for the digests of their files, which are then computed behind it."""
FOR_EVER = timedelta(days=365 * 292)
"""From now, as Ollama says it."""
_UNKNOWN = FileFacts((), 0, {}, (), 0, "")


def tagged(name: str) -> str:
    """With the tag that every name has there."""
    return name if ":" in name.rsplit("/", 1)[-1] else f"{name}:latest"


def registered(name: str) -> str:
    """With the registry and the owner that every name has there."""
    return "/".join([*("registry.ollama.ai", "library")[: max(0, 2 - name.count("/"))], tagged(name)])


def when(at: float) -> str:
    """A time since the epoch."""
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")


def facts_of(entry: Entry) -> FileFacts:
    """What the model's file says; nothing where it is not here yet or is no model."""
    try:
        return _facts(entry.source, _stamps(entry)) if entry.loaded is not None or _is_here(entry) else _UNKNOWN
    except (QuarrelError, OSError, ValueError):
        return _UNKNOWN


def _is_here(entry: Entry) -> bool:
    """Downloads nothing."""
    return not entry.source.startswith("hf://")


def _stamps(entry: Entry) -> tuple[tuple[str, int, int], ...]:
    return tuple((str(p), (s := p.stat()).st_size, s.st_mtime_ns) for p in find(entry.source).paths)


@functools.lru_cache(maxsize=256)
def _facts(source: str, stamps: tuple[tuple[str, int, int], ...]) -> FileFacts:
    """stamps: so that a file which changes is read again."""
    return file_facts(source)


def capabilities(facts: FileFacts, template: str | None, *, sees: bool = False) -> list[str]:
    """In Ollama's words. template: what its chats are written by."""
    if f"{facts.architecture}.pooling_type" in facts.keys or "bert" in facts.architecture:
        return ["embedding"]
    found = ["completion"]
    if template and "tools" in template:
        found.append("tools")
    if template and any(word in template for word in ("enable_thinking", "<think>", "reasoning")):
        found.append("thinking")
    return [*found, "vision"] if sees else found


def _sees(facts: FileFacts, entry: Entry) -> bool:
    """Whether it reads images: of a model that is not loaded, whether what it would need lies beside it."""
    return bool(entry.loaded.llm.explain().projector) if entry.loaded is not None else facts.projector is not None


def details_of(facts: FileFacts, parent: str = "") -> Json:
    """As every description of a model has them."""
    family = facts.architecture
    return {
        "parent_model": parent,
        "format": "gguf",
        "family": family,
        "families": [family] if family else None,
        "parameter_size": _count(facts.parameters),
        "quantization_level": facts.quantization,
    }


def _count(number: int) -> str:
    """10.88M, as Ollama writes it."""
    for size, unit, digits in ((1e9, "B", 1), (1e6, "M", 2), (1e3, "K", 0)):
        if number >= size:
            return f"{number / size:.{digits if number % size else 0}f}{unit}"
    return str(number)


class Describer:
    """Describes models, with the digests of their files."""

    def __init__(self, template: str | None, digests: Digests | None = None) -> None:
        """template: in place of the models' own."""
        self._template, self._digests = template, digests or Digests()

    async def digest(self, entries: Sequence[Entry]) -> list[str]:
        """Of their files. Until one is known, something that stands for the file as it is now is in its place."""
        facts = await asyncio.to_thread(lambda: [facts_of(e) for e in entries])
        computed = [asyncio.wrap_future(self._digests.of(f.paths)) for f in facts if f.paths]
        for one in computed:
            one.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody else may look
        if computed:
            await asyncio.wait(computed, timeout=WAIT)
        rest = iter(computed)
        found = [next(rest) if fact.paths else None for fact in facts]
        return [
            d.result() if d is not None and d.done() and d.exception() is None else _stand_in(e)
            for d, e in zip(found, entries, strict=True)
        ]

    def template_of(self, name: Name, facts: FileFacts) -> str | None:
        """What the chats of a name are written by."""
        return self._template or name.prompting.template or facts.chat_template

    async def listed(self, some: Sequence[Named], *, running: bool = False) -> list[Json]:
        """As /api/tags lists models, or as /api/ps those that run."""
        digests = await self.digest([entry for _, entry in some])
        return await asyncio.to_thread(
            lambda: [self._row(name, entry, digest, running) for (name, entry), digest in zip(some, digests, strict=True)]
        )

    def _row(self, name: Name, entry: Entry, digest: str, running: bool) -> Json:
        facts, full = facts_of(entry), tagged(name.name)
        row: Json = {"name": full, "model": full, "modified_at": when(name.created), "size": facts.nbytes, "digest": digest}
        row["details"] = details_of(facts)
        if not running:
            more = {"context_length": facts.count("context_length"), "embedding_length": facts.count("embedding_length")}
            can = capabilities(facts, self.template_of(name, facts), sees=_sees(facts, entry))
            return {**row, "details": {**row["details"], **more}, "capabilities": can}
        del row["modified_at"]
        if entry.loaded is not None:
            e = entry.loaded.llm.explain()
            row["size"] = e.memory.weights + e.memory.cache + e.memory.activations
            row |= {"size_vram": 0 if e.backend == "cpu" else row["size"], "context_length": e.n_ctx}
        until = entry.until or (datetime.now(UTC) + FOR_EVER).timestamp()
        return {**row, "expires_at": when(until)}

    def shown(self, name: Name, entry: Entry, *, verbose: bool) -> Json:
        """As /api/show has it; verbose: with lists. Raises `Refused` where the file cannot be read."""
        facts = facts_of(entry)
        if facts is _UNKNOWN or verbose:
            try:
                facts = file_facts(entry.source, lists=verbose) if _is_here(entry) else _UNKNOWN
            except QuarrelError as error:
                raise Refused(422, "model_unusable", str(error)) from error
        hidden = ("tokenizer.chat_template", "general.name")
        own = name.prompting
        parameters = own.parameters or _stored(facts.params)
        template = self.template_of(name, facts) or GO_PLAIN
        system = own.system or facts.system or ""
        row: Json = {
            "modelfile": _modelfile(name, facts, template, system, parameters),
            "parameters": "\n".join(f"{key:<30} {value}" for key, value in _lines(parameters)),
            "template": template,
            "system": system,
            "license": own.license,
            "details": details_of(facts),
            "model_info": {k: v for k, v in facts.keys.items() if k not in hidden}
            | {"general.parameter_count": facts.parameters},
            "tensors": [{"name": n, "type": kind, "shape": dims} for n, kind, dims in facts.tensors],
            "capabilities": capabilities(facts, self.template_of(name, facts), sees=_sees(facts, entry)),
            "modified_at": when(name.created),
        }
        if own.messages:
            row["messages"] = list(own.messages)
        return {key: value for key, value in row.items() if value != "" or key == "parameters"}


def _stand_in(entry: Entry) -> str:
    try:
        status = Path(entry.source).stat()
        identity = f"{entry.source}\0{status.st_size}\0{status.st_mtime_ns}"
    except (OSError, ValueError):  # a name
        identity = entry.source
    return hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()


def _stored(params: str | None) -> Json:
    """The parameters of a model in Ollama's store."""
    try:
        found = json.loads(params or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _lines(parameters: Mapping[str, Any]) -> list[tuple[str, object]]:
    return [(k, v) for k, given in parameters.items() for v in (given if isinstance(given, list) else [given])]


def _quoted(text: str) -> str:
    return f'"""{text}"""' if "\n" in text or '"' in text else text


def _modelfile(name: Name, facts: FileFacts, template: str, system: str, parameters: Mapping[str, Any]) -> str:
    own = name.prompting
    rows = [
        '# Modelfile generated by "quarrel"',
        "# To build a new Modelfile based on this, replace FROM with:",
        f"# FROM {tagged(name.name)}\n",
        f"FROM {facts.paths[0] if facts.paths else name.source}",
        f"TEMPLATE {_quoted(template)}",
        *([f"SYSTEM {_quoted(system)}"] if system else []),
        *(f"PARAMETER {key} {value}" for key, value in _lines(parameters)),
        *(f"ADAPTER {path}" for path in name.adapters.values()),
        *([f"LICENSE {_quoted(own.license)}"] if own.license else []),
        *(f"MESSAGE {m['role']} {_quoted(str(m['content']))}" for m in own.messages),
    ]
    return "\n".join(rows) + "\n"


def sampling_of(parameters: Json) -> Any:
    """What requests understand of a Modelfile's parameters, and the names of the others."""
    options = Options.model_validate(parameters)
    return options.sampling(), options.unknown()
