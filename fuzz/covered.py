"""Files, vocabularies and frames, changed by which of their readers' lines they reach, with atheris where it is installed.

    python -m fuzz.covered gguf|tokenizer|wire CORPUS [--seconds 60] [--seed 0]

CORPUS is a folder, where inputs that reach new lines stay; an empty one begins with sound inputs. The same holds of each
input as in `fuzz.gguf`, `fuzz.tokenizer` and `fuzz.wire`; one that breaks it is kept as `crash-...` there. (pip install
atheris; the others need nothing but hypothesis.)
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from fuzz.running import arguments

Check = Callable[[bytes], object]


def check_of(kind: str, folder: Path) -> tuple[Check, list[bytes]]:
    """What must hold of an input, and sound ones. Imports the readers, which atheris then sees run."""
    if kind == "gguf":
        from fuzz.gguf import read_whole, sound

        path = folder / "input.gguf"

        def file(data: bytes) -> None:
            path.write_bytes(data)
            read_whole(path)

        return file, [sound().data]
    if kind == "tokenizer":
        from fuzz.tokenizer import MAKERS, check_mutant, file_of

        path = folder / "input.gguf"
        return lambda data: check_mutant((data, "A \u00e9\U0001f600 <s> b", [0, 5, 17, 300]), path), [
            file_of(model).data for model in MAKERS
        ]
    from fuzz.wire import check_frame
    from quarrel.engine import Chunk, TokenLogprob
    from quarrel.process.values import chunk_row

    chunks = [Chunk("a", 1, 0), Chunk("", None, 2, TokenLogprob(3, -0.5, ((1, -1.0),)))]
    bodies = [json.dumps([chunk_row(1, chunk)]).encode() for chunk in chunks]
    return check_frame, [len(body).to_bytes(4, "big") + body for body in bodies]


def main(given: Sequence[str] | None = None) -> int:
    """Command line; the exit status is libFuzzer's."""
    parser = arguments(__doc__)
    parser.add_argument("kind", choices=["gguf", "tokenizer", "wire"])
    parser.add_argument("corpus", type=Path)
    args = parser.parse_args(given)
    import atheris

    args.corpus.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        with atheris.instrument_imports(include=["quarrel"], enable_loader_override=False):
            check, inputs = check_of(args.kind, Path(folder))
        if not any(args.corpus.iterdir()):
            for i, data in enumerate(inputs):
                (args.corpus / f"sound-{i}").write_bytes(data)
        longest = 4 * max(len(data) for data in inputs)
        words = [f"-max_total_time={args.seconds:.0f}", f"-seed={args.seed or 1}", f"-max_len={longest}", "-timeout=60"]
        words += [f"-artifact_prefix={args.corpus}/", "-print_final_stats=1", str(args.corpus)]
        atheris.Setup([sys.argv[0], *words], check)
        atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
