"""`quarrel convert`: a Hugging Face folder as a GGUF file."""

from __future__ import annotations

import argparse
from pathlib import Path

from quarrel.cli import quantize
from quarrel.convert.folder import FolderFile
from quarrel.errors import RequestError


def run(args: argparse.Namespace) -> int:
    folder = Path(args.model).expanduser()
    if not folder.is_dir():
        raise RequestError(f"{args.model} is no folder: name one with config.json and safetensors files in it")
    if not args.mmproj:
        return quantize.run(args)
    with FolderFile(folder, mmproj=True) as source:
        return quantize.write(args, source)
