"""How much of the prompts replicas find in their caches: conversations by prefix (`server/affinity.py`) and in turn.

python -m bench.serve.affinity > record.json

Conversations of several turns, interleaved, are replayed on models in this process. Hits are tokens of prompts that had
not to be computed again. One request runs at a time, so that no replica is passed over for its load.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from typing import Any

import quarrel
from quarrel.server.affinity import prefix_of, routed

WORDS = ("the", "king", "castle", "river", "old", "bird", "forest", "house", "said", "there", "was", "one", "day", "went")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--kept", type=int, action="append", help="bytes of cache that each replica keeps; 0 is what there is room for"
    )
    args = parser.parse_args()
    found: dict[str, Any] = {key: getattr(args, key) for key in ("model", "replicas", "conversations", "turns")}
    found["runs"] = [run(args, kept, way) for kept in args.kept or [0] for way in ("prefix", "in turn")]
    print(json.dumps(found, indent=1))


def run(args: argparse.Namespace, kept: int, way: str) -> dict[str, Any]:
    rng = random.Random(1)

    def text(words: int) -> str:
        return " ".join(rng.choices(WORDS, k=words))

    systems = [text(50) for _ in range(3)]
    talks = [
        [{"role": "system", "content": systems[i % 3]}, {"role": "user", "content": text(30)}]
        for i in range(args.conversations)
    ]
    options: dict[str, Any] = {"backend": "cpu", "n_ctx": 512, "max_seqs": 2, "prefix_cache_bytes": kept or None}
    models = {f"replica-{i}": quarrel.load(args.model, **options) for i in range(args.replicas)}
    turns, prompt, cached = itertools.cycle(models), 0, 0
    for _ in range(args.turns):
        order = list(range(len(talks)))
        rng.shuffle(order)
        for i in order:
            digest = prefix_of(json.dumps({"messages": talks[i]}).encode()) or b""
            name = routed(digest, dict.fromkeys(models, 0), 2)[0] if way == "prefix" else next(turns)
            result = models[name].chat(talks[i], max_tokens=8, temperature=0.0, template="chatml")
            prompt, cached = prompt + result.usage.prompt_tokens, cached + result.usage.cached_tokens
            talks[i] += [{"role": "assistant", "content": result.text}, {"role": "user", "content": text(20)}]
    for llm in models.values():
        llm.close()
    return {
        "way": way,
        "kept_bytes": kept,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "hit_rate": round(cached / prompt, 3),
    }


if __name__ == "__main__":
    main()
