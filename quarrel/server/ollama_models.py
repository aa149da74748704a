"""Models as Ollama's API names, lists and shows them."""

from __future__ import annotations

import hashlib
import math
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quarrel.errors import QuarrelError
from quarrel.llm import file_keys
from quarrel.server.dispatch import Dispatcher
from quarrel.server.errors import Refused
from quarrel.server.models import Entry

Json = dict[str, Any]


def only_model(dispatcher: Dispatcher) -> str:
    """The model of a request that names none: the only one that is loaded, or offered."""
    offered = dispatcher.models.entries()
    loaded = [e for e in offered if e.loaded is not None]
    for some in (loaded, offered):
        if len(some) == 1:
            return some[0].name
    count = f"{len(loaded)} of {len(offered)} models are loaded"
    raise Refused(
        400, "invalid_request", f"model is missing, and {count}: name one, as /api/tags lists them", param="model"
    )


def plain_name(name: str, dispatcher: Dispatcher) -> str:
    """Ollama's clients put `:latest` behind names without a tag."""
    known = {e.name for e in dispatcher.models.entries()}
    return name.removesuffix(":latest") if name not in known else name


def listed(entry: Entry) -> Json:
    row: Json = {"name": entry.name, "model": entry.name, "modified_at": now(entry.created), "size": 0}
    row["digest"] = _digest(entry.source)
    details: Json = {"format": "gguf", "family": "", "families": None, "parameter_size": "", "quantization_level": ""}
    if entry.loaded is not None:
        e = entry.loaded.llm.explain()
        details["family"] = e.architecture
        details["parameter_size"] = f"{e.parameters / 1e9:.1f}B" if e.parameters >= 1e8 else f"{e.parameters / 1e6:.1f}M"
        details["quantization_level"] = e.quantization
        row["size"] = e.memory.weights
    return {**row, "details": details}


def _digest(source: str) -> str:
    """Stands for the model until its file changes; the file itself, which may be large, is not read."""
    try:
        found = Path(source).stat()
        identity = f"{source}\0{found.st_size}\0{found.st_mtime_ns}"
    except (OSError, ValueError):  # a name
        identity = source
    return hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()


def now(at: float | None = None) -> str:
    return datetime.fromtimestamp(time.time() if at is None else at, UTC).isoformat().replace("+00:00", "Z")


def shown(entry: Entry) -> Json:
    """What /api/show says. Reads the head of the model's file."""
    keys: Json = {}
    if entry.loaded is not None or not entry.source.startswith("hf://"):  # which would be downloaded
        try:
            keys = file_keys(entry.source)
        except QuarrelError as error:
            raise Refused(422, "model_unusable", str(error)) from error
    finite = {k: v for k, v in keys.items() if not isinstance(v, float) or math.isfinite(v)}
    if entry.loaded is not None:
        finite["general.parameter_count"] = entry.loaded.llm.explain().parameters
    template = finite.pop("tokenizer.chat_template", None) or ""
    return {
        **listed(entry),
        "modelfile": f"FROM {entry.source}",
        "parameters": "",
        "template": template,
        "model_info": finite,
        "capabilities": ["embedding" if f"{finite.get('general.architecture')}.pooling_type" in finite else "completion"],
    }
