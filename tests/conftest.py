"""What holds for every test."""

from __future__ import annotations

import signal

from hypothesis import settings

# A shell gives what it runs in the background SIGINT ignored, and children inherit that; Ctrl-C is tested here.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine takes as long as it takes: no test fails by its time alone.
settings.register_profile("quarrel", deadline=None)
settings.load_profile("quarrel")
