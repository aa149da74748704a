"""The commands and their options, each declared once; `docs/cli.md` is written from here."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from quarrel.cli.flags import add_load_flags, hidden
from quarrel.cli.options import (
    CHAT,
    MODEL,
    STORIES,
    beside_options,
    chat_options,
    draft_options,
    embedding_options,
    flight_options,
    model_arguments,
    request_options,
    store_options,
    text_arguments,
)
from quarrel.cli.samplers import add_samplers
from quarrel.env import BACKENDS, COMPUTE
from quarrel.llm.options import WEIGHTS


def default_model(command: str) -> str:
    """The model that a command takes where none is named."""
    return CHAT if command in ("chat", "serve", "mcp") else STORIES


def _generate(p: argparse.ArgumentParser) -> None:
    text_arguments(p, "PROMPT", "the text to continue")
    p.add_argument("--chat", action="store_true", help="put the text to the model as a user's message, by its template")
    hidden(p, "--chatml", "-chatml", action="store_true", dest="chat")
    p.add_argument(
        "--image", metavar="FILE", action="append", help="a picture beside the text (implies --chat); or several"
    )
    chat_options(p, implied=" (implies --chat)")
    streams = "print the text as it comes, the default; with --json, as JSON lines"
    p.add_argument("--stream", action=argparse.BooleanOptionalAction, default=None, help=streams)
    hidden(p, "-stream", action="store_true", dest="stream")
    p.add_argument("--echo", action="store_true", help="print the prompt before its continuation")
    p.add_argument("-q", "--quiet", action="store_true", help="no line with speeds on standard error")
    request_options(p)
    add_samplers(p)
    add_load_flags(p)
    beside_options(p, many=False)


def _chat(p: argparse.ArgumentParser) -> None:
    model_arguments(p, CHAT)
    p.add_argument("-p", "--prompt", metavar="TEXT", help="ask only this, and print the answer")
    hidden(p, "-prompt", dest="prompt")
    p.add_argument(
        "--image", metavar="FILE", action="append", help="a picture beside the first question; several times for more"
    )
    chat_options(p)
    p.add_argument("-q", "--quiet", action="store_true", help="no greeting and no speeds on standard error")
    overflow = (
        "what becomes of a conversation that is longer than the context: stop refuses it; shift, the default, leaves out"
        " the oldest turns; summary has the model sum them up"
    )
    p.add_argument("--overflow", choices=("stop", "shift", "summary"), default="shift", help=overflow)
    tools = "a server of tools (MCP), a command or a URL; you are asked before each call. May be repeated"
    p.add_argument("--mcp", metavar="SERVER", action="append", help=tools)
    p.add_argument("--plain", action="store_true", help="answers as they are written, and the terminal's own line editing")
    request_options(p)
    add_samplers(p, leave_out=("logprobs", "n"))
    add_load_flags(p)
    beside_options(p, many=False)


def _mcp(p: argparse.ArgumentParser) -> None:
    model_arguments(p, CHAT)
    add_load_flags(p)
    beside_options(p, many=True)


def _inspect(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", metavar="MODEL", nargs="?", default=STORIES, help=f"{MODEL}; by default {STORIES}")
    p.add_argument("-k", "--keys", metavar="PATTERN", help="only keys that hold this text, or fit it where it has * or ?")
    p.add_argument("-t", "--tensors", metavar="PATTERN", help="only tensors whose names do")
    p.add_argument("--full", action="store_true", help="long texts and arrays to their end")


def _explain(p: argparse.ArgumentParser) -> None:
    model_arguments(p)
    p.add_argument("--all", action="store_true", help="every call of every layer, not grouped")
    add_load_flags(p)
    beside_options(p, many=True)


def _pull(p: argparse.ArgumentParser) -> None:
    name = "hf://owner/repo[:file or quant], such as hf://owner/repo:Q4_K_M, or a name of an Ollama registry"
    p.add_argument("name", metavar="NAME", help=name)
    registry = "where names such as mistral:7b are fetched from, such as https://registry.ollama.ai; there is no default"
    p.add_argument("--registry", metavar="URL", help=registry)


def _list(p: argparse.ArgumentParser) -> None:
    p.add_argument("pattern", metavar="TEXT", nargs="?", default="", help="only models whose names hold it")


def _show(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", metavar="MODEL", nargs="?", default=STORIES, help=f"{MODEL}; by default {STORIES}")


def _cp(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", metavar="MODEL", help=MODEL)
    p.add_argument("target", metavar="NAME", help="the new name, such as mine or mine:tag")


def _rm(p: argparse.ArgumentParser) -> None:
    p.add_argument("names", metavar="NAME", nargs="+", help="as `quarrel list` shows it")


def _ps(p: argparse.ArgumentParser) -> None:
    p.add_argument("--url", default="http://127.0.0.1:8080", help="of the server, http://127.0.0.1:8080 by default")


def _completion(p: argparse.ArgumentParser) -> None:
    p.add_argument("shell", choices=("bash", "zsh", "tcsh"))


WEIGHED = "q2_k_s, iq3_xs, iq3_xxs, iq2_m, iq2_s, iq2_xs, iq2_xxs, iq1_m or iq1_s"
TYPES = f"{', '.join(WEIGHTS)}; with --imatrix {WEIGHED}"
_IMATRIX = "what `quarrel imatrix` or llama-imatrix made of the model: errors weigh as much as their columns are used"


def _quantize(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", metavar="IN", help="the model, as `quarrel pull` and others name it; F16, BF16, F32 or Q8_0")
    p.add_argument("target", metavar="OUT", help="the file to write, such as model-q4_k_m.gguf")
    p.add_argument("type", metavar="TYPE", help=TYPES)
    p.add_argument("--imatrix", metavar="FILE", help=_IMATRIX)
    p.add_argument("--again", action="store_true", help="quantise weights that are quantised already, which loses more")


def _imatrix(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", metavar="MODEL", help=f"{MODEL}; in F16, BF16 or Q8_0")
    p.add_argument("text", metavar="TEXT", help="a file of what the model is for; some 50,000 words do")
    output = "the file to write, such as model.imatrix.gguf"
    p.add_argument("-o", "--output", metavar="OUT", dest="target", required=True, help=output)
    hidden(p, "--output-file", dest="target")
    p.add_argument("--chunks", type=int, metavar="N", help="only so many chunks of the text")
    size = "tokens that the model sees at once, 512 by default"
    p.add_argument("--chunk-size", type=int, default=512, metavar="N", help=size)
    hidden(p, "-c", "--ctx-size", type=int, dest="chunk_size")
    p.add_argument("--backend", choices=BACKENDS, default="auto", help="what computes, by default the fastest there is")
    p.add_argument("--compute", choices=COMPUTE, default="auto", help="in which arithmetic")
    p.add_argument("--threads", type=int, metavar="N", help="of the CPU backend")


def _convert(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", metavar="FOLDER", help="what Hugging Face has of a model: config.json, safetensors, tokenizer")
    output = "the file to write, such as model.gguf"
    p.add_argument("-o", "--output", metavar="OUT", dest="target", required=True, help=output)
    hidden(p, "--outfile", dest="target")
    p.add_argument("--type", metavar="TYPE", help=f"{TYPES}; by default what most weights of the folder are")
    hidden(p, "--outtype", dest="type")
    p.add_argument(
        "--mmproj", action="store_true", help="what sees, for a file beside the text model's; not the text model"
    )
    p.add_argument("--imatrix", metavar="FILE", help=_IMATRIX)
    p.set_defaults(again=False)


def _tokenize(p: argparse.ArgumentParser) -> None:
    text_arguments(p, "TEXT", "the text to cut into tokens")
    p.add_argument("--decode", action="store_true", help="the text is token ids; print what they say")
    p.add_argument("--ids", action="store_true", help="only the ids, on one line")
    special = "the model's begin and end tokens: added by default, and by default left out by --decode"
    p.add_argument("--special", action=argparse.BooleanOptionalAction, default=None, help=special)
    p.add_argument("--parse-special", action="store_true", help="names of control tokens in the text become those tokens")


def _doctor(p: argparse.ArgumentParser) -> None:
    del p  # it has no options of its own


def _serve(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "names",
        metavar="MODEL",
        nargs="*",
        help=f"{MODEL}; by default these two, {CHAT} first; the first answers where none is named",
    )
    p.add_argument("-m", "--model", metavar="MODEL", action="append", help="the same, as an option; may be repeated")
    p.add_argument("--models-dir", metavar="FOLDER", help="a folder whose GGUF files are offered too")
    p.add_argument("--chat-template", metavar="NAME_OR_FILE", help="in place of the models' own chat templates")
    p.add_argument("--host", help="the address to listen on, by default 127.0.0.1 (or WEBUI_HOST)")
    p.add_argument("--port", type=int, help="by default 8080 (or WEBUI_PORT); 0 takes a free one")
    p.add_argument(
        "--metrics-port", type=int, help="a second port with /metrics alone, such as 9090 (or WEBUI_METRICS_PORT)"
    )
    p.add_argument("--data-dir", metavar="FOLDER", help="where the hashes of API keys are stored (or WEBUI_DATA_DIR)")
    p.add_argument(
        "--origin",
        metavar="URL",
        action="append",
        help="a web origin that browsers may call from, such as https://*.example.org; may be repeated",
    )
    hidden(p, "--allowed-origins", action="append", dest="origin")
    p.add_argument(
        "--host-name", metavar="NAME", action="append", help="a name that this server is called by, such as a proxy's"
    )
    proxies = (
        "an address or network (10.0.0.0/8) whose X-Forwarded-For says who calls; may be repeated, or a list with commas"
    )
    p.add_argument("--trusted-proxies", metavar="ADDRESS", action="append", help=proxies)
    p.add_argument("--open-access", action="store_true", help="serve other machines without API keys")
    p.add_argument("--strict-api", action="store_true", help="refuse fields that are not understood")
    tools = (
        "a server of tools (MCP), a command or a URL, for the page, which asks before each call; who may use this server"
        " may call them. May be repeated"
    )
    p.add_argument("--mcp", metavar="SERVER", action="append", help=tools)
    there = "serve Ollama's API too, the default"
    p.add_argument("--ollama-compat", action=argparse.BooleanOptionalAction, default=True, help=there)
    p.add_argument(
        "--parallel", type=int, default=16, metavar="N", help="requests of one model that run at once, 16 by default"
    )
    p.add_argument(
        "--queue", type=int, default=100, metavar="N", help="requests of one model that may wait, 100 by default"
    )
    p.add_argument(
        "--timeout", type=float, default=300, metavar="SECONDS", help="the longest that a request may take, 300 by default"
    )
    alive = "unload a model that nobody has used for so long; by default it stays, and makes room for others that need it"
    p.add_argument("--keep-alive", type=float, metavar="SECONDS", help=alive)
    lines = "how log lines look: text, the default, or json, all of them, tracebacks and warnings too"
    p.add_argument("--log-format", choices=("text", "json"), default="text", help=lines)
    grace = "for requests in flight when the server stops, 30 by default"
    p.add_argument("--grace", type=float, default=30, metavar="SECONDS", help=grace)
    kept = "a folder that /slots/ID?action=save keeps texts in, as llama-server has it"
    p.add_argument("--slot-save-path", metavar="FOLDER", help=kept)
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
    store = "a Redis or Valkey (redis://HOST:6379/0) in which several servers count these together (or WEBUI_SHARED_LIMITS)"
    p.add_argument("--shared-limits", metavar="URL", help=store)
    bounds = (
        ("--streams", 1024, "requests of each key or address in flight at once; 0 is no limit"),
        ("--connections", 2048, "connections, WebSockets among them, that one address may hold"),
        ("--sockets-per-model", 512, "WebSockets that may have requests of one model in flight"),
        ("--body-limit", 48, "MiB of a request's body, images in it among them"),
    )
    for flag, number, text in bounds:
        p.add_argument(flag, type=int, default=number, metavar="N", help=f"{text}, {number} by default")
    p.add_argument(
        "--profile-steps",
        type=int,
        metavar="N",
        help="time the expert and recurrent layers of one step in N for /metrics; by default 16 on a CPU, and 0"
        " (never) on CUDA, where such a step is no captured graph and takes several times as long",
    )
    draft_options(p)
    add_load_flags(p)
    beside_options(p, many=True)


def _llama_server(p: argparse.ArgumentParser) -> None:
    p.add_argument("arguments", metavar="ARGUMENT", nargs="*", help="as llama-server takes them, such as --model FILE")


def _ollama(p: argparse.ArgumentParser) -> None:
    p.add_argument("action", choices=("status", "use", "restore"))
    folder = "Ollama's folder of libraries; by default where its program looks for it"
    p.add_argument("--libraries", metavar="FOLDER", help=folder)


def _keys(p: argparse.ArgumentParser) -> None:
    p.add_argument("action", choices=("create", "list", "revoke", "rotate"))
    p.add_argument("what", metavar="NAME_OR_ID", nargs="?", help="a name for a new key, or the id of one")
    p.add_argument("--days", type=float, metavar="N", help="how long a new key is good for; by default until it is revoked")
    p.add_argument("--overlap", type=float, default=0, metavar="HOURS", help="how long a rotated key remains valid")
    p.add_argument("--data-dir", metavar="FOLDER", help="where the hashes of API keys are stored (or WEBUI_DATA_DIR)")


def _embed(p: argparse.ArgumentParser) -> None:
    model_arguments(p)
    p.add_argument("-i", "--input", metavar="FILE", help="texts to embed: .txt (a text a line), .jsonl, .csv or .parquet")
    flight_options(p, "--to", "grpc://host:3000, or a .parquet or .arrow file", "to")
    p.add_argument("--text-column", metavar="NAME", default="text", help="where the texts are, by default in text")
    p.add_argument("--id-column", metavar="NAME", help="becomes doc_id; by default that is the row's number")
    p.add_argument("--column", metavar="NAME", action="append", help="sent along as text; may be repeated")
    text = "send the texts along, as the column text; the default"
    p.add_argument("--text", action=argparse.BooleanOptionalAction, default=True, dest="keep_text", help=text)
    p.add_argument(
        "--first-id", type=int, default=0, metavar="N", help="the first vector's id; the others count on from it"
    )
    metric = "noted for a new dataset, by default cosine; Longbow ranks by L2 all the same, which orders unit vectors alike"
    p.add_argument("--metric", choices=("cosine", "dot_product", "euclidean"), default="cosine", help=metric)
    embedding_options(p)
    p.add_argument("--chunk", type=int, metavar="N", help="cut texts of more than N tokens, which are bad rows otherwise")
    p.add_argument("--overlap", type=int, metavar="N", help="tokens that two pieces share, N/8 by default")
    p.add_argument("--checkpoint", metavar="FILE", help="what is done; by default beside the input")
    p.add_argument("--dead-letters", metavar="FILE", help="bad rows as JSON lines; by default beside the checkpoint")
    p.add_argument("--wait", action="store_true", help="end only when the store has indexed all of them")
    p.add_argument("--block", type=int, default=256, metavar="N", help="rows that are embedded together, 256 by default")
    p.add_argument("-q", "--quiet", action="store_true", help="no progress and no summary on standard error")
    add_load_flags(p)


def _search(p: argparse.ArgumentParser) -> None:
    text_arguments(p, "TEXT", "the text to look for")
    flight_options(p, "--from", "the store's address, by default grpc://127.0.0.1:3000", "source")
    p.add_argument("-k", type=int, default=10, metavar="N", help="results, 10 by default")
    p.add_argument("--filter", metavar="CONDITION", action="append", help="such as year>=1990; may be repeated")
    p.add_argument("--fresh", action="store_true", help="no cached answer of the store")
    rerank = "fetch the 4 k nearest by L2 and rank them exactly by this; the default where vectors are not of length 1"
    p.add_argument("--rerank", choices=("cosine", "dot_product"), help=rerank)
    embedding_options(p)
    add_load_flags(p)


def _datasets(p: argparse.ArgumentParser) -> None:
    p.add_argument("action", choices=("list", "info", "delete", "export"))
    p.add_argument("name", metavar="NAME", nargs="?", help="the dataset; of list, a text that its name holds")
    store_options(p, "--from", "the store's address, by default grpc://127.0.0.1:3000", "source")
    p.add_argument("--id", metavar="ID", help="of delete: this row alone")
    p.add_argument("--output", metavar="FILE", help="of export: a .parquet or .arrow file that is not there yet")
    p.add_argument("--filter", metavar="CONDITION", action="append", help="of export: such as year>=1990; may be repeated")


def _flight_server(p: argparse.ArgumentParser) -> None:
    p.add_argument("--host", default="127.0.0.1", help="the address to listen on, by default 127.0.0.1")
    p.add_argument("--port", type=int, default=3000, help="of the data, 3000 by default; 0 takes a free one")
    p.add_argument("--meta-port", type=int, help="of what is about datasets; by default the next one")
    faults = p.add_mutually_exclusive_group()
    faithful = "with the faults of a real Longbow, the default: see docs/flight.md"
    faults.add_argument("--faithful", action="store_false", dest="kind", default=False, help=faithful)
    faults.add_argument("--kind", action="store_true", dest="kind", help="without them")
    memory = "rows that it takes, such as 1GiB; then it is silent, or refuses if --kind; any number by default"
    p.add_argument("--memory", metavar="BYTES", help=memory)
    rate = "indexed in a second, 2000 by default; a search sees no other ones"
    p.add_argument("--index-rate", type=float, default=2000.0, metavar="ROWS", help=rate)


def _prefill(p: argparse.ArgumentParser) -> None:
    model_arguments(p)
    p.add_argument("--host", default="127.0.0.1", help="the address to listen on, by default 127.0.0.1")
    p.add_argument("--port", type=int, default=8815, help="8815 by default; 0 takes a free one")
    p.add_argument("--parallel", type=int, default=16, metavar="N", help="prompts that are read at once, 16 by default")
    add_load_flags(p)
    beside_options(p, many=True)


COMMANDS: tuple[tuple[str, str, str, str, Callable[[argparse.ArgumentParser], None]], ...] = (
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
    (
        "pull",
        " NAME",
        "download a model from Hugging Face or an Ollama registry",
        "It lands in the Hugging Face cache, or in the Ollama store of the user.",
        _pull,
    ),
    ("list", " [TEXT]", "list the models of this machine", "Those of the Ollama stores and the Hugging Face cache.", _list),
    ("show", " [MODEL]", "say what a model is, in a few lines", "`quarrel inspect` shows all of its file.", _show),
    (
        "cp",
        " MODEL NAME",
        "give a model another name",
        "The name is one of the user's Ollama store; where the disk can link files, it takes no room.",
        _cp,
    ),
    ("rm", " NAME ...", "delete models", "Files go with the last name that uses them.", _rm),
    (
        "ps",
        "",
        "list the models that a running server has in memory",
        "A server that wants a key gets the one in WEBUI_API_KEY.",
        _ps,
    ),
    (
        "quantize",
        " IN OUT TYPE",
        "write a model's file with smaller weights",
        "The types are llama.cpp's, chosen tensor by tensor as it does. An interrupted run goes on where it was.",
        _quantize,
    ),
    (
        "imatrix",
        " MODEL TEXT -o OUT",
        "see which columns of a model's weights a text uses, for `quantize --imatrix`",
        "The file is llama.cpp's, and either program reads the other's. An interrupted run goes on where it was.",
        _imatrix,
    ),
    (
        "convert",
        " FOLDER -o OUT",
        "write a model in safetensors as a GGUF file",
        "Names, keys and the order of weights are llama.cpp's. An interrupted run goes on where it was.",
        _convert,
    ),
    (
        "serve",
        " [MODEL ...]",
        "serve models over HTTP and WebSocket, with a web page",
        "OpenAI's protocol is under /v1, the page at /. Other machines need an API key: see `quarrel keys`.",
        _serve,
    ),
    (
        "llama-server",
        " ARGUMENTS",
        "serve one model by llama-server's command line and protocol, for launchers such as Ollama",
        "Its first line on standard error says which arguments it heeds; what it does not know is passed over.",
        _llama_server,
    ),
    (
        "ollama",
        " ACTION",
        "say which engine Ollama runs, put this one in its place, or put the old one back",
        "The old engine stays beside this one, and takes the models that this one cannot load.",
        _ollama,
    ),
    (
        "mcp",
        " [MODEL]",
        "offer a model to other programs as an MCP server, on standard input and output",
        "Its tools continue texts, answer messages and count tokens.",
        _mcp,
    ),
    ("keys", " ACTION", "make, list, rotate and revoke the server's API keys", "Only hashes of keys are stored.", _keys),
    (
        "embed",
        " [MODEL] --input FILE --to TARGET",
        "embed the texts of a file into a vector store or a file",
        "It resumes where it was interrupted, and sends nothing twice. Status 3: done, but some rows were bad.",
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
        "datasets",
        " ACTION [NAME]",
        "list, describe, delete and export the datasets of a vector store",
        "What is deleted is gone.",
        _datasets,
    ),
    (
        "prefill",
        " [MODEL]",
        "read long prompts for other processes",
        "Those are started with --prefill and this one's address, on other GPUs or hosts, with the same model and options,"
        " and generate what follows. A secret for both is QUARREL_PREFILL_KEY.",
        _prefill,
    ),
    (
        "flight-server",
        "",
        "run a stand-in for the Longbow vector store, in memory, for trying things out",
        "Its data is gone when it ends, and a search reads every row: it is not Longbow, but answers as that does, faults"
        " included.",
        _flight_server,
    ),
    (
        "completion",
        " SHELL",
        "print a script by which a shell completes commands and options",
        'Such as: eval "$(quarrel completion bash)".',
        _completion,
    ),
    ("doctor", "", "say what this machine can run, and what is missing", "", _doctor),
)
"""Name, what follows the options, summary, details, and the function that declares the options."""
