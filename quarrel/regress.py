"""`python -m quarrel.regress`: whether models still answer as they did.

python -m quarrel.regress baseline -m demo -m MODEL.gguf --out baseline.json
python -m quarrel.regress check -m demo -m MODEL.gguf --against baseline.json [--out now.json] [--report page.html]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from quarrel.env import BACKENDS, COMPUTE, read_environment
from quarrel.errors import QuarrelError, RequestError
from quarrel.llm import load
from quarrel.ops.registry import backend
from quarrel.quality.files import check_folder, read_text
from quarrel.quality.page import page
from quarrel.quality.suite import Allowed, Entry, judge, reset_peak, run

FORMAT = 1


def parser() -> argparse.ArgumentParser:
    """Two commands with the same options."""
    p = argparse.ArgumentParser(prog="python -m quarrel.regress", description="Whether models still answer as they did.")
    commands = p.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text in (("baseline", "measure, and keep the results"), ("check", "measure, and compare with a baseline")):
        c = commands.add_parser(name, help=text, description=f"{text.capitalize()}.", allow_abbrev=False)
        c.add_argument("-m", "--model", action="append", metavar="FILE", help="a GGUF file or a model's name; several")
        c.add_argument("--backend", choices=[b for b in BACKENDS if b != "auto"], default="cpu")
        c.add_argument("--compute", choices=COMPUTE, default="auto")
        c.add_argument("--text", type=Path, metavar="FILE", help="what perplexity is measured on, instead of a passage")
        c.add_argument("--chunks", type=int, metavar="N", help="only so many chunks of it")
        c.add_argument("--out", type=Path, required=name == "baseline", metavar="FILE", help="the results, as JSON")
        if name == "check":
            c.add_argument("--against", type=Path, required=True, metavar="FILE", help="the baseline")
            c.add_argument("--report", type=Path, metavar="FILE.html", help="a page with plots")
            a = Allowed()
            c.add_argument("--threshold", type=float, default=a.distance, help="of the distance of logits, squared")
            c.add_argument("--ppl-threshold", type=float, default=a.perplexity, help="of the relative change of perplexity")
            c.add_argument("--experts", type=float, default=a.experts, help="share of expert choices that must be the same")
            c.add_argument("--min-speed", type=float, help="share of the baseline's tokens a second; not judged by default")
            c.add_argument("--max-memory", type=int, metavar="BYTES", help="of the process; not judged by default")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """0 if all is as it was, 1 with sentences on standard error if not, 130 after Ctrl-C."""
    args = parser().parse_args(argv)
    try:
        before = _read(args.against) if args.command == "check" else []
        for path in (args.out, getattr(args, "report", None)):
            check_folder(path)
        names = args.model or ["demo"]
        if len({Path(name).name for name in names}) < len(names):
            raise RequestError("two of the models have the same file name, by which a baseline knows them: rename one")
        entries = [_measure(name, args) for name in names]
        if args.out:
            args.out.write_text(json.dumps({"format": FORMAT, "entries": entries}, indent=1) + "\n", "utf-8")
        if args.command == "baseline":
            for entry in entries:
                print(f"{entry['model']}: perplexity {entry['perplexity']['value']:.4f}, kept in {args.out}")
            return 0
        allowed = Allowed(args.threshold, args.ppl_threshold, args.experts, args.min_speed, args.max_memory)
        judged = judge(entries, before, allowed)
        if args.report:
            args.report.write_text(page(judged, allowed), "utf-8")
    except QuarrelError as error:
        print(f"quarrel.regress: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    for entry, measures, wrong in judged:
        shown = ", ".join(f"{name} {value:.3g}" for name, value in measures.items())
        print(f"{entry['model']}: {'FAILED' if wrong else 'passed'}; {shown}")
        for text in wrong:
            print(f"  {text}", file=sys.stderr)
    return 1 if any(wrong for *_, wrong in judged) else 0


def _measure(name: str, args: argparse.Namespace) -> Entry:
    reset_peak()
    chosen = backend(args.backend, read_environment().threads)
    text = None if args.text is None else read_text(args.text)
    with load(name, backend=chosen, compute=args.compute) as llm:
        return run(llm, name, chosen, args.compute, text, args.chunks)


def _read(path: Path) -> list[Entry]:
    try:
        whole = json.loads(path.read_text("utf-8"))
        if whole["format"] != FORMAT:
            raise ValueError(f"format {whole['format']}, wanted {FORMAT}")
        return list(whole["entries"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{path} is no baseline of quarrel.regress ({error}): make one with `baseline`") from None


if __name__ == "__main__":
    sys.exit(main())
