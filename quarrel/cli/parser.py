"""Every command and its options, declared once; `docs/cli.md` is written from here."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from quarrel import __version__
from quarrel.cli.plain import Parser
from quarrel.cli.samplers import add_samplers
from quarrel.env import ATTENTION, KV_CACHE, memory_of
from quarrel.errors import ConfigError

DEFAULT_MODEL = "demo"
BACKENDS = ("auto", "cpu", "triton", "mlx")
COMPUTE = ("auto", "float32", "float16", "bfloat16", "fp8")

SCALINGS = ("none", "linear", "yarn")

_MODEL = "a GGUF file, a name in the Ollama store or the Hugging Face cache, hf://owner/repo[:file or quant], or demo"


class UsageError(Exception):
    """A command line that says two things or too little; the process ends with status 2."""


def make_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = Parser(
        prog="quarrel",
        description="Runs GGUF language models on an NVIDIA GPU or any CPU, in pure Python.",
        epilog='To begin with: quarrel generate "Once upon a time". Speed, and how good answers are, are measured by'
        " python -m quarrel.bench, python -m quarrel.perplexity and python -m quarrel.regress.",
    )
    parser.add_argument("--version", action="version", version=f"quarrel {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, usage, summary, details, add in _COMMANDS:
        command = commands.add_parser(
            name,
            usage=f"quarrel {name} [options]{usage}",
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}. {details}".rstrip(),
        )
        add(command)
        command.set_defaults(flags=[flag for action in command._actions for flag in action.option_strings])
        how = "each answer as one line of JSON" if name == "chat" else "one JSON document on standard output"
        command.add_argument("--json", action="store_true", help=f"print {how}")
    return parser


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The arguments, and words that nobody understands."""
    args, unknown = parser.parse_known_args(words)
    if hasattr(args, "words") and not any(word.startswith("-") for word in unknown):
        # `MODEL -n 3 PROMPT`: argparse ends a list of arguments at the first option.
        args.words, unknown = args.words + unknown, []
    return args, unknown


def unknown_command(word: str) -> str | None:
    """A sentence for a first word that is no command and no option."""
    names = [name for name, *_ in _COMMANDS]
    if word in names or word.startswith("-"):
        return None
    near = _ELSEWHERE.get(word) or next(iter(get_close_matches(word, names, 1)), None)
    hint = "" if near is None else f"; perhaps `{near if ' ' in near else f'quarrel {near}'}` is meant"
    return f"there is no command {word!r}{hint} (see quarrel --help)"


_ELSEWHERE = {
    **dict.fromkeys(("run", "cli"), "chat"),
    **dict.fromkeys(("show", "info"), "inspect"),
    **dict.fromkeys(("list", "ls", "models"), "doctor"),
    **dict.fromkeys(("complete", "completion"), "generate"),
    **{name: f"python -m quarrel.{name}" for name in ("bench", "perplexity", "regress")},
    "help": "--help",
    "version": "--version",
}
"""What people of other programs type."""


def nearest(word: str, known: Iterable[str]) -> str:
    """ "; --temperature is near" for --temprature, and nothing where nothing is."""
    found = get_close_matches(word.partition("=")[0], list(known), 1)
    return f"; perhaps {found[0]} is meant" if found else ""


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
    _asked_options(p)
    add_samplers(p)
    _load_options(p)
    _beside_options(p, many=False)


def _chat(p: argparse.ArgumentParser) -> None:
    _model_arguments(p)
    p.add_argument("-p", "--prompt", metavar="TEXT", help="ask only this, and print the answer")
    _hidden(p, "-prompt", dest="prompt")
    _chat_options(p)
    p.add_argument("-q", "--quiet", action="store_true", help="no greeting and no speeds on standard error")
    _asked_options(p)
    add_samplers(p, leave_out=("logprobs", "n"))
    _load_options(p)
    _beside_options(p, many=False)


