"""`quarrel cp`: another name for a model."""

from __future__ import annotations

import argparse

from quarrel.cli.terminal import note, write_json
from quarrel.errors import RequestError
from quarrel.gguf import store
from quarrel.gguf.ollama import OllamaName
from quarrel.llm import find


def run(args: argparse.Namespace) -> int:
    target, own = OllamaName.parse(args.target), OllamaName.parse(args.model)
    if target is None:
        raise RequestError(f"{args.target!r} is no name, wanted such as mine or mine:tag")
    found = find(args.model)
    if found.source == "folder":
        raise RequestError(f"{args.model} is a folder in safetensors: `quarrel convert` makes a file of it")
    if found.source == "ollama" and own is not None:
        store.copy(own, target)
    else:
        store.adopt(found.paths, target, found.projector)
    if args.json:
        write_json({"name": str(target), "store": str(store.own_store())})
    else:
        note(f"quarrel cp: {target} is in {store.own_store()}")
    return 0
