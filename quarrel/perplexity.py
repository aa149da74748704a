"""`python -m quarrel.perplexity`: perplexity of a text, and divergence from a reference's logits.

    python -m quarrel.perplexity -m MODEL.gguf -f wiki.test.raw
    python -m quarrel.perplexity -m ORIGINAL.gguf -f wiki.test.raw --kl-divergence-base base.kld      (writes it)
    python -m quarrel.perplexity -m QUANTISED.gguf --kl-divergence-base base.kld --kl-divergence      (reads it)

Chunks, statistics and the file are those of llama-perplexity.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from quarrel import __version__
from quarrel.env import BACKENDS, COMPUTE, KV_CACHE
from quarrel.errors import QuarrelError, RequestError
from quarrel.llm import LoadOptions, load_with
from quarrel.quality.base_file import BaseFile
from quarrel.quality.divergence import Estimate
from quarrel.quality.evaluate import Evaluation, evaluate, pieces_of, pieces_of_base
from quarrel.quality.files import check_folder, read_text


def parser() -> argparse.ArgumentParser:
    """The command line; names of options are llama-perplexity's where it has them."""
    p = argparse.ArgumentParser(
        prog="python -m quarrel.perplexity", description="Perplexity of a text, as llama-perplexity counts it.",
        allow_abbrev=False,
    )  # fmt: skip
    p.add_argument("-m", "--model", default="demo", help="a GGUF file or a model's name")
    p.add_argument("-f", "--file", type=Path, metavar="TEXT", help="the text, such as WikiText-2's test set")
    p.add_argument("-c", "--ctx-size", type=int, default=512, metavar="N", help="tokens of a chunk")
    p.add_argument("--chunks", type=int, metavar="N", help="only so many chunks")
    p.add_argument("--kl-divergence-base", type=Path, metavar="FILE", help="reference logits, written or read")
    p.add_argument("--kl-divergence", action="store_true", help="read the reference and compare")
    p.add_argument("--backend", choices=BACKENDS, default="auto")
    p.add_argument("--compute", choices=COMPUTE, default="auto")
    p.add_argument("--kv-cache", choices=KV_CACHE, default="auto", help="how keys and values are stored")
    p.add_argument("--threads", type=int, metavar="N", help="of the CPU backend")
    p.add_argument("--json", action="store_true", help="one JSON document on standard output")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """0, 1 with a sentence on standard error, or 130 after Ctrl-C."""
    args = parser().parse_args(argv)
    try:
        result, model = _run(args)
    except QuarrelError as error:
        print(f"quarrel.perplexity: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    if args.json:
        print(json.dumps({"model": model, "quarrel": __version__, **asdict(result)}, indent=1))
    else:
        print("\n".join(_lines(result)))
    return 0


def _run(args: argparse.Namespace) -> tuple[Evaluation, str]:
    if args.kl_divergence and args.kl_divergence_base is None:
        raise RequestError("--kl-divergence needs the file to compare with: give --kl-divergence-base FILE")
    if args.file is None and not args.kl_divergence:
        raise RequestError("there is no text: give one with -f, such as WikiText-2's wiki.test.raw")
    if args.chunks is not None and args.chunks < 1:
        raise RequestError(f"--chunks is {args.chunks}, wanted 1 or more")
    if args.ctx_size < 4:
        raise RequestError(f"--ctx-size is {args.ctx_size}, wanted 4 or more")
    save = None if args.kl_divergence else args.kl_divergence_base
    check_folder(save)
    base = BaseFile(args.kl_divergence_base) if args.kl_divergence else None
    n_ctx = args.ctx_size if base is None else base.n_ctx
    options = LoadOptions(
        backend=args.backend, compute=args.compute, threads=args.threads, kv_cache=args.kv_cache, n_ctx=n_ctx
    )
    with load_with(args.model, options) as llm:
        if base is None:
            pieces = pieces_of(llm, read_text(args.file), n_ctx, args.chunks)
        else:
            pieces = pieces_of_base(llm, base, args.chunks)
        result = evaluate(llm, pieces, base, save, _progress)
    return result, args.model


def _progress(done: int, all: int, perplexity: float) -> None:
    end = "\n" if done == all else ""
    print(f"[{done}/{all}] {perplexity:.4f} ", end=end, file=sys.stderr, flush=True)


def _lines(r: Evaluation) -> Iterator[str]:
    yield f"perplexity {_plus(r.perplexity)} over {r.tokens} tokens in {r.chunks} chunks of {r.n_ctx}, {r.seconds:.1f} s"
    if (d := r.divergence) is None:
        return
    yield f"reference's perplexity   {_plus(d.perplexity_base)}"
    yield f"ratio                    {_plus(d.ratio, 6)}"
    yield f"correlation of ln(ppl)   {100 * d.correlation:.2f} %"
    yield f"KL divergence            {_plus(d.kld, 6)}"
    yield from (f"  {name:>7}              {value:.6f}" for name, value in d.kld_quantiles.items())
    yield f"change of p              {_percent(d.delta_p)}, RMS {100 * d.delta_p_rms:.3f} %"
    yield from (f"  {name:>7}              {100 * value:.3f} %" for name, value in d.delta_p_quantiles.items())
    yield f"same likeliest token     {_percent(d.same_top)}"


def _plus(e: Estimate, digits: int = 4) -> str:
    return f"{e.value:.{digits}f} ± {e.error:.{digits}f}"


def _percent(e: Estimate) -> str:
    return f"{100 * e.value:.3f} ± {100 * e.error:.3f} %"


if __name__ == "__main__":
    sys.exit(main())
