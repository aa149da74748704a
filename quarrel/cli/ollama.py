"""`quarrel ollama`: which engine Ollama runs, and ours in its place."""

from __future__ import annotations

import argparse
import json

from quarrel.launch.ollama import ACTIONS, find_libraries


def run(args: argparse.Namespace) -> int:
    linked = find_libraries(args.libraries)
    lines = list(ACTIONS[args.action](linked))
    if args.json:
        kept = linked.old.name if linked.old.exists() else None
        print(json.dumps({"folder": str(linked.folder), "ours": linked.ours, "kept": kept, "said": lines}))
    else:
        print("\n".join(lines))
    return 0
