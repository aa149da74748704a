"""How many answers about pictures that a model has never seen are right: drawn anew, with one question of each kind.

python -m tools.eyes.ask tests/eyes/trained/model.gguf --pictures 96
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

import quarrel
from quarrel.engine import SamplingParams
from tools.eyes.pictures import OF_ALL, OF_COLOUR, OF_GROUND, OF_NAME, drawn, scene

KINDS = {"all": OF_ALL, "name": OF_NAME, "colour": OF_COLOUR, "ground": OF_GROUND}
GREEDY = SamplingParams(temperature=0, max_tokens=16)


def held_out(pictures: int) -> Iterator[tuple[Image.Image, dict[str, tuple[str, str]]]]:
    """Pictures with a question of each kind and its answer; training draws with other seeds."""
    for number in range(pictures):
        rng = random.Random(f"held out {number}")
        what = scene(rng)
        image = drawn(what, rng)
        asked = {kind: rng.choice(questions) for kind, questions in KINDS.items()}
        yield image, {kind: (question, what.answer(question)) for kind, question in asked.items()}


def right(llm: quarrel.LLM, pictures: int) -> Counter[str]:
    """Answers that are right, letter by letter, by kind of question."""
    found = Counter(dict.fromkeys(KINDS, 0))
    for image, asked in held_out(pictures):
        for kind, (question, answer) in asked.items():
            parts = [{"type": "image", "image": image}, {"type": "text", "text": question}]
            found[kind] += llm.chat([{"role": "user", "content": parts}], GREEDY).text == answer
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, help="its projector lies beside it")
    parser.add_argument("--pictures", type=int, default=96)
    parser.add_argument("--backend", default="cpu")
    args = parser.parse_args()
    with quarrel.load(args.model, backend=args.backend, n_ctx=256) as llm:
        print(
            json.dumps(
                {
                    "pictures": args.pictures,
                    "asked": dict.fromkeys(KINDS, args.pictures),
                    "right": right(llm, args.pictures),
                }
            )
        )


if __name__ == "__main__":
    main()
