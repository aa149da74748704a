"""`python -m quarrel`, and what the command `quarrel` runs."""

from __future__ import annotations

import gc
import sys


def start() -> int:
    """The command line. Ctrl-C while it is still being imported ends it as later on, without a traceback."""
    gc.disable()  # until the command runs: what is imported stays
    try:
        if sys.argv[1:2] == ["llama-server"]:  # started for every model: other commands' words would take a while
            return llama_server(sys.argv[2:])
        from quarrel.cli import main

        return main()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    finally:
        gc.enable()


def llama_server(words: list[str] | None = None) -> int:
    """What the command `quarrel-llama-server` runs. words: the command line's by default."""
    from quarrel.launch.main import main

    return main(words)


if __name__ == "__main__":
    sys.exit(start())
