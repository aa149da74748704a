"""One model on several devices: a process for each, which holds a shard and runs every step with the others."""

from quarrel.parallel.step import compile_shared
from quarrel.parallel.team import Team, Work

__all__ = ["Team", "Work", "compile_shared"]
