"""`python -m quarrel`, and what the command `quarrel` runs."""

from __future__ import annotations

import sys


def start() -> int:
    """The command line. Ctrl-C while it is still being imported ends it as later on, without a traceback."""
    try:
        from quarrel.cli import main

        return main()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def llama_server() -> int:
    """What the command `quarrel-llama-server` runs."""
    from quarrel.launch.main import main

    return main()


if __name__ == "__main__":
    sys.exit(start())
