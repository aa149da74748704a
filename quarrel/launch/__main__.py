"""`python -m quarrel.launch`: llama-server's command line, without the other commands'."""

from __future__ import annotations

import sys

from quarrel.launch.main import main

if __name__ == "__main__":
    sys.exit(main())
