"""What holds for every test."""

from __future__ import annotations

import signal

# A shell gives what it runs in the background SIGINT ignored, and children inherit that; Ctrl-C is tested here.
signal.signal(signal.SIGINT, signal.default_int_handler)
