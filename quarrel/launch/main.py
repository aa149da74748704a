"""`quarrel llama-server`: from its arguments to a server that answers, in as little time as can be."""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quarrel.errors import ConfigError, ModelNotFound, QuarrelError, RequestError
from quarrel.launch.arguments import SAMPLING, Arguments, parse
from quarrel.launch.old import hand_over, old_engine

if TYPE_CHECKING:
    from quarrel.launch.early import Early
    from quarrel.llm import LLM, LoadOptions
    from quarrel.server import Settings
    from quarrel.server.llama.tools import ToolServers

PORT, PARALLEL = 8080, 4
PROG = "quarrel llama-server"
HELP = """usage: quarrel llama-server --model FILE [llama-server's arguments]

The engine that Ollama and other launchers start, with llama-server's arguments, environment names (LLAMA_ARG_*), protocol
and log. The first line on standard error says which arguments it heeds. See docs/llama-server.md.
"""
_CACHES = {"f32": "auto", "f16": "float16", "bf16": "bfloat16"}
_HERE = ("localhost", "127.0.0.1", "[::1]")
_DAY, _GRACE = 86400.0, 5.0
LOOKS = 0.25
"""Seconds between two looks at whether the engine still runs."""
EXIT_FAULT = 70


def main(argv: Sequence[str] | None = None) -> int:
    """Until a signal; status 0. 1: the model cannot be loaded, or the port not be bound. 2: an argument has no value."""
    words = sys.argv[1:] if argv is None else list(argv)
    # OpenBLAS' threads spin while NumPy is imported, for 60 ms of a core; nothing here waits for its products.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: _say(f"{PROG}: {message}")
            args = parse(words, os.environ)
            return _run(args, words)
    except KeyboardInterrupt:
        return 130
    except ConfigError as error:
        _say(f"error: {PROG}: {error}")
        return 2
    except QuarrelError as error:  # launchers look for the first words
        _say(f"error loading model: {error}")
    except MemoryError:
        _say("error loading model: this machine has no memory left for it")
    except OSError as error:
        _say(f"error loading model: {error.filename or PROG}: {error.strerror or error}")
    return 1


def _run(args: Arguments, words: Sequence[str]) -> int:
    if "help" in args.switches:
        print(HELP, end="")
        return 0
    old, model = old_engine(args), source_of(args)
    if "version" in args.switches:
        from quarrel import __version__

        print(f"version: quarrel {__version__}", file=sys.stderr)
        return 0
    if model is None and is_router(args):
        from quarrel.launch.router import route

        return route(args, words)
    if "list_devices" in args.switches or model is None:
        return _discover(args, old, words)
    if (why := _for_the_old_one(args)) is not None:
        if old is not None:
            _say(f"{PROG}: {why}: {old} takes this model")
            hand_over(old, words, args)
        _say(f"{PROG}: {why}: it is left out")
    _say(f"{PROG}: {args.summary()}")
    gc.disable()  # what is made from here on stays
    try:
        return _load_and_serve(args, model, old, words)
    finally:
        gc.enable()


def _load_and_serve(args: Arguments, model: str, old: Path | None, words: Sequence[str]) -> int:
    options = load_options(args)
    from quarrel.launch.early import Early
    from quarrel.server.listening import bound

    port = port_of(args)
    first, *others = (bound(host, port) for host in hosts_of(args))
    early = Early(first)
    early.start()
    try:
        template = template_of(args)
        sampling_of(args)
        keys_of(args)
        for name in ("slot_save_path", "media_path"):
            folder_of(args, name)
        llm = _load(args, model, options)
    except Exception as error:  # whatever it is, the old engine may fare better
        early.close()
        for other in others:
            other.close()
        if old is None:
            raise
        what = str(error) if isinstance(error, QuarrelError) else f"it failed ({type(error).__name__}: {error})"
        _say(f"{PROG}: {what}: {old} takes this model")
        hand_over(old, words, args)
    return _serve(args, llm, early, others, template)


def port_of(args: Arguments) -> int:
    """The port; where Vertex AI starts it, that one says which."""
    given = args.number("port")
    if _on_vertex() and os.environ.get("AIP_HTTP_PORT", "").isdecimal():
        return int(os.environ["AIP_HTTP_PORT"])
    return PORT if given is None else given


def is_router(args: Arguments) -> bool:
    """Whether requests are to choose among models; without a model and without a word of others it is an error."""
    return any(args.text(name) is not None for name in ("models_dir", "models_preset", "models_max"))


