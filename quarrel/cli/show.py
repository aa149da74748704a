"""`quarrel show`: what a model is."""

from __future__ import annotations

import argparse

from quarrel.cli.terminal import amount, count, line, quoted, table, tidy, visible, write_json
from quarrel.llm import file_facts


def run(args: argparse.Namespace) -> int:
    facts = file_facts(args.model)
    document = {
        "model": str(facts.keys.get("general.name") or args.model),
        "file": [str(path) for path in facts.paths],
        "architecture": facts.architecture,
        "parameters": facts.parameters,
        "quantization": facts.quantization,
        "bytes": facts.nbytes,
        "context": facts.count("context_length"),
        "embedding": facts.count("embedding_length"),
        "layers": facts.count("block_count"),
        "chat": facts.chat_template is not None,
        "images": facts.projector and str(facts.projector),
        "system": facts.system,
        "parameters of sampling": facts.params,
        "license": facts.keys.get("general.license"),
    }
    if args.json:
        write_json(document)
        return 0
    shown = {
        **document,
        "file": "\n".join(visible(str(path)) for path in facts.paths[:1])
        + (f" and {len(facts.paths) - 1} more" if len(facts.paths) > 1 else ""),
        "parameters": count(facts.parameters),
        "bytes": amount(facts.nbytes),
        "chat": "by its template" if facts.chat_template is not None else "no template: it continues texts",
        "images": facts.projector and f"seen by {visible(str(facts.projector))}",
        "system": facts.system and quoted(facts.system, 100),
    }
    for text in table([[name, tidy(str(value), 400)] for name, value in shown.items() if value], indent=""):
        line(text)
    return 0
