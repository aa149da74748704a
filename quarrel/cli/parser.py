"""Every command and its options, declared once; `docs/cli.md` is written from here."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from quarrel import __version__
from quarrel.cli.samplers import add_samplers

DEFAULT_MODEL = "demo"
BACKENDS = ("auto", "cpu", "triton", "mlx")
COMPUTE = ("auto", "float32", "float16", "bfloat16")

_MODEL = "a GGUF file, a name in the Ollama store or the Hugging Face cache, hf://owner/repo[:file or quant], or demo"


class UsageError(Exception):
    """A command line that says two things or too little; the process ends with status 2."""


def make_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="quarrel",
        description="Runs GGUF language models on an NVIDIA GPU or any CPU, in pure Python.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"quarrel {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, usage, summary, details, add in _COMMANDS:
        command = commands.add_parser(
            name,
            usage=f"quarrel {name} [options]{usage}",
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}. {details}".rstrip(),
            allow_abbrev=False,
        )
        add(command)
        how = "each answer as one line of JSON" if name == "chat" else "one JSON document on standard output"
        command.add_argument("--json", action="store_true", help=f"print {how}")
    return parser


def model_of(args: argparse.Namespace) -> str:
    """The one model that `_model_arguments` were given."""
    if args.name is not None and args.model is not None:
        raise UsageError(f"two models are named, {args.name!r} and {args.model!r}; name one")
    name: str = args.name or args.model or DEFAULT_MODEL
    return name


def _generate(p: argparse.ArgumentParser) -> None:
    _text_arguments(p, "PROMPT", "the text to continue")
    p.add_argument("--chat", action="store_true", help="put the text to the model as a user's message, by its template")
    _hidden(p, "--chatml", "-chatml", action="store_true", dest="chat")
    _chat_options(p, implied=" (implies --chat)")
    streams = "print the text as it comes, the default; with --json, as JSON lines"
    p.add_argument("--stream", action=argparse.BooleanOptionalAction, default=None, help=streams)
    _hidden(p, "-stream", action="store_true", dest="stream")
    p.add_argument("--echo", action="store_true", help="print the prompt before its continuation")
    p.add_argument("-q", "--quiet", action="store_true", help="no line with speeds on standard error")
    add_samplers(p)
    _load_options(p)


def _chat(p: argparse.ArgumentParser) -> None:
    _model_arguments(p)
    p.add_argument("-p", "--prompt", metavar="TEXT", help="ask only this, and print the answer")
    _hidden(p, "-prompt", dest="prompt")
    _chat_options(p)
    p.add_argument("-q", "--quiet", action="store_true", help="no greeting and no speeds on standard error")
    add_samplers(p, leave_out=("logprobs", "n"))
    _load_options(p)


def _inspect(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", metavar="MODEL", nargs="?", default=DEFAULT_MODEL, help=f"{_MODEL}, the default")
    p.add_argument("-k", "--keys", metavar="PATTERN", help="only keys that hold this text, or fit it where it has * or ?")
    p.add_argument("-t", "--tensors", metavar="PATTERN", help="only tensors whose names do")
    p.add_argument("--full", action="store_true", help="long texts and arrays to their end")


def _explain(p: argparse.ArgumentParser) -> None:
    _model_arguments(p)
    p.add_argument("--all", action="store_true", help="every call of every layer, not grouped")
    _load_options(p)


def _pull(p: argparse.ArgumentParser) -> None:
    p.add_argument("name", metavar="NAME", help="hf://owner/repo[:file or quant], such as hf://owner/repo:Q4_K_M")


def _tokenize(p: argparse.ArgumentParser) -> None:
    _text_arguments(p, "TEXT", "the text to cut into tokens")
    p.add_argument("--decode", action="store_true", help="the text is token ids; print what they say")
    p.add_argument("--ids", action="store_true", help="only the ids, on one line")
    special = "the model's begin and end tokens: added by default, and by default left out by --decode"
    p.add_argument("--special", action=argparse.BooleanOptionalAction, default=None, help=special)
    p.add_argument("--parse-special", action="store_true", help="names of control tokens in the text become those tokens")


def _doctor(p: argparse.ArgumentParser) -> None:
    del p  # it has no options of its own


_COMMANDS: tuple[tuple[str, str, str, str, Callable[[argparse.ArgumentParser], None]], ...] = (
    (
        "generate",
        " [MODEL] PROMPT",
        "continue a text",
        "`quarrel generate PROMPT` takes the bundled model; `quarrel generate MODEL PROMPT`, `-m MODEL PROMPT`,"
        " `MODEL -p PROMPT` and `MODEL < FILE` take another one.",
        _generate,
    ),
    (
        "chat",
        " [MODEL]",
        "talk with a model",
        "Ctrl-C stops an answer, Ctrl-D ends the conversation, /help lists what else can be typed. Where standard"
        " input is no terminal, each of its lines is a message.",
        _chat,
    ),
    ("inspect", " [MODEL]", "show the keys and tensors of a GGUF file", "", _inspect),
    ("explain", " [MODEL]", "show the memory plan, and which implementation takes which op", "", _explain),
    ("tokenize", " [MODEL] TEXT", "show the tokens of a text", "", _tokenize),
    ("pull", " NAME", "download a model from Hugging Face", "It lands in the Hugging Face cache.", _pull),
    ("doctor", "", "say what this machine can run, and what is missing", "", _doctor),
)
"""Name, what follows the options, summary, details, and who declares the options."""


def _text_arguments(p: argparse.ArgumentParser, noun: str, what: str) -> None:
    p.add_argument("words", nargs="*", metavar=noun, help=f"{what}; in front of it, perhaps a model")
    p.add_argument("-m", "--model", metavar="MODEL", help=f"{_MODEL}, the default")
    p.add_argument("-p", "--prompt", metavar="TEXT", help=f"{what}, as an option")
    p.add_argument("-f", "--file", metavar="FILE", help=f"a file with {what}; - is standard input")
    _hidden(p, "-model", dest="model")
    _hidden(p, "-prompt", dest="prompt")


def _model_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("name", metavar="MODEL", nargs="?", help=f"{_MODEL}, the default")
    p.add_argument("-m", "--model", metavar="MODEL", help="the same, as an option")
    _hidden(p, "-model", dest="model")


def _chat_options(p: argparse.ArgumentParser, implied: str = "") -> None:
    p.add_argument("--system", metavar="TEXT", help=f"a system message to begin with{implied}")
    template = f"a built-in chat template or a file with one, in place of the model's own{implied}"
    p.add_argument("--chat-template", metavar="NAME_OR_FILE", help=template)


def _load_options(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("loading")
    group.add_argument("--backend", choices=BACKENDS, default="auto", help="what computes; auto is the best that is ready")
    group.add_argument("--compute", choices=COMPUTE, default="auto", help="the arithmetic; float32 is exact")
    group.add_argument("-c", "--ctx", type=int, metavar="N", help="context in tokens; by default the model's, if it fits")
    group.add_argument("-t", "--threads", type=int, metavar="N", help="CPU threads; by default one for each core")
    _hidden(group, "--ctx-size", "--n-ctx", "--num-ctx", "-kv-cache-size", type=int, dest="ctx")


def _hidden(p: Any, *flags: str, **options: Any) -> None:
    """Spellings that other programs taught; they work and are not listed."""
    p.add_argument(*flags, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **options)
