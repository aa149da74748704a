"""`quarrel serve`: the server, in the foreground."""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from quarrel.cli.flags import UsageError, in_flags, load_options
from quarrel.cli.options import CHAT, STORIES
from quarrel.cli.request import template_of
from quarrel.cli.terminal import note
from quarrel.engine import Service
from quarrel.env import read_environment
from quarrel.errors import ConfigError, QuarrelError, RequestError, installing
from quarrel.llm import LoadOptions, Model, check_context, find, load_with
from quarrel.process import open_remote
from quarrel.toolbox import Toolbox, server_of

_LEAST = {
    **dict.fromkeys(("parallel", "queue", "connections", "sockets_per_model", "body_limit"), 1),
    **dict.fromkeys(("rate", "prompt_rate", "output_rate", "streams"), 0),
}
"""Of options, where it is more than the type says."""


def run(args: argparse.Namespace) -> int:
    """Until a signal; status 0."""
    if args.log_format == "text":
        return _run(args, None)
    from quarrel.server.logs import json_stderr

    with json_stderr() as stream:
        try:
            return _run(args, stream)
        except (UsageError, QuarrelError) as error:  # here, where its line becomes JSON too
            note(f"quarrel serve: {in_flags(error, args.flags)}")
            return 2 if isinstance(error, UsageError) else 1
        except Exception:
            traceback.print_exc()
            return 1


def _run(args: argparse.Namespace, json_lines: TextIO | None) -> int:
    try:
        from quarrel.server import Rates, Settings, build, serve
        from quarrel.server.settings import cache_variables, from_environment
    except ImportError as error:
        raise QuarrelError(f"the server needs {error.name}: {installing('server')}") from error
    models = (CHAT, STORIES) if args.default_model == CHAT else (args.default_model,)
    given: dict[str, Any] = {"models": models, **from_environment(os.environ)}
    os.environ.update(cache_variables(os.environ))
    flags = {
        "models": (*args.names, *(args.model or [])) or None,
        "models_dir": None if args.models_dir is None else _folder("--models-dir", args.models_dir),
        "chat_template": template_of(args),
        "host": args.host,
        "port": args.port,
        "metrics_port": args.metrics_port,
        "data_dir": None if args.data_dir is None else Path(args.data_dir).expanduser(),
        "origins": None if args.origin is None else tuple(args.origin),
        "trusted_proxies": tuple(a.strip() for given in args.trusted_proxies or () for a in given.split(",") if a.strip()),
        "hosts": None if args.host_name is None else tuple(args.host_name),
        "shared_limits": args.shared_limits,
        "slot_save_path": None if args.slot_save_path is None else _folder("--slot-save-path", args.slot_save_path),
    }
    given |= {name: value for name, value in flags.items() if value is not None}
    if args.models_dir is not None and flags["models"] is None and "MODEL_PATH" not in os.environ:
        given["models"] = ()
    for name, least in _LEAST.items():
        if getattr(args, name) < least:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name)}, wanted {least} or more")
    for name, seconds in (("timeout", args.timeout), ("grace", args.grace), ("keep-alive", args.keep_alive or 1)):
        if not 0 < seconds <= 86400:
            raise UsageError(f"--{name} is {seconds:g}, wanted seconds up to 86400")
    options = load_options(args, max_seqs=args.parallel)
    if args.step_timeout is not None and not 0 <= args.step_timeout <= 86400:
        raise UsageError(f"--step-timeout is {args.step_timeout:g}, wanted seconds up to 86400, or 0")
    Service(speculate=args.lookup, draft=args.draft_max)  # refuses what is out of range before anything is loaded
    settings = Settings(
        **given,
        open_access=args.open_access,
        strict_api=args.strict_api,
        ollama=args.ollama_compat,
        max_seqs=args.parallel,
        queue=args.queue,
        timeout=args.timeout,
        grace=args.grace,
        keep_alive=args.keep_alive,
        budget=_budget(options),
        lookup=args.lookup,
        draft_max=args.draft_max,
        connections_per_address=args.connections,
        sockets_per_model=args.sockets_per_model,
        body_limit=args.body_limit << 20,
        rates=Rates(args.rate, args.prompt_rate, args.output_rate, args.streams),
    )

    for name in settings.models:
        if not name.startswith("hf://"):  # what is downloaded may take its time, what is here is here or not
            find(name)
    if options.n_ctx is not None and settings.models and not settings.models[0].startswith("hf://"):
        check_context(settings.models[0], options)  # which needs no more than the file's head
    step = math.inf if args.step_timeout == 0 else args.step_timeout

    def open_model(source: str, adapters: Mapping[str, str] | None = None, memory: int | None = None) -> Model:
        wanted = replace(options, adapters={**(options.adapters or {}), **adapters}) if adapters else options
        wanted = wanted if memory is None else replace(wanted, memory=memory)
        try:
            if args.engine_process:
                return open_remote(source, wanted, step_seconds=step, stop=server.dispatcher.models.stopped)
            return load_with(source, wanted)
        except RequestError as error:  # about the command line, not about a request
            raise ConfigError(in_flags(error, args.flags)) from error

    servers = {words: server_of(words) for words in args.mcp or ()}
    with Toolbox(servers) if servers else nullcontext() as toolbox:
        server = build(settings, open_model, tools=toolbox)
        if not server.keys.keys():
            with suppress(OSError):  # nobody reads it, which is no reason not to serve
                note("quarrel serve: no API keys: everybody who reaches the port may use it (see quarrel keys create)")
        with _logs(json_lines):
            serve(server, settings)
    return 0


def _budget(options: LoadOptions) -> int | None:
    """Bytes that all models share, where --memory or QUARREL_MEMORY gives bytes; a share is one of what is free then."""
    given = options.memory if options.memory is not None else read_environment().memory
    return None if given is None or isinstance(given, float) else given


def _folder(option: str, given: str) -> Path:
    path = Path(given).expanduser()
    if not path.is_dir():
        raise UsageError(f"{option} {given!r} is no folder")
    return path


@contextmanager
def _logs(json_lines: TextIO | None) -> Iterator[None]:
    """The server's log, on standard error. json_lines: where lines of JSON go, those of all loggers."""
    from quarrel.server.logs import JSONLines, Later

    formatter = logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s") if json_lines is None else JSONLines()
    stream = json_lines or sys.stderr
    handlers: list[logging.Handler] = [logging.StreamHandler(stream), Later(stream)]
    loggers = [logging.getLogger(name) for name in ("quarrel.server", "quarrel.access")]
    if json_lines is not None:
        handlers.append(logging.StreamHandler(json_lines))
        loggers.append(logging.getLogger())
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger, handler in zip(loggers, handlers, strict=True):
        handler.setFormatter(formatter)
        logger.addHandler(handler)
        if logger.name != "root":
            logger.setLevel(logging.INFO)
            logger.propagate = False
    try:
        yield
    finally:
        for logger, handler, (level, propagate) in zip(loggers, handlers, before, strict=True):
            logger.removeHandler(handler)
            handler.close()
            logger.setLevel(level)
            logger.propagate = propagate