def _discover(args: Arguments, old: Path | None, words: Sequence[str]) -> int:
    """What there is, before a model is named. The old engine knows more devices and its launcher's other libraries."""
    if old is not None:
        hand_over(old, words, args)
    from quarrel.launch import devices

    if "list_devices" in args.switches:
        devices.list_devices(os.environ)
        return 0
    devices.system_info(os.environ)
    _say(f"error: {PROG}: there is no model, wanted --model FILE")
    return 1


def _for_the_old_one(args: Arguments) -> str | None:
    """What no model can have here."""
    if len(args.loras) > 1:
        return f"{len(args.loras)} adapters at once (--lora) are more than one"
    return None


def load_options(args: Arguments) -> LoadOptions:
    """The options of `load`. Raises ConfigError."""
    from quarrel.llm.options import LoadOptions

    given: dict[str, Any] = {}
    parallel, ctx = args.number("parallel"), args.number("ctx")
    given["max_seqs"] = min(parallel, 256) if parallel and parallel > 0 else PARALLEL
    if ctx and ctx > 0:  # which all share that run at once, in equal parts or as each has need
        shared = parallel and parallel > 0 and "unified" not in args.switches
        given["n_ctx"] = max(1, ctx // given["max_seqs"]) if shared else ctx
    layers = args.text("gpu_layers") or "auto"
    if layers == "0" or args.text("device") == "none":
        given["backend"] = "cpu"
    elif layers.isdecimal():  # the output is one of them there
        given["gpu_layers"] = int(layers) - 1
    elif layers in ("auto", "-1"):
        given["gpu_layers"] = "auto"
    threads = args.number("threads")
    if threads is not None and threads > 0:
        given["threads"] = min(threads, 1024)
    if args.text("cache_k") is not None or args.text("cache_v") is not None:
        kinds = {_CACHES.get((args.text(name) or "f16").lower(), "int8") for name in ("cache_k", "cache_v")}
        given["kv_cache"] = kinds.pop() if len(kinds) == 1 else "float16"  # the wider one of two
    hub = args.text("model") is None and args.text("hf_repo") is not None
    beside = None if hub else "none"  # one from the hub brings its own
    given["mmproj"] = "none" if "no_mmproj" in args.switches else args.text("mmproj") or beside
    given["allow_image_urls"] = True
    if args.loras:
        given["adapters"] = {_ADAPTER: args.loras[0]}
    if "cpu_moe" in args.switches or args.number("n_cpu_moe"):
        given["experts_on_cpu"] = args.number("n_cpu_moe") or 1 << 20
    for name in ("rope_scaling", "rope_scale", "yarn_orig_ctx"):
        if (value := args.text(name)) is not None:
            numbers = {"rope_scale": args.real, "yarn_orig_ctx": args.number}
            given[name] = numbers[name](name) or None if name in numbers else value
    if args.text("draft") is not None and args.text("spec_type") in (None, "draft-simple"):
        given["draft"] = args.text("draft")
    elif args.text("draft") is None and args.text("spec_type") == "draft-mtp":
        given["draft"] = "mtp"
    try:
        return LoadOptions(**given)
    except RequestError as error:
        raise ConfigError(str(error)) from error


_ADAPTER = "lora"


def _load(args: Arguments, model: str, options: LoadOptions) -> LLM:
    """The model, with at most the context that it was made for, as llama-server loads it."""
    from dataclasses import replace

    from quarrel.llm.facts import file_facts
    from quarrel.llm.loading import load_with

    if (chosen := args.number("main_gpu")) is not None:
        choose_gpu(chosen, os.environ)
    try:
        return load_with(model, options)
    except QuarrelError as error:
        if isinstance(error, RequestError) and error.field == "n_ctx" and options.n_ctx is not None:
            most = file_facts(model).count("context_length")
            if most and most < options.n_ctx:
                _say(f"llama_context: n_ctx_seq ({options.n_ctx}) > n_ctx_train ({most}) -- the context is {most}")
                return _load(args, model, replace(options, n_ctx=most))
        if options.draft is None:
            raise
        # It changes no text, only how soon it is there.
        _say(f"{PROG}: {error}: it goes on without {options.draft}")
        return _load(args, model, replace(options, draft=None))
    except FileNotFoundError as error:
        raise ModelNotFound(f"{error.filename}: {error.strerror}") from error


def choose_gpu(number: int, environment: MutableMapping[str, str]) -> None:
    """The only one that CUDA will show: the one of that number among those that it would."""
    names = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if number >= 0 and (not names or number < len(names)):
        environment["CUDA_VISIBLE_DEVICES"] = names[number] if names else str(number)


def _serve(args: Arguments, llm: LLM, early: Early, beside: Sequence[socket.socket], template: str | None) -> int:
    from quarrel.launch.report import lines

    layers = len(getattr(llm.spec, "layers", ()) or ()) or getattr(llm.spec, "n_layers", 0)
    for line in lines(llm.explain(), layers):
        _say(line)
    early.loaded()
    if template is None and llm.tokenizer.chat_template is None:
        template = "chatml"  # as llama-server has it
    _listening(early.listener)
    from quarrel.server import serve
    from quarrel.server.llama.app import build

    settings = settings_of(args, early.listener, template, (name_of(args),), llm.explain().max_seqs)
    options = load_options(args)

    def again(source: str) -> LLM:
        made = _load(args, source_of(args) or "", options)
        watched[:] = [made]
        return made

    watched = [llm]
    with tools_of(args) as tools:
        server = build(settings, llm, again, tools=tools)
        threading.Thread(target=end_with, args=(watched,), name="fault", daemon=True).start()
        gc.enable()
        serve(server, settings, before=early, beside=beside)
    return 0


def _listening(listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    _say(f"main: model loaded\nmain: server is listening on http://{host}:{port}")


def settings_of(
    args: Arguments, listener: socket.socket, template: str | None, models: tuple[str, ...], max_seqs: int, **more: Any
) -> Settings:
    """Of the server. models: what they are called. more: fields that the arguments do not say."""
    from quarrel.server import Rates, Settings
    from quarrel.server.settings import DATA_DIR

    host, port = listener.getsockname()[:2]
    loopback = all(Settings(host=each).loopback for each in hosts_of(args))
    idle = args.number("sleep_idle")
    return Settings(
        models=models,
        host=host,
        port=port,
        llama=True,
        chat_template=template,
        api_keys=keys_of(args),
        data_dir=DATA_DIR / "llama-server",  # a launcher knows nothing of keys that were made for `quarrel serve`
        hosts=() if loopback else ("*",),  # a page whose name leads here must not get in
        open_access=True,
        max_seqs=max_seqs,
        draft_max=min(max(args.number("draft_max") or Settings.draft_max, 1), 16),
        queue=1 << 16,
        timeout=_DAY,
        grace=_GRACE,
        body_limit=256 << 20,
        rates=Rates(0, 0, 0, 0),
        adapter=_ADAPTER if args.loras else None,
        adapter_file=args.loras[0] if args.loras else "",
        adapter_applied="lora_unapplied" not in args.switches,
        context_shift="context_shift" in args.switches,
        keep=args.number("keep") or 0,
        slot_save_path=folder_of(args, "slot_save_path"),
        media_path=folder_of(args, "media_path"),
        origins=origins_of(args),
        verbose="verbose" in args.switches,
        thinking=(args.text("reasoning") or "auto").lower() not in ("off", "disable", "false", "0"),
        slots="no_slots" not in args.switches,
        page="no_page" not in args.switches,
        metrics="metrics" in args.switches,
        proxy="proxy" in args.switches,
        pooling=(args.text("pooling") or "").lower(),
        aliases=listed(args.text("alias")),
        tags=listed(args.text("tags")),
        keep_alive=float(idle) if idle is not None and idle >= 0 else None,
        predict_route=os.environ.get("AIP_PREDICT_ROUTE", "/predict") if _on_vertex() else "",
        sampling=sampling_of(args),
        media_marker=os.environ.get("LLAMA_MEDIA_MARKER") or Settings().media_marker,
        **more,
    )


def sampling_of(args: Arguments) -> Any:
    """What requests are answered with that say nothing themselves. Raises ConfigError."""
    given = {name: _typed(value) for name, value in args.values.items() if name in SAMPLING}
    if "ignore_eos" in args.switches:
        given["ignore_eos"] = True
    if "samplers" in given:
        given["samplers"] = str(given["samplers"]).split(";")
    if not given:
        return None
    from quarrel.server.errors import Refused
    from quarrel.server.llama.bodies import defaults_of

    try:
        return defaults_of(given)
    except Refused as error:
        name, sentence = error.param, str(error)
        raise ConfigError(sentence if name is None else sentence.replace(name, args.flag(name), 1)) from None


def _on_vertex() -> bool:
    """Whether Google's Vertex AI has started it."""
    return os.environ.get("AIP_MODE") == "PREDICTION"


def listed(text: str | None) -> tuple[str, ...]:
    """What a list with commas holds."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def hosts_of(args: Arguments) -> tuple[str, ...]:
    """The addresses to listen on."""
    return listed(args.text("host")) or ("127.0.0.1",)


def tools_of(args: Arguments) -> AbstractContextManager[ToolServers | None]:
    """The MCP servers of the arguments, which run while it is entered. Raises ConfigError for what names none."""
    text, path = args.text("mcp_json"), args.text("mcp_config")
    if text is None and path is None and args.text("tools") is None:
        return nullcontext()
    from quarrel.server.llama.tools import ToolServers, servers_of

    try:
        found = servers_of(Path(path).read_text("utf-8"), f"--mcp-servers-config {path}") if path is not None else {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--mcp-servers-config {path}: {getattr(error, 'strerror', None) or error}") from error
    return ToolServers({**found, **(servers_of(text, "--mcp-servers-json") if text is not None else {})})


def end_with(watched: Sequence[LLM]) -> None:
    """Ends the process when the engine of the model that is loaded now has stopped for good: a launcher starts another."""
    while (fault := watched[0].fault) is None:
        time.sleep(LOOKS)
    _say(f"error: {PROG}: {fault}")
    os._exit(EXIT_FAULT)


def folder_of(args: Arguments, name: str) -> Path | None:
    """A folder that an option names, which must be there."""
    given = args.text(name)
    if given is not None and not Path(given).is_dir():
        raise ConfigError(f"{args.flag(name)} {given}: there is no such folder: make it first")
    return None if given is None else Path(given)


def origins_of(args: Arguments) -> tuple[str, ...]:
    """Of web pages that may call, as patterns; `localhost` is any page of this machine. By default these alone, or with a
    key to call with, which a page has to know, all."""
    here = tuple(f"{scheme}://{host}{port}" for scheme in ("http", "https") for host in _HERE for port in ("", ":*"))
    given = listed(args.text("origins")) or ("*" if keys_of(args) else "localhost",)
    return tuple(pattern for origin in given for pattern in (here if origin == "localhost" else (origin,)))


def name_of(args: Arguments) -> str:
    """What requests may call the model."""
    aliases = sorted(listed(args.text("alias")))
    return aliases[0] if aliases else Path(args.text("model") or args.text("hf_repo") or "").name.removesuffix(".gguf")


def source_of(args: Arguments) -> str | None:
    """The model's file, or its name in the Hugging Face hub."""
    repo, file = args.text("hf_repo"), args.text("hf_file")
    if args.text("model") is not None or repo is None:
        return args.text("model")
    return f"hf://{repo}" if file is None else f"hf://{repo.partition(':')[0]}:{file}"


def keys_of(args: Arguments) -> tuple[str, ...]:
    """Those by which callers are let in: of --api-key, and of --api-key-file, one in a line. Raises ConfigError."""
    path, found = args.text("api_key_file"), listed(args.text("api_key"))
    if path is None:
        return found
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path}: {getattr(error, 'strerror', None) or error}") from error
    if not any(line.strip() for line in lines):  # never "no keys": that would open the server
        raise ConfigError(f"--api-key-file {path} holds no key")
    return (*found, *(line.strip() for line in lines if line.strip()))


def template_of(args: Arguments) -> str | None:
    """A built-in template's name or Jinja. One that is known to llama.cpp alone is the file's own."""
    path, given = args.text("chat_template_file"), args.text("chat_template")
    if path is not None:
        try:
            return Path(path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--chat-template-file {path}: {getattr(error, 'strerror', None) or error}") from error
    if given is None or "{{" in given or "{%" in given:
        return given
    from quarrel.tokenizer.templates import BUILTIN_TEMPLATES

    name = {"llama3": "llama-3", "phi3": "phi-3"}.get(given, given)
    if name in BUILTIN_TEMPLATES:
        return name
    _say(f"{PROG}: --chat-template {given} is not known here, the model's own is taken")
    return None


def _typed(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _say(line: str) -> None:
    with suppress(OSError, ValueError):  # nobody reads it, which is no reason not to serve
        print(line, file=sys.stderr, flush=True)