def _inspect(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", metavar="MODEL", nargs="?", default=DEFAULT_MODEL, help=f"{_MODEL}, the default")
    p.add_argument("-k", "--keys", metavar="PATTERN", help="only keys that hold this text, or fit it where it has * or ?")
    p.add_argument("-t", "--tensors", metavar="PATTERN", help="only tensors whose names do")
    p.add_argument("--full", action="store_true", help="long texts and arrays to their end")


def _explain(p: argparse.ArgumentParser) -> None:
    _model_arguments(p)
    p.add_argument("--all", action="store_true", help="every call of every layer, not grouped")
    _load_options(p)
    _beside_options(p, many=True)


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


def _serve(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "names", metavar="MODEL", nargs="*", help=f"{_MODEL}, the default; the first one answers where none is named"
    )
    p.add_argument("-m", "--model", metavar="MODEL", action="append", help="the same, as an option; may be repeated")
    p.add_argument("--models-dir", metavar="FOLDER", help="a folder whose GGUF files are offered too")
    p.add_argument("--chat-template", metavar="NAME_OR_FILE", help="in place of the models' own chat templates")
    p.add_argument("--host", help="the address to listen on, by default 127.0.0.1 (or WEBUI_HOST)")
    p.add_argument("--port", type=int, help="by default 8080 (or WEBUI_PORT); 0 takes a free one")
    p.add_argument(
        "--metrics-port", type=int, help="a second port with /metrics alone, such as 9090 (or WEBUI_METRICS_PORT)"
    )
    p.add_argument("--data-dir", metavar="FOLDER", help="where the hashes of API keys are kept (or WEBUI_DATA_DIR)")
    p.add_argument(
        "--origin", metavar="URL", action="append", help="a web origin that browsers may call from; may be repeated"
    )
    _hidden(p, "--allowed-origins", action="append", dest="origin")
    p.add_argument(
        "--host-name", metavar="NAME", action="append", help="a name that this server is called by, such as a proxy's"
    )
    p.add_argument("--open-access", action="store_true", help="serve other machines without API keys")
    p.add_argument("--strict-api", action="store_true", help="refuse fields that are not understood")
    p.add_argument("--ollama-compat", action="store_true", help="serve Ollama's API too")
    p.add_argument(
        "--parallel", type=int, default=16, metavar="N", help="requests of one model that run at once, 16 by default"
    )
    p.add_argument(
        "--queue", type=int, default=100, metavar="N", help="requests of one model that may wait, 100 by default"
    )
    p.add_argument(
        "--timeout", type=float, default=300, metavar="SECONDS", help="the longest that a request may take, 300 by default"
    )
    grace = "for requests in flight when told to stop, 30 by default"
    p.add_argument("--grace", type=float, default=30, metavar="SECONDS", help=grace)
    own = "run each model in a process of its own, the default: one that ends is started again, and the server stays up"
    p.add_argument("--engine-process", action=argparse.BooleanOptionalAction, default=True, help=own)
    stuck = "the longest that one step may take before the model's process is ended and started again; 0 is no limit"
    p.add_argument("--step-timeout", type=float, metavar="SECONDS", help=stuck + ", by default 300, on a CPU 1800")
    p.add_argument(
        "--rate", type=int, default=600, metavar="N", help="requests a minute of each key or address; 0 is no limit"
    )
    p.add_argument(
        "--prompt-rate", type=int, default=0, metavar="N", help="prompt tokens a minute of each, by default no limit"
    )
    p.add_argument(
        "--output-rate", type=int, default=0, metavar="N", help="generated tokens a minute of each, by default no limit"
    )
    _guess_options(p)
    _load_options(p)
    _beside_options(p, many=True)


def _keys(p: argparse.ArgumentParser) -> None:
    p.add_argument("action", choices=("create", "list", "revoke", "rotate"))
    p.add_argument("what", metavar="NAME_OR_ID", nargs="?", help="a name for a new key, or the id of one")
    p.add_argument("--days", type=float, metavar="N", help="how long a new key is good for; by default until it is revoked")
    p.add_argument("--overlap", type=float, default=0, metavar="HOURS", help="how long a rotated key goes on to work")
    p.add_argument("--data-dir", metavar="FOLDER", help="where the hashes of API keys are kept (or WEBUI_DATA_DIR)")


def _flight_options(p: argparse.ArgumentParser, flag: str, what: str, dest: str) -> None:
    p.add_argument(flag, metavar="ADDRESS", dest=dest, help=what)
    p.add_argument("--dataset", metavar="NAME", help="the dataset in the store")
    p.add_argument("--meta", metavar="ADDRESS", help="the store's other port; by default the next one")
    p.add_argument("--header", metavar="NAME=VALUE", action="append", help="sent with each call; may be repeated")
    p.add_argument("--tls-root", metavar="FILE", help="PEM of who signed the store's certificate (for grpc+tls://)")
    p.add_argument("--timeout", type=float, default=30.0, metavar="SECONDS", help="for a call, 30 by default")


def _embedding_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--pooling", choices=("mean", "cls", "last"), help="in place of what the model's file says")
    p.add_argument("--dimensions", type=int, metavar="N", help="keep the first N numbers of each vector (Matryoshka)")
    p.add_argument("--prefix", metavar="TEXT", help="in front of each text, or a task of the model's, such as search_query")
    p.add_argument(
        "--normalize", action=argparse.BooleanOptionalAction, default=True, help="vectors of length 1, the default"
    )


def _embed(p: argparse.ArgumentParser) -> None:
    _model_arguments(p)
    p.add_argument("-i", "--input", metavar="FILE", help="texts to embed: .txt (a text a line), .jsonl, .csv or .parquet")
    _flight_options(p, "--to", "grpc://host:3000, or a .parquet or .arrow file", "to")
    p.add_argument("--text-column", metavar="NAME", default="text", help="where the texts are, by default in text")
    p.add_argument("--id-column", metavar="NAME", help="becomes doc_id; by default that is the row's number")
    p.add_argument("--column", metavar="NAME", action="append", help="goes along as text; may be repeated")
    text = "send the texts along, as the column text; the default"
    p.add_argument("--text", action=argparse.BooleanOptionalAction, default=True, dest="keep_text", help=text)
    p.add_argument(
        "--first-id", type=int, default=0, metavar="N", help="the first vector's id; the others count on from it"
    )
    metric = "the measure of a new dataset, by default cosine"
    p.add_argument("--metric", choices=("cosine", "dot_product", "euclidean"), default="cosine", help=metric)
    _embedding_options(p)
    p.add_argument("--chunk", type=int, metavar="N", help="cut texts of more than N tokens, which are bad rows otherwise")
    p.add_argument("--overlap", type=int, metavar="N", help="tokens that two pieces share, N/8 by default")
    p.add_argument("--checkpoint", metavar="FILE", help="what is done; by default beside the input")
    p.add_argument("--dead-letters", metavar="FILE", help="bad rows as JSON lines; by default beside the checkpoint")
    p.add_argument("--block", type=int, default=256, metavar="N", help="rows that are embedded together, 256 by default")
    p.add_argument("-q", "--quiet", action="store_true", help="no progress and no summary on standard error")
    _load_options(p)


def _search(p: argparse.ArgumentParser) -> None:
    _text_arguments(p, "TEXT", "the text to look for")
    _flight_options(p, "--from", "the store's address, by default grpc://127.0.0.1:3000", "source")
    p.add_argument("-k", type=int, default=10, metavar="N", help="results, 10 by default")
    p.add_argument("--filter", metavar="CONDITION", action="append", help="such as year>=1990; may be repeated")
    p.add_argument("--fresh", action="store_true", help="not an answer that the store kept from before")
    _embedding_options(p)
    _load_options(p)


def _flight_server(p: argparse.ArgumentParser) -> None:
    p.add_argument("--host", default="127.0.0.1", help="the address to listen on, by default 127.0.0.1")
    p.add_argument("--port", type=int, default=3000, help="of the data, 3000 by default; 0 takes a free one")
    p.add_argument("--meta-port", type=int, help="of what is about datasets; by default the next one")


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
    (
        "serve",
        " [MODEL ...]",
        "serve models over HTTP and WebSocket, with a web page",
        "OpenAI's protocol is under /v1, the page at /. Other machines are let in with API keys only: see `quarrel keys`.",
        _serve,
    ),
    ("keys", " ACTION", "make, list, rotate and revoke the server's API keys", "Only hashes of keys are stored.", _keys),
    (
        "embed",
        " [MODEL] --input FILE --to TARGET",
        "embed the texts of a file into a vector store or a file",
        "It goes on where it was interrupted, and sends nothing twice. Status 3: done, but some rows were bad.",
        _embed,
    ),
    (
        "search",
        " [MODEL] TEXT --dataset NAME",
        "find the texts of a vector store that are nearest to one",
        "The model must be the one that filled the store.",
        _search,
    ),
    (
        "flight-server",
        "",
        "run a stand-in for the Longbow vector store, in memory, for trying things out",
        "What it holds is gone when it ends, and a search looks at every row: it is not Longbow.",
        _flight_server,
    ),
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
    computes = "what computes: triton on NVIDIA GPUs, mlx on Apple's; auto is the best that is ready"
    group.add_argument("--backend", choices=BACKENDS, default="auto", help=computes)
    group.add_argument("--compute", choices=COMPUTE, default="auto", help="the arithmetic; float32 is exact, fp8 coarse")
    context = "context in tokens; by default the model's, but at most 8192"
    group.add_argument("-c", "--ctx", type=int, metavar="N", help=context)
    memory = "what a model may take: bytes (512MiB, 16GB) or a share of what is free (80%%)"
    group.add_argument("--memory", type=_amount, metavar="BYTES|SHARE", help=memory)
    kept = "what is kept of keys and values; int8 and fp8 are half as large"
    group.add_argument("--kv-cache", choices=KV_CACHE, default="auto", help=kept)
    texts = "what texts that are over may keep of the cache, to go on from (512MiB); by default what is free of it"
    group.add_argument("--prefix-cache-bytes", type=_bytes, metavar="BYTES", help=texts)
    who = "who attends to long prompts on CUDA; auto is our own kernels"
    group.add_argument("--attention", choices=ATTENTION, default="auto", help=who)
    same = "the same bits whatever runs beside a request, at a cost on a GPU"
    group.add_argument("--deterministic", action="store_true", help=same)
    group.add_argument("-t", "--threads", type=int, metavar="N", help="CPU threads; by default one for each core")
    group.add_argument("--tensor-parallel", type=int, metavar="N", help="how many GPUs share the model; by default 1")
    experts = "of how many layers the experts stay in host memory; by default as few as needed"
    group.add_argument("--experts-on-cpu", type=int, metavar="N", help=experts)
    _hidden(group, "--n-cpu-moe", type=int, dest="experts_on_cpu")
    kinds = "for a longer context than the model was made for; none leaves the file's own out"
    group.add_argument("--rope-scaling", choices=SCALINGS, help=kinds)
    scale = "times the context; by default as much as --ctx needs"
    group.add_argument("--rope-scale", type=float, metavar="X", help=scale)
    group.add_argument("--yarn-orig-ctx", type=int, metavar="N", help="tokens that the model was trained on, for yarn")
    _hidden(group, "--ctx-size", "--n-ctx", "--num-ctx", "-kv-cache-size", type=int, dest="ctx")


def _beside_options(p: argparse.ArgumentParser, *, many: bool) -> None:
    """What is loaded beside the model."""
    group = p.add_argument_group("beside the model")
    draft = "a smaller model of the same vocabulary, which guesses tokens ahead; the text stays the same"
    group.add_argument("--draft", metavar="MODEL", help=draft)
    lora = "a LoRA adapter in GGUF"
    lora += ", which a request takes by its name; may be repeated" if many else ", to write with"
    action = "append" if many else "store"
    group.add_argument("--lora", metavar="[NAME=]FILE", action=action, help=lora, nargs=None if many else 1)
    _hidden(group, "-md", "--model-draft", "--draft-model", dest="draft")


def _asked_options(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("structure")
    group.add_argument("--json-schema", metavar="FILE", help="keep to this JSON schema; the schema itself will do")
    group.add_argument("--regex", metavar="PATTERN", help="match this regular expression as a whole")
    group.add_argument("--grammar", metavar="FILE", help="keep to this Lark grammar")
    _guess_options(p)
    p.add_argument("--timeout", type=float, metavar="SECONDS", help="end with an error after so long")


def _guess_options(p: argparse.ArgumentParser) -> None:
    lookup = "guess up to N tokens at once from earlier places of the text; 0, the default, is off"
    p.add_argument("--lookup", type=int, default=0, metavar="N", help=lookup)
    ahead = "tokens that the --draft model may guess at once, 8 by default"
    p.add_argument("--draft-max", type=int, default=8, metavar="N", help=ahead)
    _hidden(p, "--draft-n", "--draft-tokens", type=int, dest="draft_max")


def _amount(text: str) -> int | float:
    try:
        return memory_of(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _bytes(text: str) -> int:
    count = 0 if text == "0" else _amount(text)
    if isinstance(count, float):
        raise argparse.ArgumentTypeError(f"{text} is a share, wanted bytes such as 512MiB")
    return count


def _hidden(p: Any, *flags: str, **options: Any) -> None:
    """Spellings that other programs taught; they work and are not listed."""
    p.add_argument(*flags, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **options)
