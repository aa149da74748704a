"""Every fuzzer, one after the other.

    python -m fuzz [--seconds 1800] [--seed 0]

Half of the time goes to ops (mlx a quarter, cpu and triton an eighth each), a tenth each to files, tokenizers, chats,
frames and HTTP.
"""

from __future__ import annotations

import subprocess
import sys

from fuzz.running import arguments

SHARES: tuple[tuple[float, tuple[str, ...]], ...] = (
    (1 / 4, ("fuzz.ops", "--backend", "mlx")),
    (1 / 8, ("fuzz.ops", "--backend", "cpu")),
    (1 / 8, ("fuzz.ops", "--backend", "triton")),
    (1 / 10, ("fuzz.gguf",)),
    (1 / 10, ("fuzz.tokenizer",)),
    (1 / 10, ("fuzz.chat",)),
    (1 / 10, ("fuzz.wire",)),
    (1 / 10, ("fuzz.http",)),
)


def main() -> int:
    """Command line; 1 if anything failed."""
    args = arguments(__doc__).parse_args()
    failed = False
    for share, command in SHARES:
        times = ("--seconds", str(args.seconds * share), "--seed", str(args.seed))
        print("+ python -m", *command, *times, flush=True)
        failed |= subprocess.run([sys.executable, "-m", *command, *times], check=False).returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
