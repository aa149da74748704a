"""`python -m quarrel`."""

from __future__ import annotations

import sys

from quarrel.cli import main

if __name__ == "__main__":
    sys.exit(main())
