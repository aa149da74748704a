"""`quarrel convert`: a Hugging Face folder as a GGUF file."""

from __future__ import annotations

import argparse
from pathlib import Path

from quarrel.cli import quantize
from quarrel.errors import RequestError


def run(args: argparse.Namespace) -> int:
    if not Path(args.model).expanduser().is_dir():
        raise RequestError(f"{args.model} is no folder: name one with config.json and safetensors files in it")
    return quantize.run(args)
