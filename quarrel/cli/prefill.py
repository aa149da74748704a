"""`quarrel prefill`: reads long prompts for other processes, in the foreground."""

from __future__ import annotations

import argparse
import ipaddress
import time
from functools import partial

from quarrel.cli.flags import UsageError, load_options
from quarrel.cli.prompt import model_of
from quarrel.cli.terminal import line, write_json
from quarrel.env import read_environment
from quarrel.errors import ConfigError

GRACE, POLL = 0.5, 0.2


def run(args: argparse.Namespace) -> int:
    """Until a signal; status 0."""
    if not 0 <= args.port <= 65535:
        raise UsageError(f"the port is {args.port}, wanted 0 to 65535")
    key = read_environment().prefill_key
    if not key and not _is_loopback(args.host):
        raise ConfigError(
            f"{args.host} can be reached by other machines and there is no secret: set QUARREL_PREFILL_KEY here and for"
            " those that decode, or bind 127.0.0.1"
        )
    options = load_options(args, max_seqs=args.parallel)
    from quarrel.flight.handover import Giver
    from quarrel.flight.segments import Borrower
    from quarrel.llm import load_with
    from quarrel.llm.prompt_reader import read_prompt

    with load_with(model_of(args), options) as llm:
        llm.prefixes.check()
        borrower = Borrower(llm.prefixes.pin, llm.prefixes.room())
        giver = Giver(args.host, args.port, partial(read_prompt, llm, borrower=borrower), key)
        try:
            address = f"grpc://{args.host}:{giver.port}"
            if args.json:
                write_json({"prefill": address})
            else:
                line(f"prompts are read at {address}")
            while True:
                time.sleep(POLL)  # a wait without an end would notice no signal on some systems
                borrower.tidy()
        except KeyboardInterrupt:
            return 0
        finally:
            giver.end(GRACE)
            borrower.close()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
