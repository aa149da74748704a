"""`quarrel tokenize`: what a model's vocabulary makes of a text, and back."""

from __future__ import annotations

import argparse
import re

from quarrel.cli.flags import UsageError
from quarrel.cli.prompt import model_and_text
from quarrel.cli.terminal import line, note, quoted, some, table, tidy, visible, write_json
from quarrel.llm import load_tokenizer
from quarrel.tokenizer import Tokenizer


def run(args: argparse.Namespace) -> int:
    model, text = model_and_text(args)
    given = _ids(text) if args.decode else []
    tokenizer = load_tokenizer(model)
    if args.decode:
        text = tokenizer.decode(given, skip_special=not args.special)
        if args.json:
            write_json({"text": text})
        else:
            line(visible(text))
        return 0
    ids = tokenizer.encode(text, add_special=args.special is not False, parse_special=args.parse_special)
    if args.json:
        tokens = [{"id": id, "text": tokenizer.token_text(id)} for id in ids]
        write_json({"model": model, "count": len(ids), "ids": ids, "tokens": tokens})
    elif args.ids:
        line(" ".join(map(str, ids)))
    else:
        _print_pieces(tokenizer, ids)
    return 0


def _ids(text: str) -> list[int]:
    words = re.split(r"[\s,]+", text.strip(" \t\r\n,[]"))
    try:
        return [int(word) for word in words if word]
    except ValueError:
        raise UsageError(f"--decode takes token ids in numbers, got {tidy(text)!r}") from None


def _print_pieces(tokenizer: Tokenizer, ids: list[int]) -> None:
    rows = [[str(id), quoted(tokenizer.token_text(id))] for id in ids]
    for text in table(rows, right=(0,)) if rows else ():
        line(text)
    note(some(len(ids), "token"))
