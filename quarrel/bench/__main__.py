"""`python -m quarrel.bench`: prints each figure when it is known, and refuses to time what computes wrongly."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from quarrel.bench.arguments import parser
from quarrel.bench.kernel import each
from quarrel.bench.machine import machine
from quarrel.bench.phases import Phased, svg, text
from quarrel.bench.plot import plot
from quarrel.bench.precompile import jobs_for, precompile
from quarrel.bench.report import Figure, brief, csv_text, document, earlier, line, table
from quarrel.bench.session import How, Session
from quarrel.bench.workload import Test, matrix
from quarrel.env import read_environment
from quarrel.errors import BackendUnavailable, QuarrelError, RequestError
from quarrel.gguf import GGUFFile, resolve
from quarrel.models import read_spec
from quarrel.ops.registry import backend, missing_driver
from quarrel.ops.step import Backend

AUTO = ("triton", "mlx", "cpu")
"""The order in which `auto` tries backends, as `quarrel.load` does."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 1 after a sentence on standard error. Figures from before an error are printed too."""
    args = parser().parse_args(argv)
    figures: list[Figure] = []
    phases: list[Phased] = []
    explained: dict[str, object] = {}
    status = 0
    try:
        before = earlier(args.vs) if args.vs else None
        for found in _figures(args, explained):
            if isinstance(found, Phased):
                phases.append(found)
            else:
                figures.append(found)
            if args.output == "jsonl":
                print(line(found), flush=True)
            elif isinstance(found, Phased):
                print(text(found) + "\n", file=sys.stderr if args.output == "json" else sys.stdout, flush=True)
            else:
                print(brief(found), file=sys.stderr, flush=True)
            if args.out:
                _write(args.out, document(figures, machine(), explained, phases) + "\n")
        if args.plot:
            _write(args.plot, svg(phases) if args.phases else plot(figures))
    except QuarrelError as error:
        print(f"quarrel.bench: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        status = 130
    if args.output in ("markdown", "md") and figures:
        print(table(figures, before))
    elif args.output == "csv" and not args.phases:
        print(csv_text(figures))
    elif args.output == "json":
        print(document(figures, machine(), explained, phases))
    return status


def _figures(args: argparse.Namespace, explained: dict[str, object]) -> Iterator[Figure | Phased]:
    if args.phases and (args.op or args.vs or args.engine or args.output == "csv"):
        raise RequestError("--phases times models, as markdown, json or jsonl: leave out --op, --vs, --engine and -o csv")
    deadline = time.perf_counter() + args.seconds if args.seconds else None
    how = How(args.compute, args.rounds, args.step_tokens, not args.no_check, deadline=deadline)
    tests = list(matrix(args.prompt, args.tokens, args.depth, args.batch, args.prompt_length, args.engine))
    if not args.op and not tests:
        raise RequestError("there is nothing to measure: ask for prompts (-p) or tokens (-n) above 0")
    models = args.model or ["demo"]
    fitting = {} if args.op else {model: _fitting(model, tests, how.say) for model in models}
    for name in args.backend:
        chosen = _backend(name, args.threads)
        if args.op:
            yield from each(chosen, args.format, args.shape, args.rows_of_input, how)
            continue
        session = Session(chosen, how)
        for model in models:
            tests = fitting[model]
            if args.jobs > 1:
                path = str(resolve(model).paths[0])
                rows = how.step_tokens or chosen.step_tokens
                shares = jobs_for(path, chosen.name, how.compute, rows, tests, how.checked, args.jobs)
                how.say(f"{model}: kernels compiled in {precompile(shares, args.jobs):.1f} s by {len(shares)} processes")
            for found in session.phases(model, tests) if args.phases else session.model(model, tests):
                explained |= session.explained
                yield found


def _fitting(model: str, tests: Sequence[Test], say: Callable[[str], None]) -> list[Test]:
    """The tests that the context holds which the model was trained for, with a note on each other one; RequestError if it
    holds none of them."""
    with GGUFFile.open(resolve(model).paths) as file:
        context = read_spec(file).context_length
    fitting = [test for test in tests if test.length <= context]
    for test in (t for t in tests if t.length > context):
        found = f"{test.name} takes {test.length} tokens and the context of {model} holds {context}"
        if not fitting:
            advice = "ask for shorter prompts (-p, --prompt-length), fewer tokens (-n) or less depth (-d)"
            raise RequestError(f"{found}: {advice}")
        say(f"{found}: skipped")
    return fitting


def _backend(name: str, threads: int | None) -> Backend:
    """The backend of this name, or the first that can run; `threads` of the CPU backend default to QUARREL_THREADS."""
    environment = read_environment()
    name = environment.backend if name == "auto" else name
    reasons = []
    for candidate in AUTO if name == "auto" else [name]:
        try:
            if name == "auto" and (without := missing_driver(candidate)):
                raise BackendUnavailable(without)
            made = backend(candidate, threads or environment.threads)
            if (reason := made.unavailable()) is None:
                return made
        except BackendUnavailable as error:
            reason = str(error)
        reasons.append(f"{candidate}: {reason}")
    raise BackendUnavailable(f"no backend can run here: {'; '.join(reasons)}")


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, "utf-8")
    part.replace(path)


if __name__ == "__main__":
    sys.exit(main())
