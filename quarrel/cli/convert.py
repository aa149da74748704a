"""`quarrel convert`: a Hugging Face folder as a GGUF file."""

from __future__ import annotations

import argparse
from pathlib import Path

from quarrel.cli import quantize
from quarrel.convert.folder import FolderFile
from quarrel.errors import RequestError
from quarrel.llm.whole import check_whole


def run(args: argparse.Namespace) -> int:
    folder = Path(args.model).expanduser()
    if not folder.is_dir():
        raise RequestError(f"{args.model} is no folder: name one with config.json and safetensors files in it")
    with FolderFile(folder, mmproj=args.mmproj) as source:
        if not args.mmproj:
            check_whole(source)
        return quantize.write(args, source)
